"""Agreement: checks that all ranks hold equal data where one process has one tensor: inputs, parameters and buffers."""
