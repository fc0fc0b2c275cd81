"""A problem and a limit in, a plan out."""
