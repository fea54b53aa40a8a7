"""Speed and memory of operators, training steps, decoding and data preparation: ``benchmarks/README.md``."""
