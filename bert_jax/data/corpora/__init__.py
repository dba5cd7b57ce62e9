"""Documents of a corpus: files and folders, object stores, TFDS, stdin; text, JSON lines, tables."""
