"""The demo: two brain-segmentation scripts, plain and through the library."""
