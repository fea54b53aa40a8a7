"""``sg_dnc``: the differentiable neural computer, plain or with masks, de-allocation and sharpness (Graves et al. 2016;
Csordás & Schmidhuber 2019; Csordás 2023, chapter 2).

    words  ->  their bits, or learned embeddings  ->  DNC  ->  y_t

``--task sg_tagging`` reads every y_t, ``sg_classification`` that of the end symbol. ``modules.memory`` has the
equations.
"""

from dataclasses import dataclass, field

import torch
from fairseq.models import BaseFairseqModel
from torch import Tensor, nn

from fairseq_sg import ranges
from fairseq_sg.errors import UsageError
from fairseq_sg.models.architectures import DNC_ARCHITECTURES
from fairseq_sg.models.config import Configuration, refuse_unused_options
from fairseq_sg.models.labels import (
    InputConfig,
    labels_words,
    moved_back,
    moved_left,
    outputs_of,
    word_embedding,
)
from fairseq_sg.modules import compilation
from fairseq_sg.modules.memory import CONTROLLER_REGISTRY, DNC, Record

#: Letter of ``--memory-variant`` -> the option that it stands for.
SWITCHES = {"m": "memory_mask", "d": "memory_deallocate", "s": "memory_sharpen"}


@dataclass
class SGDNCConfig(InputConfig):
    """Sizes and switches of ``sg_dnc``."""

    embed_dim: int | None = field(
        default=None,
        metadata={
            "help": "width of the embeddings (default: 256 for learned ones, and bits as they are)",
            "least": 1,
        },
    )
    controller: str = field(default="lstm", metadata={"help": "controller of the memory: 'lstm' or 'feedforward'"})
    controller_dim: int = field(default=256, metadata={"help": "width of a layer of the controller", "least": 1})
    controller_layers: int = field(default=1, metadata={"help": "layers of the controller", "least": 1})
    memory_cells: int = field(
        default=256,
        metadata={"help": "N, cells of the memory; may differ at test time (--model-overrides)", "least": 1},
    )
    memory_width: int = field(default=64, metadata={"help": "W, numbers of a cell", "least": 1})
    read_heads: int = field(default=4, metadata={"help": "R, read heads", "least": 1})
    memory_mask: bool = field(default=False, metadata={"help": "M: masks in look-ups by content"})
    memory_deallocate: bool = field(default=False, metadata={"help": "D: de-allocation erases the content of a cell"})
    memory_sharpen: bool = field(default=False, metadata={"help": "S: sharpness of reads through links"})
    memory_variant: str | None = field(
        default=None,
        metadata={"help": "all switches at once, by their letters: 'mds', 'ds', …; 'dnc' for none (default: dnc)"},
    )
    mask_floor: float = field(default=0.0, metadata={"help": "δ, the least value of a mask", "least": 0, "below": 1})
    mask_bias: float = field(
        default=1.0,
        metadata={"help": "start of the biases of masks: 1 in the text, 0 in the released code"},
    )
    usage_gradient: bool = field(
        default=False,
        metadata={"help": "gradients through the write weights into the usage, which the released code cuts"},
    )
    interface_clamp: float = field(
        default=20.0,
        metadata={
            "help": "largest magnitude of a number of the interface, as in the released code; 0: none",
            "least": 0,
        },
    )
    compile: str = field(
        default="none",
        metadata={
            "help": "torch.compile of a step in training; see docs/memory.md",
            "choices": (compilation.NONE, "default"),
        },
    )


configuration = Configuration(SGDNCConfig, (CONTROLLER_REGISTRY,), DNC_ARCHITECTURES)


def resolve(cfg):
    """A checked configuration, its switches filled in. Raises UsageError for one that makes no sense."""
    config = configuration.read(cfg)
    ranges.check(type(config), vars(config))
    used = CONTROLLER_REGISTRY.find(config.controller).option_classes(config)
    refuse_unused_options(config, configuration.registries, used)
    variant, single = config.memory_variant, [name for name in SWITCHES.values() if getattr(config, name)]
    if variant is not None:
        letters = "" if variant == "dnc" else variant
        if len(set(letters)) != len(letters) or not set(letters) <= set(SWITCHES) or not variant:
            raise UsageError(f"--memory-variant is {variant!r}: letters of 'mds', each at most once, or 'dnc'")
        if single:
            raise UsageError(f"--memory-variant sets all three switches: leave {ranges.flag(single[0])} out")
        for letter, name in SWITCHES.items():
            setattr(config, name, letter in letters)
    if not config.memory_mask:
        for name in ("mask_floor", "mask_bias"):
            if getattr(config, name) != configuration.dataclass.declared[name]:
                raise UsageError(f"{ranges.flag(name)} is for masks: add --memory-mask, or leave it out")
    return config


@configuration.register("sg_dnc", resolve)
class SGDNC(BaseFairseqModel):
    """Embedding and DNC.

    Args:
        config: a resolved configuration.
        embedding: of the source's words.
        padding: the number of padding.
        outputs: numbers of y_t.
        every: whether every y_t is read, or the last one.
    """

    def __init__(self, config, embedding: nn.Module, padding: int, outputs: int, every: bool):
        super().__init__()
        self.padding_idx, self.every = padding, every
        self.embedding = embedding
        sizes = config.read_heads * config.memory_width, config.controller_dim, config.controller_layers
        self.dnc = DNC(
            CONTROLLER_REGISTRY.build(config.controller, config, embedding.embedding_dim, *sizes),
            outputs,
            cells=config.memory_cells,
            width=config.memory_width,
            heads=config.read_heads,
            masks=config.memory_mask,
            deallocate=config.memory_deallocate,
            sharpen=config.memory_sharpen,
            detach_usage=not config.usage_gradient,
            mask_floor=config.mask_floor,
            mask_bias=config.mask_bias,
            clamp=config.interface_clamp,
        )
        self.dnc.compile_mode = config.compile

    @classmethod
    def build_model(cls, cfg, task) -> "SGDNC":
        """A model for the task's dictionary and labels. Raises UsageError for a configuration that makes no sense."""
        config, outputs = resolve(cfg), outputs_of(task)
        embedding = word_embedding(config, task)
        return cls(config, embedding, task.source_dictionary.pad(), outputs, labels_words(task))

    def forward(self, src_tokens: Tensor, src_lengths: Tensor | None = None):
        """src_tokens (B, M), padded on either side -> outputs (B, M, Y) of every word, or (B, Y) of the last, and an
        empty dict.
        """
        y, padding_mask, _ = self.run(src_tokens)
        if self.every:
            return moved_back(y, padding_mask), {}
        last = (~padding_mask).sum(1).clamp(min=1) - 1  # (B,), after the move to the left
        return y[torch.arange(len(y), device=y.device), last], {}

    def run(self, src_tokens: Tensor, record: bool = False) -> tuple[Tensor, Tensor, Record | None]:
        """y (B, M, Y) of sentences at the left end, the mask of padding (B, M), and the record of every step."""
        padding_mask = src_tokens.eq(self.padding_idx)
        x = self.embedding(moved_left(src_tokens, padding_mask))
        x = x.to(self.dnc.output.weight.dtype)
        y, _, happened = self.dnc(x, record=record)
        return y, padding_mask, happened
