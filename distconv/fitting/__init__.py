"""A limit of memory (`--memory`): models compute again in backward, move tensors, or compute in parts, to fit it."""
