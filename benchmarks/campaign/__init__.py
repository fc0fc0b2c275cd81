"""Random networks on ranks and in turn, against one process."""
