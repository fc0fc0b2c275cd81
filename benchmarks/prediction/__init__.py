"""What the performance model predicts, beside what was measured."""
