"""Reports on runs: one HTML file with curves and tables, or an image of the curves."""
