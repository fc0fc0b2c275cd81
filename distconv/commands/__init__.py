"""The commands of `python -m distconv`, one module each: `add(commands)` adds its options and sets its function."""
