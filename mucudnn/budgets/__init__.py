"""Workspace by moment of a step, and in total."""
