"""``sg_lstm``: PyTorch's LSTM with a linear classifier on its final state (Csordás 2023, chapters 5 and 6).

These are the thesis's recurrent baselines. The reference gives them no begin symbol (``--no-source-bos`` of the task).
It reads a bidirectional LSTM after the end symbol, as here, and an LSTM of one direction one step before it. The final
state of a bidirectional LSTM is that of both directions of the last layer. With several layers, the reference takes the
backward directions of two layers instead.
"""

from dataclasses import dataclass, field

import torch
from fairseq.models import BaseFairseqModel, register_model, register_model_architecture
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from fairseq_sg import ranges
from fairseq_sg.errors import UsageError
from fairseq_sg.models.architectures import LSTM_ARCHITECTURES, preset
from fairseq_sg.models.config import Configuration
from fairseq_sg.models.sg_encoder import classes_of, first_column
from fairseq_sg.modules.cpu.dropout import Dropout


@dataclass
class SGLSTMConfig:
    """Sizes of ``sg_lstm``."""

    embed_dim: int = field(default=256, metadata={"help": "width of the embeddings", "least": 1})
    hidden_dim: int = field(
        default=256,
        metadata={"help": "width of the LSTM's state; with --bidirectional, each direction has half of it", "least": 1},
    )
    layers: int = field(default=1, metadata={"help": "layers of the LSTM", "least": 1})
    bidirectional: bool = field(default=False, metadata={"help": "read the input in both directions"})
    dropout: float = field(
        default=0.1, metadata={"help": "dropout on the embeddings and between layers", "least": 0, "most": 1}
    )


configuration = Configuration(SGLSTMConfig, (), LSTM_ARCHITECTURES)


@register_model("sg_lstm", dataclass=configuration.dataclass)
class SGLSTM(BaseFairseqModel):
    """Embedding, LSTM, classifier.

    Args:
        config: a configuration with every default filled in.
        dictionary: the source's dictionary.
        classes: the number of classes.

    Raises:
        UsageError: for an impossible size.
    """

    def __init__(self, config, dictionary, classes: int):
        super().__init__()
        ranges.check(SGLSTMConfig, vars(config))
        directions = 2 if config.bidirectional else 1
        if config.hidden_dim % directions:
            raise UsageError(f"--hidden-dim is {config.hidden_dim}: with --bidirectional choose an even number")
        self.padding_idx = dictionary.pad()
        self.directions = directions
        self.embedding = nn.Embedding(len(dictionary), config.embed_dim, padding_idx=dictionary.pad())
        self.dropout = Dropout(config.dropout)
        self.lstm = nn.LSTM(
            config.embed_dim,
            config.hidden_dim // directions,
            config.layers,
            batch_first=True,
            # torch warns of dropout in a single layer.
            dropout=config.dropout if config.layers > 1 else 0.0,
            bidirectional=config.bidirectional,
        )
        self.classifier = nn.Linear(config.hidden_dim, classes)

    @classmethod
    def build_model(cls, cfg, task) -> "SGLSTM":
        """A model for the task's dictionary and classes. Raises UsageError for an impossible size."""
        classes = classes_of(task)
        return cls(configuration.read(cfg), task.source_dictionary, classes)

    def forward(self, src_tokens: Tensor, src_lengths: Tensor | None = None):
        """src_tokens (B, M), padded on either side -> logits (B, classes), and an empty dict."""
        padding_mask = src_tokens.eq(self.padding_idx)
        lengths = (~padding_mask).sum(1).clamp(min=1)
        # Packing expects every sentence at the left end.
        columns = first_column(padding_mask)[:, None] + torch.arange(src_tokens.size(1), device=src_tokens.device)
        tokens = src_tokens.gather(1, columns.clamp(max=src_tokens.size(1) - 1))
        x = self.dropout(self.embedding(tokens))
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, (state, _) = self.lstm(packed)
        # (layers · directions, B, C): the last layer's directions are the last.
        last = torch.cat(list(state[-self.directions :]), dim=-1)
        return self.classifier(last), {}

    def max_positions(self) -> int:
        """10⁹: an LSTM has no limit; ``--max-source-positions`` of the task has."""
        return int(1e9)


for _name, _values in LSTM_ARCHITECTURES.items():
    register_model_architecture("sg_lstm", _name)(preset(_values))
