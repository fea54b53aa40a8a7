"""``sg_encoder``: an encoder that classifies its input (Csordás et al. 2022, "The Neural Data Router"; Csordás 2023,
chapters 5 and 6).

    begin symbol, words, end symbol  ->  encoder  ->  one column h  ->  W h + b

The encoder is that of ``sg_transformer``, with the same mechanisms as options. ``--readout`` chooses the column h: that
of the begin symbol (``first``) or of the end symbol (``last``), wherever padding puts them.

With ``--task sg_tagging`` every column is read, one label a word:

    words  ->  encoder  ->  all columns h  ->  W h + b

The task chooses the input. That of ``sg_visual_qa`` is an image and a question (``modules.patches``):

    CLS, patches of the image, each with the question  ->  encoder  ->  column h of CLS (``first``)  ->  W h + b
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq.models import FairseqEncoderModel
from torch import Tensor, nn

from fairseq_sg.errors import UsageError
from fairseq_sg.models.architectures import ENCODER_ARCHITECTURES
from fairseq_sg.models.checks import MECHANISMS, check_and_fill, check_without_padding
from fairseq_sg.models.config import Configuration
from fairseq_sg.models.encoder import ImageQuestionEncoder, SGTransformerEncoder, StackedEncoder
from fairseq_sg.models.labels import InputConfig, first_column, labels_words, last_column, outputs_of, source_bits
from fairseq_sg.models.options import EncoderConfig, ShellConfig
from fairseq_sg.modules.patches import BACKGROUNDS
from fairseq_sg.modules.position import POSITION_REGISTRY


@dataclass
class SGEncoderConfig(InputConfig, ShellConfig, EncoderConfig):
    """Sizes and mechanisms of ``sg_encoder``; the options of the mechanisms themselves are joined to these."""

    readout: str | None = field(
        default=None,
        metadata={
            "help": "column that the class is read from: 'first' (the begin symbol, or CLS of an image) or 'last' (the "
            "end symbol); with --task sg_tagging all are read (default: last; first of an image)",
            "choices": ("first", "last"),
        },
    )
    pixels: str | None = field(
        default=None,
        metadata={
            "help": "with --task sg_visual_qa: 'white', images as they are, from 0 to 1, or 'black', 1 - image, so "
            "that the background is 0 (default: white)",
            "choices": BACKGROUNDS,
        },
    )


configuration = Configuration(SGEncoderConfig, MECHANISMS, ENCODER_ARCHITECTURES)


def resolve(cfg):
    """A checked configuration with every default filled in. Raises UsageError for one that makes no sense."""
    return check_and_fill(configuration.read(cfg))


def token_encoder(config, task) -> SGTransformerEncoder:
    """The encoder for the task's dictionary. Raises UsageError for an option of images."""
    if config.pixels is not None:
        raise UsageError("--pixels is for images: leave it out, or choose --task sg_visual_qa")
    return SGTransformerEncoder(config, task.source_dictionary, source_bits(config, task))


def image_encoder(config, task) -> ImageQuestionEncoder:
    """The encoder for the task's images and questions. Raises UsageError for an option of tokens or their padding."""
    check_without_padding(config)
    if config.embedding_scaling != "auto":
        raise UsageError("--embedding-scaling is for tokens: leave it out with --task sg_visual_qa")
    if config.input_embedding is not None:
        raise UsageError("--input-embedding is for tokens: leave it out with --task sg_visual_qa")
    place = None if config.position is None else POSITION_REGISTRY.find(config.position).gives_with(config)
    if place in ("embedding", "nothing"):
        raise UsageError(
            f"--position {config.position} is for tokens, and patches have positions of their own in any case: leave "
            "it out, or choose one inside the attention, such as rotary"
        )
    return ImageQuestionEncoder(config, task.image_shape, task.question_bits)


#: ``inputs`` of a task -> makes the encoder for them.
ENCODERS: Mapping[str, Callable[..., StackedEncoder]] = {"tokens": token_encoder, "image_question": image_encoder}


@configuration.register("sg_encoder", resolve)
class SGEncoder(FairseqEncoderModel):
    """An encoder, a readout, a linear classifier.

    Args:
        config: a resolved configuration.
        encoder: for the task's inputs.
        classes: the number of classes.
        every: whether every column is read.
    """

    #: The roles whose Values ``forward`` can return.
    attention_roles = ("encoder",)
    #: The ``inputs`` of tasks that it reads.
    reads = tuple(ENCODERS)

    def __init__(self, config, encoder: StackedEncoder, classes: int, every: bool = False):
        super().__init__(encoder)
        self.config, self.every = config, every
        self.column = first_column if (config.readout or encoder.readout) == "first" else last_column
        self.classifier = nn.Linear(config.encoder_embed_dim, classes)

    @classmethod
    def build_model(cls, cfg, task) -> "SGEncoder":
        """A model for the task's inputs and classes. Raises UsageError for a configuration that makes no sense."""
        config, classes, every = resolve(cfg), outputs_of(task), labels_words(task)
        if every and configuration.is_of_user(cfg, "readout"):
            raise UsageError("--readout has no effect with --task sg_tagging, which reads all columns: leave it out")
        return cls(config, ENCODERS[getattr(task, "inputs", "tokens")](config, task), classes, every)

    def forward(
        self, *inputs: Tensor, return_all_hiddens: bool = False, value_roles: Collection[str] = (), **named: Tensor
    ):
        """The encoder's inputs, such as src_tokens (B, M) -> logits (B, classes), or (B, M, classes) of every column,
        and a dict.

        The dict has ``aux_losses``, ``values`` (with ``value_roles`` ``("encoder",)``) and, with
        ``return_all_hiddens``, the state after every step under ``inner_states``, each (N, B, C).
        """
        out = self.encoder(
            *inputs, **named, return_all_hiddens=return_all_hiddens, return_values="encoder" in value_roles
        )
        extra = {"inner_states": out["encoder_states"], "aux_losses": out["aux_losses"], "values": out["values"]}
        return self.classifier(self.read(out)), extra

    def read(self, out: dict[str, Any]) -> Tensor:
        """The column h (B, C) of the encoder's output, or all of them, (B, N, C)."""
        x = out["encoder_out"][0]  # (N, B, C)
        if self.every:
            return x.transpose(0, 1)
        if not out["encoder_padding_mask"]:
            return x[0 if self.column is first_column else -1]
        columns = self.column(out["encoder_padding_mask"][0])
        return x[columns, torch.arange(len(columns), device=columns.device)]
