"""Arrays in files, of which a rank reads its part only."""
