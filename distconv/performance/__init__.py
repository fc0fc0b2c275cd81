"""How long a training step takes under a partition, and which partition of each layer is the fastest."""
