"""A limit of all memory: what models keep, compute again, move away or compute in parts to fit it."""
