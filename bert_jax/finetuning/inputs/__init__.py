"""Task input: files, rows, bad rows, splits, and padded batches of encoded rows."""
