"""The registry of feedforward layers; see ``build_feedforward`` in this package."""

from fairseq_sg.registry import Registry

FEEDFORWARD_REGISTRY = Registry("feedforward layer", "--encoder-ffn, --decoder-ffn")
register_feedforward = FEEDFORWARD_REGISTRY.register
