"""Whole networks: their layers and plans."""
