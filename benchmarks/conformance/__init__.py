"""The same layers, cut in the same ways, by several libraries: which results are those of one process."""
