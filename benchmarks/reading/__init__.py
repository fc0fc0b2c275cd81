"""Volumes that each rank reads its part of: time and bytes."""
