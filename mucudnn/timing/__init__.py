"""How launches are timed, and where the times are kept."""
