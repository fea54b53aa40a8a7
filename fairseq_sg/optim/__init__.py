"""fairseq optimizers; importing this package registers them."""

from fairseq_sg.optim import torch_adam  # noqa: F401
