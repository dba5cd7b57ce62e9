"""Files on disks and in object stores: paths with retries, atomic writes, lines, formats."""
