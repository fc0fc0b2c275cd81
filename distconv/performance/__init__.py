"""The performance model: the time of a training step under a partition, and the fastest partition of each layer."""
