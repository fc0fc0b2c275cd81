"""What would become of a model or a script on many ranks, seen in one process without them."""
