"""fairseq models; importing this package registers them."""

from fairseq_sg.models import sg_encoder, sg_lstm, sg_transformer  # noqa: F401
