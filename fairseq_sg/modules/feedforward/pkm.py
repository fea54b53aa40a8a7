"""Product-key memory (Lample et al. 2019, as in Csordás 2023, sections 7.2.2 and F.1.3): n values, 2√n sub-keys.

    x = x_a | x_b,  u_a = W_a x_a,  u_b = W_b x_b             √n numbers each, for each head
    u[i√n + j] = u_a[i] + u_b[j]                                                                (7.8)
    y = Σ_heads Σ_{i in the K largest of u} α[i] v_i,  α = ReLU(u) or softmax(u)    (``--pkm-k K``)

The softmax is over the kept u of all heads together, as in the released code. The K largest u are among the sums of the
K largest u_a and u_b, so no more than K² sums are formed. All heads share the values. There is no projection of x, no
batch norm, no dropout and no bias.

Without ``--pkm-k`` it is the layer of the published numbers. Their K exceeds the number of sub-keys; the released code
then adds up the heads' u before the activation and keeps all n,

    y = Σ_i α[i] v_i,  α = ReLU(Σ_heads u) or softmax(Σ_heads u)

which one head could do as well. The order of values above is the released code's; (7.8) has a and b exchanged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_sg import ranges
from fairseq_sg.errors import UsageError
from fairseq_sg.modules.feedforward.base import FeedForward, register_feedforward

ACTIVATIONS = {"relu": F.relu, "softmax": partial(torch.softmax, dim=-1)}


@dataclass
class PKMOptions:
    pkm_heads: int = field(
        default=4, metadata={"help": "heads of a product-key memory, each with sub-keys of its own", "least": 1}
    )
    pkm_k: int | None = field(
        default=None,
        metadata={
            "help": "values that each head of a product-key memory keeps (default: all, of the heads' added scores)",
            "least": 1,
        },
    )
    pkm_activation: str = field(
        default="relu",
        metadata={"help": "activation of a product-key memory", "choices": tuple(ACTIVATIONS)},
    )
    pkm_init: str = field(
        default="reference",
        metadata={
            "help": "start of a product-key memory's values: 'reference' (by the model's width, as the keys') or "
            "'dense_equivalent' (by the number of values)",
            "choices": ("reference", "dense_equivalent"),
        },
    )


@register_feedforward("pkm")
class ProductKeyMemory(FeedForward):
    """See the module's docstring.

    Args:
        dim: d_model, an even number. ffn_dim: n, the square of the number of sub-keys.
        layers: L in the standard deviations √(2/(d_model L)) of keys and values (√(2/(n L)) of values with
            ``dense_equivalent``); see `FeedForward.needs_layers`.
        pkm_…: see `PKMOptions`.

    Raises:
        UsageError: for sizes that do not fit, or a wrong option.
    """

    paper = "Lample et al. 2019; Csordás 2023, 7.2.2, F.1.3"
    options = PKMOptions
    needs_layers = True

    def __init__(
        self,
        dim: int,
        ffn_dim: int,
        *,
        layers: int = 1,
        pkm_heads: int = 4,
        pkm_k: int | None = None,
        pkm_activation: str = "relu",
        pkm_init: str = "reference",
    ):
        super().__init__(dim, ffn_dim)
        self.sub_keys = math.isqrt(ffn_dim)
        if self.sub_keys**2 != ffn_dim:
            raise UsageError(
                f"a product-key memory has a square number of values, and the hidden width is {ffn_dim}: set "
                f"--encoder-ffn-embed-dim (--decoder-ffn-embed-dim) {self.sub_keys**2} or {(self.sub_keys + 1) ** 2}"
            )
        if dim % 2:
            raise UsageError(
                f"a product-key memory halves its input, whose width is {dim}: choose an even --encoder-embed-dim "
                "(--decoder-embed-dim)"
            )
        given = {"pkm_heads": pkm_heads, "pkm_activation": pkm_activation, "pkm_init": pkm_init}
        ranges.check(PKMOptions, given)
        if pkm_k is not None and not 1 <= pkm_k <= ffn_dim:
            raise UsageError(f"--pkm-k is {pkm_k} of {ffn_dim} values: choose a number from 1 to {ffn_dim}")
        self.k = pkm_k
        self.activation = ACTIVATIONS[pkm_activation]
        self.keys = nn.Parameter(torch.empty(2, pkm_heads, self.sub_keys, dim // 2))  # W_a, W_b
        self.values = nn.Parameter(torch.empty(ffn_dim, dim))
        nn.init.normal_(self.keys, std=math.sqrt(2 / (dim * layers)))
        nn.init.normal_(self.values, std=math.sqrt(2 / ((dim if pkm_init == "reference" else ffn_dim) * layers)))

    def rescale_output(self, gain: float) -> None:
        with torch.no_grad():
            self.values.mul_(gain)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None, return_losses: bool = False):
        halves = x.reshape(-1, 2, self.dim // 2)
        y = (self._all(halves) if self.k is None else self._pruned(halves)).reshape(x.shape)
        return (y, {}) if return_losses else y

    def _all(self, halves: Tensor) -> Tensor:
        # Σ_heads W_a x_a = (Σ_heads W_a) x_a
        u = torch.einsum("tac,aic->tai", halves, self.keys.sum(1))
        u = (u[:, 0, :, None] + u[:, 1, None, :]).flatten(1)
        return self.activation(u) @ self.values

    def _pruned(self, halves: Tensor) -> Tensor:
        u = torch.einsum("tac,ahic->tahi", halves, self.keys)
        best, index = u.topk(min(self.k, self.sub_keys))
        u = (best[:, 0, :, :, None] + best[:, 1, :, None, :]).flatten(2)  # (T, heads, at most K²)
        index = (index[:, 0, :, :, None] * self.sub_keys + index[:, 1, :, None, :]).flatten(2)
        u, chosen = u.topk(self.k)
        weights, index = self.activation(u.flatten(1)), index.gather(2, chosen).flatten(1)  # (T, heads · K)
        return F.embedding_bag(index, self.values, per_sample_weights=weights.to(self.values.dtype), mode="sum")
