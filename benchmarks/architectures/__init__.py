"""Networks of papers that benchmarks and tests measure."""
