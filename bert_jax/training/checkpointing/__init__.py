"""Checkpoints of a run: saving, verifying, loading."""
