"""fairseq models; importing this package registers them."""

from fairseq_sg.models import sg_encoder, sg_lstm, sg_transformer, sg_transformer_lm  # noqa: F401
