"""Distributed tensors: their mesh and layout, the errors about them, and the gathers of a script."""
