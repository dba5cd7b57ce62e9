"""Commands that are killed at random moments, run again, and compared with an undisturbed run."""
