"""Local and remote files: retries, atomic writes, line reading, format detection."""
