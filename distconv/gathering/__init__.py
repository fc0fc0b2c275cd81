"""What is gathered for a script: where that may happen, whether it fits, and how much it was."""
