"""Import and export of other software's formats."""
