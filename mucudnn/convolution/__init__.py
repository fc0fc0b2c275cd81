"""Describes a convolution: its problem, geometry and parts."""
