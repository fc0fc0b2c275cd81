"""Whether all ranks hold the same, where one process would have one tensor: what enters, parameters, buffers."""
