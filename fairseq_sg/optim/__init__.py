"""fairseq optimizers, registered by ``plugin``."""
