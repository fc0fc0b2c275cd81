"""What is killed, filled up, torn or late, and what must be left of a job and of its files."""
