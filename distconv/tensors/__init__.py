"""Distributed tensors: their mesh, their layout on it, what an error says of them, and when they are gathered."""
