"""Fine-tuning: tasks, what a model reads of them, their metrics, and the runs that train on them."""
