"""What was chosen, as records, files and tables."""
