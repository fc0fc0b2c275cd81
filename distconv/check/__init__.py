"""Check: predicts in one process what a model or a script would do on many ranks."""
