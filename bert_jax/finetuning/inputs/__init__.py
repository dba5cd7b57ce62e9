"""The files of tasks: rows, bad rows, splits, and padded batches of encoded rows."""
