"""A 3-D U-Net on volumes of fractals, as one device's script: on ranks, and predicted for thousands of GPUs."""
