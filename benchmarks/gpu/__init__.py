"""What is measured on a GPU, from the first questions to whole networks."""
