"""The job's side: launcher, script, data."""
