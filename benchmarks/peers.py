"""Other implementations of the same mathematics: one adapter each, written from its public documentation.

An adapter takes keywords of a case (``operators.py``), imports the peer and returns a function of the case's
inputs. Peers in torch are always measured, others with ``--peers`` if they are installed. No other part of
this repository needs them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measure import Contender, Function
from fairseq_sg.errors import in_one_line


@dataclass(frozen=True)
class Peer:
    """An adapter, and the conditions for its measurement.

    Attributes:
        name: in tables.
        operators: the operators it is compared with.
        adapter: keywords of a case -> function of the case's inputs.
        module: imported to detect the peer.
        package: its name for pip.
        cuda_only: whether it needs a GPU.
        exact: keywords -> naive form of its result, if that differs from the operator's.
    """

    name: str
    operators: tuple[str, ...]
    adapter: Callable[..., Function]
    module: str = "torch"
    package: str = "torch"
    cuda_only: bool = False
    exact: Callable[..., Function] | None = None


PEERS: list[Peer] = []


def peer(name: str, *operators: str, **options) -> Callable:
    """Registers an adapter."""

    def register(adapter: Callable[..., Function]) -> Callable[..., Function]:
        PEERS.append(Peer(name, operators, adapter, **options))
        return adapter

    return register


def find(device: str, installed: bool) -> tuple[list[Peer], dict[str, str]]:
    """The peers that can be measured on a device; and for every peer its version, or the reason to omit it.

    Packages other than torch are detected only with ``installed``.
    """
    found, remarks = [], {}
    for one in PEERS:
        if one.package != "torch" and not installed:
            remarks[one.name] = "left out: --peers includes it"
        elif one.cuda_only and device != "cuda":
            remarks[one.name] = "left out: it needs a GPU"
        elif (reason := why_not(one.module)) is not None:
            remarks[one.name] = f"left out: {reason}"
        else:
            found.append(one)
            remarks[one.name] = version(one.package)
    return found, remarks


def why_not(module: str) -> str | None:
    """The reason why a module cannot be imported; None if it can."""
    try:
        importlib.import_module(module)
    except Exception as raised:  # packages fail in many ways if their compiled parts do not match
        return in_one_line(raised)
    return None


def version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package} of unknown version"


def contenders(operator: str, peers: Iterable[Peer], **keywords) -> list[Contender]:
    """The peers of an operator, for one case."""
    found = []
    for one in peers:
        if operator in one.operators:
            exact = None if one.exact is None else one.exact(**keywords)
            try:
                found.append(Contender(one.name, one.adapter(**keywords), ours=False, exact=exact))
            except Exception as raised:
                found.append(Contender(one.name, torch.zeros_like, ours=False, skip=in_one_line(raised)))
    return found


# Softmax attention instead of linear attention: another function, but the usual alternative.


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """softmax(q kᵀ / √d) v."""
    logits = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if causal:
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(hidden, -torch.inf)
    return logits.softmax(-1) @ v


@peer(
    "softmax: torch SDPA",
    "causal_linear_attention",
    "linear_attention",
    exact=lambda causal: partial(softmax_attention, causal=causal),
)
def scaled_dot_product_attention(causal: bool) -> Function:
    return partial(F.scaled_dot_product_attention, is_causal=causal)


# Linear attention. φ has been applied already, and peers must not scale the queries.


@peer(
    "flash-linear-attention",
    "causal_linear_attention",
    module="fla.ops.linear_attn",
    package="flash-linear-attention",
    cuda_only=True,
)
def flash_linear_attention(causal: bool) -> Function:
    """``chunk_linear_attn`` takes (B, N, H, ·) and returns the output and a state."""
    from fla.ops.linear_attn import chunk_linear_attn

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return chunk_linear_attn(q, k, v, scale=1.0, normalize=True)[0].transpose(1, 2)

    return run


@peer(
    "fast-transformers",
    "causal_linear_attention",
    "linear_attention",
    module="fast_transformers.attention",
    package="pytorch-fast-transformers",
)
def fast_transformers(causal: bool) -> Function:
    """Its attentions take (B, N, H, ·), three masks, and a feature map, here the identity."""
    from fast_transformers.attention import CausalLinearAttention, LinearAttention
    from fast_transformers.feature_maps import ActivationFunctionFeatureMap
    from fast_transformers.masking import FullMask, LengthMask, TriangularCausalMask

    @cache
    def attention(width: int) -> nn.Module:
        kind = CausalLinearAttention if causal else LinearAttention
        return kind(width, feature_map=ActivationFunctionFeatureMap.factory(lambda x: x))

    @cache
    def masks(batch: int, length: int, device: torch.device) -> tuple:
        whole = LengthMask(torch.full((batch,), length, device=device), max_len=length)
        pairs = TriangularCausalMask(length, device=device) if causal else FullMask(N=length, device=device)
        return pairs, whole, whole

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, _, length, width = q.shape
        out = attention(width)(*(x.transpose(1, 2) for x in (q, k, v)), *masks(batch, length, q.device))
        return out.transpose(1, 2)

    return run


# Relative attention.


@peer("torch flex_attention", "causal_relative_attention", "relative_attention", cuda_only=True)
def flex_relative_attention(causal: bool) -> Function:
    """It adds to each logit its entry of the product of queries and distances, m − n + N − 1 of row n."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    from fairseq_sg.ops.relative.shift import distance_product

    attention, make_mask = torch.compile(flex_attention), torch.compile(create_block_mask)

    def visible(b: Tensor, h: Tensor, n: Tensor, m: Tensor) -> Tensor:
        return m <= n

    @cache
    def mask(length: int, device: torch.device):
        """Made once, as a training does for all layers and steps."""
        return make_mask(visible, None, None, length, length, device=device)

    def run(q: Tensor, k: Tensor, v: Tensor, p: Tensor) -> Tensor:
        length, scale = q.shape[2], q.shape[3] ** -0.5
        product = distance_product(q * scale, p)  # (B, H, N, L)

        def add_relative_logit(logit: Tensor, b: Tensor, h: Tensor, n: Tensor, m: Tensor) -> Tensor:
            return logit + product[b, h, n, m - n + length - 1]

        seen = mask(length, q.device) if causal else None
        return attention(q, k, v, score_mod=add_relative_logit, block_mask=seen, scale=scale)

    return run


# Geometric attention as published: differences of running sums of logarithms.


@peer("sums of logarithms", "geometric_attention")
def log_space_cumsum() -> Function:
    """log A_t = log P_t + Σ_{s<t} log(1 − P_s) in the order of distance, with log σ(x) = x + log σ(−x)."""
    from fairseq_sg.ops.geometric.scan import nearest_first

    def run(logits: Tensor) -> Tensor:
        order, rank = nearest_first(*logits.shape[2:], 0, logits.device)
        # Rank 0 is the query itself, where P = 0.
        x = logits.gather(-1, order.expand_as(logits))[..., 1:]
        missed = F.logsigmoid(-x)
        weights = (x + missed.cumsum(-1)).exp()
        return F.pad(weights, (1, 0)).gather(-1, rank.expand_as(logits))

    return run


# Two grouped products with an activation between them: y_n = Σ_k s_nk ReLU(x_n A[e_nk]) B[e_nk].


@peer("torch grouped_mm", "cvmm")
def grouped_mm(selection: Tensor, experts: int) -> Function:
    """torch's grouped product with sort, gather and sum around it."""
    product = getattr(F, "grouped_mm", None) or torch._grouped_mm
    chosen = selection.shape[1]

    def run(x: Tensor, a: Tensor, b: Tensor, scores: Tensor) -> Tensor:
        flat = selection.flatten()
        order = flat.argsort(stable=True)
        offsets = flat.bincount(minlength=experts).cumsum(0).to(torch.int32)
        tokens = order // chosen
        hidden = product(x[tokens], a, offs=offsets).relu() * scores.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, tokens, product(hidden, b, offs=offsets))

    return run


@peer("scattermoe", "cvmm", module="scattermoe.mlp", package="scattermoe", cuda_only=True)
def scattermoe(selection: Tensor, experts: int) -> Function:
    """Its ``MLP`` holds weights (E, out, in), which are replaced by those of the case."""
    from scattermoe.mlp import MLP

    @cache
    def module(width: int, hidden: int) -> nn.Module:
        return MLP(
            input_size=width,
            hidden_size=hidden,
            activation=nn.ReLU(),
            num_experts=experts,
            top_k=selection.shape[1],
        )

    def run(x: Tensor, a: Tensor, b: Tensor, scores: Tensor) -> Tensor:
        weights = {"experts.weight": a.transpose(1, 2), "output_experts.weight": b.transpose(1, 2)}
        return torch.func.functional_call(module(*a.shape[1:]), weights, (x, scores, selection))

    return run
