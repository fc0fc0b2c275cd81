"""Agreement: checks that all ranks have equal data where one process has one tensor: inputs, parameters and buffers."""
