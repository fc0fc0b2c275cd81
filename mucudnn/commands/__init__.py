"""The commands of `python -m mucudnn`, one file each."""
