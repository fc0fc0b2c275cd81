"""Gathering for a script: where it is allowed, whether the result fits into memory, and how much was gathered."""
