"""Training steps, scripts and decoders on ranks: time, memory and messages, beside one process and other libraries."""
