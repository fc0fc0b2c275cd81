"""The steps of benchmarks/gpu/fifteen.py: `measure` of each adds figures, and returns whether it came to its end."""
