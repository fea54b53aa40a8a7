"""``sg_lstm``: PyTorch's LSTM with a linear classifier on its final state (Csordás 2023, chapters 5 and 6).

These are the thesis's recurrent baselines. The reference gives them no begin symbol (``--no-source-bos`` of the task).
It reads a bidirectional LSTM after the end symbol, as here, and an LSTM of one direction one step before it. The final
state of a bidirectional LSTM is that of both directions of the last layer. With several layers, the reference takes the
backward directions of two layers instead. With ``--task sg_tagging`` the classifier reads the state after every word.
"""

from dataclasses import dataclass, field

import torch
from fairseq.models import BaseFairseqModel
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from fairseq_sg import ranges
from fairseq_sg.errors import UsageError
from fairseq_sg.models.architectures import LSTM_ARCHITECTURES
from fairseq_sg.models.config import Configuration
from fairseq_sg.models.labels import InputConfig, labels_words, moved_back, moved_left, outputs_of, word_embedding
from fairseq_sg.modules.cpu.dropout import Dropout


@dataclass
class SGLSTMConfig(InputConfig):
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


@configuration.register("sg_lstm")
class SGLSTM(BaseFairseqModel):
    """Embedding, LSTM, classifier.

    Args:
        config: a configuration with every default filled in.
        embedding: of the source's words, ``embed_dim`` wide.
        padding: the number of padding.
        classes: the number of classes.
        every: whether the state after every word is read.

    Raises:
        UsageError: for an impossible size.
    """

    #: Why steps are neither recorded nor stacked.
    not_recorded = "--arch sg_lstm has lengths on the host, as torch asks for: leave it out"

    def __init__(self, config, embedding: nn.Module, padding: int, classes: int, every: bool = False):
        super().__init__()
        directions = 2 if config.bidirectional else 1
        if config.hidden_dim % directions:
            raise UsageError(f"--hidden-dim is {config.hidden_dim}: with --bidirectional choose an even number")
        self.padding_idx = padding
        self.directions, self.every = directions, every
        self.embedding = embedding
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
        classes, config = outputs_of(task), configuration.read(cfg)
        ranges.check(SGLSTMConfig, vars(config))
        embedding = word_embedding(config, task)
        return cls(config, embedding, task.source_dictionary.pad(), classes, labels_words(task))

    def forward(self, src_tokens: Tensor, src_lengths: Tensor | None = None):
        """src_tokens (B, M), padded on either side -> logits (B, classes), or (B, M, classes) of every word, and an
        empty dict.
        """
        padding_mask = src_tokens.eq(self.padding_idx)
        lengths = (~padding_mask).sum(1).clamp(min=1)
        # Packing expects every sentence at the left end.
        x = self.dropout(self.embedding(moved_left(src_tokens, padding_mask)))
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        states, (state, _) = self.lstm(packed)
        if self.every:
            states, _ = pad_packed_sequence(states, batch_first=True, total_length=src_tokens.size(1))
            return self.classifier(moved_back(states, padding_mask)), {}
        # (layers · directions, B, C): the last layer's directions are the last.
        last = torch.cat(list(state[-self.directions :]), dim=-1)
        return self.classifier(last), {}
