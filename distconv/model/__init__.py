"""The model's side: calls, parameters, gradients, checkpoints."""
