"""Gathers whole tensors for a script where that is allowed and they fit into memory, and counts the bytes."""
