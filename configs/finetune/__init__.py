"""Configs of fine-tuning, one file a kind of task."""
