"""Reports of what was chosen: records, files and tables."""
