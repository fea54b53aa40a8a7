"""fairseq criteria; importing this package registers them."""

from fairseq_sg.criterions import classification, cross_entropy_orthogonality  # noqa: F401
