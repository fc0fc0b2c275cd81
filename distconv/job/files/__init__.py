"""Files of a script on many ranks: those of the first rank are real, every other rank has a private layer above them."""
