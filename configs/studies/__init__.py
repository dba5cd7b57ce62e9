"""Configs of studies: many runs, one table."""
