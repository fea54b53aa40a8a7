"""The copy gate of the Neural Data Router (Csordás et al. 2022; Csordás 2023, section 5.1.1).

    a  = LN(h + Drop(Attention(h)))                              the attention sublayers, post-norm          (5.1)
    u  = LN(FFN_data(a))                                         the new content, without a residual         (5.2)
    g  = σ(FFN_gate(a))                                          one number for each feature of a column     (5.3)
    h' = g ⊙ u + (1 − g) ⊙ h                                                                                 (5.4)

A column whose gate is closed keeps its state bit for bit, and waits until there is something to compute. The last bias
of FFN_gate starts at −3, so that gates start nearly closed.

Its variants:

- the new content is tanh(FFN_data(a)) where the attention is not geometric (D.3.3; ``--copy-gate-content tanh``);
- in CTL++ (Csordás et al. 2022b) it is LN(FFN_data(a) + a) (E.2; ``residual``), and both feedforward layers have GELU
  (E.1; ``--ffn-activation gelu``) and no dropout; the text says so of FFN_data;
- in training, the gate of a whole column is closed with probability ``--copy-gate-dropout`` in each application; the
  text names it for CTL++ alone (E.1.2), the released code has it in chapter 5, too.

In the released code, the last matrix of FFN_data starts Glorot uniform, with gain 5/3 for ``layer_norm`` and 1 for
``residual``, and with PyTorch's default for ``tanh``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fairseq_sg import ranges
from fairseq_sg.errors import UsageError
from fairseq_sg.modules.cpu.dropout import Drops
from fairseq_sg.modules.feedforward import DenseFeedForward, FeedForward
from fairseq_sg.modules.feedforward.dense import DenseOptions
from fairseq_sg.modules.norm import LayerNorm, MakeNorm
from fairseq_sg.modules.update.base import Update, register_update

#: Start of the gate's last bias: gates are nearly closed at first, σ(−3) = 0.047.
GATE_BIAS = -3.0


@dataclass
class CopyGateOptions(DenseOptions):
    """The gate is a dense feedforward layer, and has the options of one."""

    copy_gate_content: str = field(
        default="layer_norm",
        metadata={
            "help": "new content of a copy-gated layer: 'layer_norm' LN(FFN(a)), 'tanh' tanh(FFN(a)), or 'residual' "
            "LN(FFN(a) + a)",
            "choices": ("layer_norm", "tanh", "residual"),
        },
    )
    copy_gate_ffn_dim: int | None = field(
        default=None,
        metadata={
            "help": "hidden width of the copy gate's own feedforward layer (default: the model's width)",
            "least": 1,
        },
    )
    copy_gate_dropout: float = field(
        default=0.0,
        metadata={"help": "probability with which a column's copy gate is closed in training", "least": 0, "below": 1},
    )


@register_update("copy_gate")
class CopyGateUpdate(Drops, Update):
    """See the module's docstring. FFN_data is any feedforward layer, FFN_gate a dense one.

    Args:
        dim: C, the width of the hidden state.
        ffn: FFN_data; the start of its last matrix is rescaled here.
        dropout: of residual connections, which this update does not have.
        pre_norm: must be false.
        norm: makes the LN of the new content.
        copy_gate_…: see :class:`CopyGateOptions`.
        activation_dropout, ffn_init, ffn_activation: of FFN_gate; see :class:`DenseFeedForward`.

    Raises:
        UsageError: with ``pre_norm``, and for a wrong option.
    """

    paper = "Csordás et al. 2022 (Neural Data Router)"
    options = CopyGateOptions
    excludes = frozenset({"pre_norm", "no_final_norm"})

    def __init__(
        self,
        dim: int,
        ffn: FeedForward,
        *,
        dropout: float = 0.0,
        pre_norm: bool = False,
        norm: MakeNorm = LayerNorm,
        copy_gate_content: str = "layer_norm",
        copy_gate_ffn_dim: int | None = None,
        copy_gate_dropout: float = 0.0,
        **gate_options,
    ):
        super().__init__(dim, ffn)
        if pre_norm:
            raise UsageError("copy_gate (--encoder-update, --decoder-update) is post-norm: leave --pre-norm out")
        given = {"copy_gate_ffn_dim": copy_gate_ffn_dim, "copy_gate_dropout": copy_gate_dropout}
        ranges.check(CopyGateOptions, given | {"copy_gate_content": copy_gate_content})
        self.content = copy_gate_content
        self.dropout = copy_gate_dropout
        if self.content == "layer_norm":
            # The gain of a tanh, which the layer norm replaces.
            ffn.rescale_output(5 / 3)
        elif self.content == "tanh":
            # From Glorot's bound √(6/(d_model + d_ff)) to PyTorch's default, 1/√d_ff, as in the released code.
            ffn.rescale_output(math.sqrt((dim + ffn.ffn_dim) / (6 * ffn.ffn_dim)))
        self.norm = None if self.content == "tanh" else norm(dim)
        self.gate = DenseFeedForward(dim, copy_gate_ffn_dim or dim, **gate_options)
        nn.init.constant_(self.gate.fc2.bias, GATE_BIAS)

    def forward(self, a, h, padding_mask):
        update, losses = self.ffn(a, padding_mask=padding_mask, return_losses=True)
        g = self.gates(a)
        # h + g (u − h) would not equal h bit for bit where g is 0 and u is large.
        return g * self._content(update, a) + (1 - g) * h, losses

    def _content(self, update: Tensor, a: Tensor) -> Tensor:
        if self.norm is None:
            return update.tanh()
        return self.norm(update + a if self.content == "residual" else update)

    def gates(self, a: Tensor) -> Tensor:
        """g (N, B, C), after dropout."""
        g = self.gate(a).sigmoid()
        if self.dropout == 0 or not self.drops:
            return g
        open_ = torch.rand(g.shape[:2], device=g.device) >= self.dropout
        return g * open_.unsqueeze(-1).to(g.dtype)
