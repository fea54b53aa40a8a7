"""``sg_encoder``: an encoder that classifies its input (Csordás et al. 2022, "The Neural Data Router"; Csordás 2023,
chapters 5 and 6).

    begin symbol, words, end symbol  ->  encoder  ->  one column h  ->  W h + b

The encoder is that of ``sg_transformer``, with the same mechanisms as options. ``--readout`` chooses the column h: that
of the begin symbol (``first``) or of the end symbol (``last``), wherever padding puts them.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from fairseq.models import FairseqEncoderModel, register_model, register_model_architecture
from torch import Tensor, nn

from fairseq_sg.errors import UsageError
from fairseq_sg.models.architectures import ENCODER_ARCHITECTURES, preset
from fairseq_sg.models.checks import MECHANISMS, check_and_fill
from fairseq_sg.models.config import Configuration
from fairseq_sg.models.encoder import SGTransformerEncoder
from fairseq_sg.models.options import EncoderConfig, ShellConfig

READOUTS = ("first", "last")


@dataclass
class SGEncoderConfig(ShellConfig, EncoderConfig):
    """Sizes and mechanisms of ``sg_encoder``; the options of the mechanisms themselves are joined to these."""

    readout: str = field(
        default="last",
        metadata={"help": "column that the class is read from: 'first' (the begin symbol) or 'last' (the end symbol)"},
    )


configuration = Configuration(SGEncoderConfig, MECHANISMS, ENCODER_ARCHITECTURES)


def resolve(cfg):
    """A checked configuration with every default filled in. Raises UsageError for one that makes no sense."""
    config = check_and_fill(configuration.read(cfg))
    if config.readout not in READOUTS:
        raise UsageError(f"--readout is {config.readout!r}: choose from {', '.join(READOUTS)}")
    return config


def classes_of(task) -> int:
    """The number of a task's classes. Raises UsageError for a task that does not classify."""
    if not hasattr(task, "num_classes"):
        raise UsageError("this --arch is a classifier: choose --task sg_classification")
    return task.num_classes


def first_column(padding_mask: Tensor) -> Tensor:
    """padding_mask (B, N) bool -> (B,) int64, where each sentence begins; 0 for a row of padding alone."""
    return (~padding_mask).int().argmax(1)


def last_column(padding_mask: Tensor) -> Tensor:
    """padding_mask (B, N) bool -> (B,) int64, where each sentence ends; N − 1 for a row of padding alone."""
    return padding_mask.size(1) - 1 - first_column(padding_mask.flip(1))


@register_model("sg_encoder", dataclass=configuration.dataclass)
class SGEncoder(FairseqEncoderModel):
    """An encoder, a readout, a linear classifier.

    Args:
        config: a resolved configuration.
        dictionary: of the source.
        classes: the number of classes.
    """

    #: The roles whose Values ``forward`` can return.
    attention_roles = ("encoder",)

    def __init__(self, config, dictionary, classes: int):
        super().__init__(SGTransformerEncoder(config, dictionary))
        self.config = config
        self.column = first_column if config.readout == "first" else last_column
        self.classifier = nn.Linear(config.encoder_embed_dim, classes)

    @classmethod
    def build_model(cls, cfg, task) -> "SGEncoder":
        """A model for the task's dictionary and classes. Raises UsageError for a configuration that makes no sense."""
        return cls(resolve(cfg), task.source_dictionary, classes_of(task))

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        return_all_hiddens: bool = False,
        value_roles: Collection[str] = (),
    ):
        """src_tokens (B, M), padded on either side -> logits (B, classes), and a dict.

        The dict has ``aux_losses``, ``values`` (with ``value_roles`` ``("encoder",)``) and, with
        ``return_all_hiddens``, the state after every step under ``inner_states``, each (M, B, C).
        """
        out = self.encoder(
            src_tokens,
            src_lengths,
            return_all_hiddens=return_all_hiddens,
            return_values="encoder" in value_roles,
        )
        columns = self.column(out["encoder_padding_mask"][0])
        state = out["encoder_out"][0][columns, torch.arange(len(columns), device=columns.device)]
        extra = {"inner_states": out["encoder_states"], "aux_losses": out["aux_losses"], "values": out["values"]}
        return self.classifier(state), extra


configuration.follow(SGEncoder, "sg_encoder")
for _name, _values in ENCODER_ARCHITECTURES.items():
    register_model_architecture("sg_encoder", _name)(preset(_values))
