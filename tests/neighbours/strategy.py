"""The script's own module of this name."""

OWNER = "the script's strategy"
