"""How times of launches come to be, and where they are kept."""
