"""Files of a script on many ranks: the first rank's are real, every other rank has a private layer above them."""
