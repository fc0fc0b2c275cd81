"""Models that people use, on ranks against one process."""
