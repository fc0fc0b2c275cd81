"""Reading: arrays in files, of which a rank reads only its part."""
