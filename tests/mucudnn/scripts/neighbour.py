"""Found only if the script's folder is on the path."""
