"""Single convolutions: time, memory, exactness, and what the detour through Python costs."""
