"""Products of matrices: linear layers, batches of products, and distances."""
