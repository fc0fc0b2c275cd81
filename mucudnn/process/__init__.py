"""What a process has once: locks that a fork renews, replaced attributes, bounded tables, and what it has warned of."""
