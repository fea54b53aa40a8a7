"""fairseq scorers; importing this package registers them."""

from fairseq_sg.scoring import exact_match  # noqa: F401
