"""Whole networks: their layers, plans and pictures."""
