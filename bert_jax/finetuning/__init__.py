"""Fine-tuning: tasks, their model inputs and metrics, and training runs."""
