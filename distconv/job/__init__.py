"""Runs a script as a job of many ranks: launcher, script and data."""
