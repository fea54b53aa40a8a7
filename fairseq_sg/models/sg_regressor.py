"""``sg_regressor``: a causal transformer that learns a function from the examples in its input (Garg et al. 2022).

    tokens        x_1, (y_1, 0, …, 0), x_2, (y_2, 0, …, 0), …, x_P            2P − 1 vectors of n numbers
    h⁰            W z + b + positions
    h             the causal layers of ``sg_transformer_lm``
    ŷ_i           w · h at the token of x_i, so that prediction i sees the i − 1 examples before it

Where the layers are looped (``--depth looped``), there is a prediction after every loop, with the same norm and w.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from fairseq.models import BaseFairseqModel
from torch import Tensor, nn

from fairseq_sg.errors import UsageError
from fairseq_sg.models.architectures import REGRESSOR_ARCHITECTURES
from fairseq_sg.models.checks import MECHANISMS, check_and_fill, check_without_padding
from fairseq_sg.models.config import Configuration
from fairseq_sg.models.encoder import max_length, side_positions
from fairseq_sg.models.layers import build_layers
from fairseq_sg.models.options import CausalConfig, StackConfig
from fairseq_sg.modules.attention import Context
from fairseq_sg.modules.embedding import VectorEmbedding
from fairseq_sg.modules.norm import final_norm_of
from fairseq_sg.modules.position import build_indices
from fairseq_sg.ops.precision import autocast_disabled


@dataclass
class SGRegressorConfig(StackConfig, CausalConfig):
    """Sizes and mechanisms of ``sg_regressor``; the options of the mechanisms themselves are joined to these."""


configuration = Configuration(SGRegressorConfig, MECHANISMS, REGRESSOR_ARCHITECTURES)


def resolve(cfg):
    """A checked configuration with every default filled in. Raises UsageError for one that makes no sense."""
    config = check_and_fill(configuration.read(cfg), "embedding_dropout")
    check_without_padding(config)
    return config


def dims_of(task) -> int:
    """n of a task's prompts. Raises UsageError for a task without prompts."""
    if not hasattr(task, "prompts"):
        raise UsageError("this --arch is a regressor: choose --task sg_regression")
    return task.prompts.function.dims


def interleave(x: Tensor, y: Tensor) -> Tensor:
    """The tokens: x (B, P, n) and the values of all points but the last, y (B, P − 1) -> (B, 2P − 1, n)."""
    z = x.new_zeros(x.size(0), 2 * x.size(1) - 1, x.size(2))
    z[:, 0::2] = x
    z[:, 1::2, 0] = y
    return z


@configuration.register("sg_regressor", resolve)
class SGRegressor(BaseFairseqModel):
    """See the module's docstring.

    Args:
        config: a resolved configuration.
        dims: n.
    """

    #: The ``inputs`` of tasks that it reads.
    reads = ("prompts",)
    #: The roles whose Values ``forward`` can return.
    attention_roles = ("decoder",)

    def __init__(self, config, dims: int):
        super().__init__()
        self.config = config
        positions, width = side_positions(config, "decoder"), config.decoder_embed_dim
        self.embedding = VectorEmbedding(dims, width, positions=positions, dropout=config.embedding_dropout)
        self.indices = build_indices(config)
        self.stack = build_layers(config, "decoder")
        self.final_norm = final_norm_of(config, width)
        self.readout = nn.Linear(width, 1)

    @classmethod
    def build_model(cls, cfg, task) -> "SGRegressor":
        """A model for the task's prompts. Raises UsageError for a configuration that makes no sense."""
        config = resolve(cfg)
        return cls(config, dims_of(task))

    def forward(self, x: Tensor, y: Tensor, return_all_hiddens: bool = False, value_roles: Collection[str] = ()):
        """The predictions (loops, B, P), of one loop where layers are not looped, and a dict.

        The dict has ``aux_losses``, ``values`` (with ``value_roles`` ``("decoder",)``) and, with
        ``return_all_hiddens``, the state after every step under ``inner_states``, each (2P − 1, B, C).

        Args:
            x: (B, P, n), the points; the last of them is the query.
            y: (B, P − 1), the values of the examples.
        """
        z = interleave(x, y)
        context = Context(
            positions=None if self.indices is None else self.indices(z.size(1), z.device),
            return_values="decoder" in value_roles,
        )
        out = self.stack(self.embedding(z).transpose(0, 1), context, keep_hidden=return_all_hiddens)
        states = torch.stack([state[::2] for state in out.loop_states])  # (loops, P, B, C), at the tokens of x
        with autocast_disabled(states.device):  # its rounding is larger than a good model's error
            predictions = self.readout(self.final_norm(states.to(self.readout.weight))).squeeze(-1)  # (loops, P, B)
        predictions = predictions.transpose(1, 2)
        return predictions, {"inner_states": out.hidden_states, "aux_losses": out.losses, "values": out.values}

    def max_positions(self) -> int:
        """The most tokens that have positions; most kinds of them have no end."""
        return max_length(self.embedding.positions, self.indices, self.stack)
