"""fairseq scorers, registered by ``plugin``."""
