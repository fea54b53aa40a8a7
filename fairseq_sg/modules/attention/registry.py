"""The registry of attentions; see ``build_attention`` in this package."""

from fairseq_sg.registry import Registry

ATTENTION_REGISTRY = Registry("attention", "--encoder-attention, --decoder-attention, --cross-attention")
register_attention = ATTENTION_REGISTRY.register
