"""What moves between ranks."""
