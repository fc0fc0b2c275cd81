"""Whole networks: their layers."""
