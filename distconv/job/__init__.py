"""Runs a script as a job of many ranks.

`launcher` starts the ranks, each of which calls `script`; `supervisor` and `watch` end them together. `surroundings`
and `one_process` let the script see a single process, and `data` gives each rank its part of the script's batches.
"""
