"""The job: launcher, script and data."""
