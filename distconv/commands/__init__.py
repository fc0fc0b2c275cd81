"""The commands of `python -m distconv`, a module each: `add(commands)` adds its options and sets its function."""
