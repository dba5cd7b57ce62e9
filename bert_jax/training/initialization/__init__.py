"""Initialization of a run from another checkpoint: its sizes, its parameters, and their growth."""
