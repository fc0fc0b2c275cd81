"""What planning costs, what it finds, and the peak memory of a step."""
