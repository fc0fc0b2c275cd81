"""The commands of `python -m distconv`, one module each: its texts for `--help`, its options, and its function."""
