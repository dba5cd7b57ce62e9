"""Studies: many runs and their table."""
