"""fairseq models; importing this package registers everything (``plugin``)."""

import fairseq_sg.plugin  # noqa: F401
