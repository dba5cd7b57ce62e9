"""Paths on disks and in stores, atomic writes, lines of text, versions of files, provenance."""
