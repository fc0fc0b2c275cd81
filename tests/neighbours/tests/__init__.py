"""The script's own package of this name."""

OWNER = "the script's tests"
