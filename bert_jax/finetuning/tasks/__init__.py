"""The tasks of fine-tuning, one or two modules each."""
