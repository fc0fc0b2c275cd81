"""The model: its calls, parameters, gradients and checkpoints."""
