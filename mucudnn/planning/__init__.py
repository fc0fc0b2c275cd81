"""Planning: from a problem and a limit to a plan."""
