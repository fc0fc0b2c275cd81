"""What torch calls."""
