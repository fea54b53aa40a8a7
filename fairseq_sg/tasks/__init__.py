"""fairseq tasks; importing this package registers them."""

from fairseq_sg.tasks import sg_classification, sg_language_modeling, sg_translation  # noqa: F401
