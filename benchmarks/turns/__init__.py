"""Parts in turn beside one process: memory, time and numbers."""
