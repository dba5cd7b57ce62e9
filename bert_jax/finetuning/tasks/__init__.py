"""Fine-tuning tasks, one or two modules each."""
