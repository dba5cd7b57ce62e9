"""Kinds of tasks, one class each."""
