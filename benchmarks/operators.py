"""The cases of ``run.py``: every operator at several sizes, with its implementations and its peers.

FLOPs are those of matrix products in forward and backward, the known minimum, for B sequences and H heads, N positions,
F features of queries and keys, E of values, K experts per token:

    linear attention     12 N F E: the state, reading it, and both again in four gradients; or, where that is less,
                         6 (F + E) of every visible pair
    orthogonality        3 m² n of the smaller, m, and the larger, n, of N and E: the Gram matrix is symmetric
    geometric attention  none
    relative logits      6 N M D
    relative attention   6 N M (3 D): content, position and values
    cvmm, sigma_moe      12 K d_model G of every token: two products, and two gradients of each
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measure import Case, Contender, Function
from benchmarks.peers import Peer, contenders
from fairseq_sg.modules.feedforward import DenseFeedForward, SigmaMoE
from fairseq_sg.ops import (
    cvmm_sorted,
    geometric_attention,
    linear_attention,
    orthogonality_loss,
    relative_attention,
    relative_logits,
    sort_selection,
)
from fairseq_sg.ops.cvmm import IMPLEMENTATIONS as CVMM
from fairseq_sg.ops.dispatch import AUTO, ENVIRONMENT_VARIABLE
from fairseq_sg.ops.geometric import IMPLEMENTATIONS as GEOMETRIC
from fairseq_sg.ops.linear_attention import IMPLEMENTATIONS as LINEAR
from fairseq_sg.ops.orthogonality import IMPLEMENTATIONS as ORTHOGONALITY
from fairseq_sg.ops.relative import ATTENTION_IMPLEMENTATIONS as RELATIVE_ATTENTION
from fairseq_sg.ops.relative import IMPLEMENTATIONS as RELATIVE_LOGITS


@dataclass(frozen=True)
class Setting:
    """The common settings of all cases of a run.

    Attributes:
        device, dtype: of inputs.
        heads, dim: H, and the width of a head.
        positions: per batch, for all lengths.
        maps: total number of entries of the N × M matrices of geometric attention.
        tokens, model_dim, expert_dim, chosen: of mixtures: number of tokens, d_model, G and K.
        limit: maximum bytes of a naive form.
        peers: the peers found.
    """

    device: str
    dtype: torch.dtype
    heads: int = 8
    dim: int = 16
    positions: int = 4096
    maps: int = 640_000
    tokens: int = 8192
    model_dim: int = 512
    expert_dim: int = 128
    chosen: int = 4
    limit: int = 2 << 30
    peers: tuple[Peer, ...] = ()

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape).to(self.device, self.dtype)

    def steps(self, *shape: int) -> Tensor:
        """Random multiples of 1/4 from −1 to 1.

        Sums of some thousand products of them are exact in float32 in any order. This is necessary before a ReLU:
        rounding would decide the sign of a sum, and with it the gradient.
        """
        return torch.randint(-4, 5, shape).div(4).to(self.device, self.dtype)

    def batch(self, length: int) -> int:
        return max(1, self.positions // length)


def implementations(
    operator: Callable[..., Tensor], names: Iterable[str], naive_bytes: float, limit: int
) -> list[Contender]:
    """``"auto"`` and every implementation by name; the naive one unless it exceeds the memory limit."""
    found = [Contender("auto", operator)]
    for name in names:
        skip = ""
        if name == "naive" and naive_bytes > limit:
            skip = f"it would take {naive_bytes / 2**30:.1f} GiB"
        found.append(Contender(name, partial(operator, implementation=name), skip=skip))
    return found


def corners(x: Tensor, most: int) -> Tensor:
    """The first and the last sequence and head of (B, H, …), or, with ``most`` below four, the very last."""
    batch, heads = x.shape[:2]
    if most < 4:
        return x[-1:, -1:]
    return x[:: max(batch - 1, 1), :: max(heads - 1, 1)]


def check_some(sequence_bytes: float, limit: int) -> Callable[[Tensor], Tensor]:
    """The part of (B, H, …) to compute in float64, if one sequence and head takes ``size`` bytes."""
    return partial(corners, most=int(limit // max(sequence_bytes, 1)))


def linear_attention_case(length: int, setting: Setting, causal: bool) -> Case:
    """Queries and keys from elu + 1, no padding."""
    name = "causal_linear_attention" if causal else "linear_attention"
    batch, heads, width = setting.batch(length), setting.heads, setting.dim
    shape = (batch, heads, length, width)
    q, k = (F.elu(setting.normal(*shape).float()).add(1).to(setting.dtype) for _ in range(2))
    operator = partial(linear_attention, causal=causal)
    # Outer products, their running sums, and the gradients of both.
    state = 4 * 4 * math.prod(shape) * width
    pairs = length * (length + 1) // 2 if causal else length**2
    per_head = min(12 * length * width * width, 12 * width * pairs)
    sequence = 8 * length * max(5 * length, 4 * width * width)
    return Case(
        name,
        length,
        (q, k, setting.normal(*shape)),
        shape,
        partial(operator, implementation="naive"),
        implementations(operator, LINEAR, state, setting.limit) + contenders(name, setting.peers, causal=causal),
        batch * heads * per_head,
        check_some(sequence, setting.limit),
    )


def orthogonality_case(length: int, setting: Setting) -> Case:
    """The loss of every sequence and head."""
    batch, heads, width = setting.batch(length), setting.heads, setting.dim
    operator = partial(orthogonality_loss, reduction="none")
    small, large = sorted((length, width))
    return Case(
        "orthogonality_loss",
        length,
        (setting.normal(batch, heads, length, width),),
        (batch, heads),
        partial(operator, implementation="naive"),
        implementations(operator, ORTHOGONALITY, 4 * 4 * batch * heads * length**2, setting.limit),
        3.0 * batch * heads * small**2 * large,
        check_some(8 * 4 * length**2, setting.limit),
    )


def geometric_case(length: int, setting: Setting) -> Case:
    """Weights from logits N × N."""
    maps = max(1, setting.maps // length**2)
    shape = (1, maps, length, length)
    return Case(
        "geometric_attention",
        length,
        (setting.normal(*shape),),
        shape,
        partial(geometric_attention, implementation="naive"),
        implementations(geometric_attention, GEOMETRIC, 4 * 2 * maps * length**3, setting.limit)
        + contenders("geometric_attention", setting.peers),
        0.0,
        check_some(8 * 3 * length**3, setting.limit),
    )


def relative_logits_case(length: int, setting: Setting) -> Case:
    batch, heads, width = setting.batch(length), setting.heads, setting.dim
    return Case(
        "relative_logits",
        length,
        (setting.normal(batch, heads, length, width), setting.normal(heads, 2 * length - 1, width)),
        (batch, heads, length, length),
        partial(relative_logits, implementation="naive"),
        implementations(relative_logits, RELATIVE_LOGITS, 4 * 3 * heads * length**2 * width, setting.limit),
        6.0 * batch * heads * length**2 * width,
    )


def attend(q: Tensor, k: Tensor, v: Tensor, p: Tensor, implementation: str = AUTO) -> Tensor:
    """Relative attention without biases of content and position."""
    return relative_attention(q, q, k, v, p, implementation=implementation)


def relative_attention_case(length: int, setting: Setting) -> Case:
    """Attention with relative logits; ``flex`` is torch's ``flex_attention``."""
    batch, heads, width = setting.batch(length), setting.heads, setting.dim
    shape = (batch, heads, length, width)
    found = implementations(attend, RELATIVE_ATTENTION, 4 * 3 * heads * length**2 * width, setting.limit)
    if setting.device == "cpu":
        why = "torch has no backward pass of flex_attention on a CPU"
        found = [replace(one, skip=why) if one.name == "flex" else one for one in found]
    return Case(
        "relative_attention",
        length,
        (*(setting.normal(*shape) for _ in range(3)), setting.normal(heads, 2 * length - 1, width)),
        shape,
        partial(attend, implementation="naive"),
        found + contenders("relative_attention", setting.peers),
        6.0 * 3 * batch * heads * length**2 * width,
    )


def mixture(selection: Tensor, experts: int, implementation: str) -> Function:
    """y_n = Σ_k s_nk ReLU(x_n A[e_nk]) B[e_nk], two conditional products with one sort."""

    def run(x: Tensor, a: Tensor, b: Tensor, scores: Tensor) -> Tensor:
        routing = sort_selection(selection, experts, complete=True)
        hidden = cvmm_sorted(x, routing, a, from_tokens=True, implementation=implementation)
        return cvmm_sorted(hidden, routing, b, to_tokens=True, relu=True, weights=scores, implementation=implementation)

    return run


def cvmm_case(experts: int, setting: Setting) -> Case:
    """The products of a mixture with a given selection: K different random experts per token."""
    chosen = min(setting.chosen, experts)
    selection = torch.rand(setting.tokens, experts).topk(chosen).indices.to(setting.device)
    width, hidden = setting.model_dim, setting.expert_dim
    found = [Contender(name, mixture(selection, experts, name)) for name in ("auto", *CVMM)]
    return Case(
        "cvmm",
        experts,
        (
            setting.steps(setting.tokens, width),
            setting.steps(experts, width, hidden) / 16,
            setting.normal(experts, hidden, width) * hidden**-0.5,
            torch.rand(setting.tokens, chosen).to(setting.device, setting.dtype),
        ),
        (setting.tokens, width),
        mixture(selection, experts, "naive"),
        found + contenders("cvmm", setting.peers, selection=selection, experts=experts),
        12.0 * setting.tokens * chosen * width * hidden,
    )


def layer_function(layer: nn.Module, implementation: str = AUTO) -> Function:
    """A layer as a function of its input and parameters; its losses are added to every output, so
    that they have gradients.
    """
    names = [name for name, _ in layer.named_parameters()]

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        arguments = (x, None, True)
        with mock.patch.dict(os.environ, {ENVIRONMENT_VARIABLE: implementation}):
            y, emitted = torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), arguments)
        losses = [value for value in emitted.values() if torch.is_tensor(value)]
        return y + torch.stack(losses).sum().to(y.dtype) if losses else y

    return run


def sigma_moe_case(experts: int, setting: Setting) -> Case:
    """The whole layer with its selection, beside dense layers with as many parameters, and with as many FLOPs.

    Each layer is compared with itself in float64, on the naive operators.
    """
    chosen = min(setting.chosen, experts)
    width, hidden = setting.model_dim, setting.expert_dim
    x = setting.steps(setting.tokens, width)
    layers = {
        "sigma_moe": SigmaMoE(width, experts * hidden, moe_experts=experts, moe_k=chosen, moe_expert_dropout=0.0),
        "dense, same parameters": DenseFeedForward(width, experts * hidden),
        "dense, same FLOPs": DenseFeedForward(width, chosen * hidden),
    }
    found = []
    for name, layer in layers.items():
        layer = layer.to(setting.device, setting.dtype).train()
        first = layer.w1 if name == "sigma_moe" else layer.fc1.weight
        first.data = setting.steps(*first.shape) / 16
        if name != "sigma_moe":
            layer.fc1.bias.data.zero_()
        exact = layer_function(copy.deepcopy(layer).double(), "naive")
        inputs = (x, *(p.detach() for p in layer.parameters()))
        found.append(Contender(name, layer_function(layer), ours=name == "sigma_moe", exact=exact, inputs=inputs))
    flops = 12.0 * setting.tokens * chosen * width * hidden
    return Case("sigma_moe", experts, found[0].inputs, x.shape, found[0].exact, found, flops)


@dataclass(frozen=True)
class Operator:
    """An operator's cases.

    Attributes:
        name: in tables.
        case: makes the case of a size.
        size_name: the meaning of the size.
        cpu, cuda, quick: the sizes on a CPU, on a GPU, and for a quick check.
    """

    name: str
    case: Callable[[int, Setting], Case]
    size_name: str
    cpu: tuple[int, ...]
    cuda: tuple[int, ...]
    quick: tuple[int, ...]

    def sizes(self, device: str, quick: bool) -> tuple[int, ...]:
        return self.quick if quick else self.cuda if device == "cuda" else self.cpu


LENGTHS = (16, 64, 256, 1024, 4096)
EXPERTS = (4, 16, 32, 64)
OPERATORS = [
    Operator(
        "causal_linear_attention",
        partial(linear_attention_case, causal=True),
        "length",
        LENGTHS,
        LENGTHS,
        (5, 33),
    ),
    Operator("linear_attention", partial(linear_attention_case, causal=False), "length", LENGTHS, LENGTHS, (5, 33)),
    Operator("orthogonality_loss", orthogonality_case, "length", (10, 32, 128, 512, 2048), LENGTHS, (5, 33)),
    Operator("geometric_attention", geometric_case, "length", (16, 50, 100, 200), (16, 50, 200, 1000), (5, 17)),
    Operator("relative_logits", relative_logits_case, "length", (16, 64, 256, 512), (16, 64, 256, 512), (5, 17)),
    Operator("relative_attention", relative_attention_case, "length", (16, 64, 256, 512), (16, 64, 256, 512), (5, 17)),
    Operator("cvmm", cvmm_case, "experts", EXPERTS, (*EXPERTS, 128), (2, 5)),
    Operator("sigma_moe", sigma_moe_case, "experts", EXPERTS, (*EXPERTS, 128), (2, 5)),
]
#: Changes of a `Setting` on a GPU, and in a quick run.
ON_CUDA = {"positions": 65536, "maps": 10_000_000, "tokens": 16384, "limit": 24 << 30}
QUICK = {"heads": 2, "dim": 4, "positions": 64, "maps": 500, "tokens": 24, "model_dim": 8, "expert_dim": 4, "chosen": 2}
