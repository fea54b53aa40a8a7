"""Speed and memory of operators, training steps, decoding and data preparation: ``benchmarks/README.md``."""

import logging

# Before fairseq, a module of which otherwise shows all that any library logs, such as locks of the compiler.
logging.basicConfig(level=logging.WARNING)
