"""torch's own samples of its operators, on shards against one process."""
