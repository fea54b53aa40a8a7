"""Linear attention in Triton: the causal form in chunks, the full form through its state, forward and backward.

With the sequence cut into chunks, a program for each sentence and head walks along them and writes the state that each
chunk finds, S_t = Σ_{i before t} k_i v_iᵀ and z_t = Σ k_i (`_fold_kernel`); then all chunks at once (`_out_kernel`)
compute

    num = q S_t + tril(q kᵀ) v,   den = q z_t + tril(q kᵀ) 1 + eps,   out = num / den.

Of a loss with derivatives g of out, let d = g / den and δ = −(g · out) / den, the derivatives of num and den. Then
with the states' own derivatives, G_t = Σ_{n after t} q_nᵀ d_n and γ_t = Σ q_n δ_n, which the same walk collects from
the end,

    ∂q = d S_tᵀ + δ z_t + tril(d vᵀ + δ) k,   ∂k = v G_tᵀ + γ_t + tril(d vᵀ + δ)ᵀ q,   ∂v = k G_t + tril(q kᵀ)ᵀ d.

The full form is the first half of each sum, with one state for all. States are not kept for the backward pass but
computed again. Nothing is added atomically: results are the same in every run.

q and k may come raw; then each kernel makes what is called q and k here from them where it loads them, and ∂q and ∂k
are taken on to the raw numbers where they are stored (`triton_features`). A normalization asks for the derivative of
each row along itself, and its features may be in several tiles. For queries it is known: out depends on the length of
q only through eps, and q·∂q = −eps δ (without a denominator q·∂q = g·out). Keys stand beside values and beside 1, so

    k·∂k = v·∂v + k·γ_t + Σ_n δ_n (q_n·k) over the queries n of the chunk that see k,

which the kernel of ∂v can add up and leaves to that of ∂k, one sum for each tile of values.

Features and values are taken in tiles, so any number of them will do. All arithmetic is float32. Where an input is
float32, products are float32 too, without tensor cores, and chunks and tiles are 32; if all are in half precision,
products of two inputs are exact in TF32, those with a float32 factor (such as features made here) are split into three
of TF32, which loses nothing that counts, and chunks and tiles are 64. With more, float32 kernels run out of registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fairseq_sg.ops.checks import refuse_second_derivative
from fairseq_sg.ops.features import Features
from fairseq_sg.ops.linear_attention.triton_features import (
    grad_of_gamma,
    grad_of_raw,
    load_features,
    load_raw,
    row_norms,
)
from fairseq_sg.ops.triton_support import launch, power_of_two
from fairseq_sg.ops.triton_tiles import load_tile, real_rows

State = tuple[Tensor, Tensor]


def linear_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    key_padding_mask: Tensor | None,
    state: State | None,
    return_state: bool,
    normalize: bool,
    eps: float,
    features: Features,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
) -> tuple[Tensor, State | None]:
    """See `fairseq_sg.ops.linear_attention`; the state is None where it was not asked for."""
    s, z = (None, None) if state is None else (state[0].float(), state[1].float())
    q_gamma, k_gamma = _gamma(q_weight), _gamma(k_weight)
    if not causal:
        s, z = _Fold.apply(k, v, key_padding_mask, s, z, k_gamma, features)
        return _Read.apply(q, s, z, q_gamma, v.dtype, normalize, eps, features), (s, z) if return_state else None
    if s is not None and q.shape[2] == 1 and not _needs_gradient(q, k, v, s, z, q_gamma, k_gamma):
        out, s, z = _step(q, k, v, key_padding_mask, s, z, q_gamma, k_gamma, normalize, eps, features)
    else:
        options = return_state, normalize, eps, features
        out, s, z = _Causal.apply(q, k, v, key_padding_mask, s, z, q_gamma, k_gamma, *options)
    return out, (s, z) if return_state else None


def fold_triton(
    k: Tensor, v: Tensor, key_padding_mask: Tensor | None, features: Features, k_weight: Tensor | None
) -> State:
    """S = Σ_i k_i v_iᵀ and z = Σ_i k_i over what is not padding, float32."""
    return _Fold.apply(k, v, key_padding_mask, None, None, _gamma(k_weight), features)


def read_triton(
    q: Tensor, state: State, normalize: bool, eps: float, features: Features, q_weight: Tensor | None
) -> Tensor:
    """q S / (q·z + eps), or q S: (B, H, N, E) in the dtype of q."""
    s, z = state[0].float(), state[1].float()
    return _Read.apply(q, s, z, _gamma(q_weight), q.dtype, normalize, eps, features)


def _gamma(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.float().contiguous()


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        s: Tensor | None,
        z: Tensor | None,
        q_gamma: Tensor | None,
        k_gamma: Tensor | None,
        return_state: bool,
        normalize: bool,
        eps: float,
        features: Features,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        plan = _plan(features, q, k, v)
        before, last = _states_of_chunks(plan, k, v, mask, s, z, k_gamma, return_state)
        keep, keys = any(ctx.needs_input_grad), (k, v, mask, k_gamma)
        out, exact, denominator = _read(plan, q, q_gamma, before, v.dtype, normalize, eps, keep, keys)
        ctx.save_for_backward(q, k, v, mask, s, z, q_gamma, k_gamma, exact, denominator)
        ctx.set_materialize_grads(False)
        ctx.eps, ctx.features = eps, features
        return out, *last

    @staticmethod
    def backward(ctx: FunctionCtx, g: Tensor | None, g_s: Tensor | None, g_z: Tensor | None) -> tuple:
        _refuse_second_derivative()
        q, k, v, mask, s, z, q_gamma, k_gamma, exact, denominator = ctx.saved_tensors
        plan = _plan(ctx.features, q, k, v)
        g = torch.zeros_like(v) if g is None else g
        before, _ = _states_of_chunks(plan, k, v, mask, s, z, k_gamma, False)
        keys = k, v, mask, k_gamma
        grad_q, grad_q_gamma, delta = _grad_q(plan, q, q_gamma, g, before, exact, denominator, ctx.eps, keys)
        after, first = _grad_states_of_chunks(
            plan, q, q_gamma, g, denominator, delta, g_s, g_z, has_state=s is not None
        )
        queries = q, q_gamma, g, denominator, delta
        grad_k, grad_k_gamma, grad_v = _grad_k_v(plan, k, v, mask, k_gamma, after, queries)
        return grad_q, grad_k, grad_v, None, *first, grad_q_gamma, grad_k_gamma, None, None, None, None


class _Fold(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        s: Tensor | None,
        z: Tensor | None,
        gamma: Tensor | None,
        features: Features,
    ) -> State:
        ctx.save_for_backward(k, v, mask, gamma)
        ctx.has_state, ctx.features = s is not None, features
        return _fold(_plan(features, k, v), k, v, gamma=gamma, mask=mask, first=(s, z))[1]

    @staticmethod
    def backward(ctx: FunctionCtx, g_s: Tensor, g_z: Tensor) -> tuple:
        _refuse_second_derivative()
        k, v, mask, gamma = ctx.saved_tensors
        of_state = g_s.contiguous(), g_z.contiguous()
        grad_k, grad_gamma, grad_v = _grad_k_v(_plan(ctx.features, k, v), k, v, mask, gamma, of_state, None)
        return grad_k, grad_v, None, *((g_s, g_z) if ctx.has_state else (None, None)), grad_gamma, None


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q: Tensor,
        s: Tensor,
        z: Tensor,
        gamma: Tensor | None,
        dtype: torch.dtype,
        normalize: bool,
        eps: float,
        features: Features,
    ) -> Tensor:
        s, z = s.contiguous(), z.contiguous()
        keep = any(ctx.needs_input_grad)
        plan = _plan(features, q)
        out, exact, denominator = _read(plan, q, gamma, (s, z), dtype, normalize, eps, keep, None)
        ctx.save_for_backward(q, s, z, gamma, exact, denominator)
        ctx.eps, ctx.features = eps, features
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, g: Tensor) -> tuple:
        _refuse_second_derivative()
        q, s, z, gamma, exact, denominator = ctx.saved_tensors
        plan = _plan(ctx.features, q, g)
        grad_q, grad_gamma, delta = _grad_q(plan, q, gamma, g, (s, z), exact, denominator, ctx.eps, None)
        counts = denominator is not None
        _, of_state = _fold(plan, q, g, gamma=gamma, divisor=denominator, weight=delta, counts=counts)
        return grad_q, *of_state, grad_gamma, None, None, None, None


def _refuse_second_derivative() -> None:
    refuse_second_derivative("linear_attention", "in Triton", "implementation='naive' and 'chunked' have one")


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


class _Plan(NamedTuple):
    """Length of a chunk, which is the size of tiles too; precision of products, of two inputs and of others; features.

    `of_features` is the precision of products of features with each other or with values.
    """

    chunk: int
    exact: str
    mixed: str
    features: Features = Features()

    @property
    def of_features(self) -> str:
        made_here = self.features.feature_map is not None or self.features.qk_norm is not None
        return self.mixed if made_here else self.exact

    def options(self, features: int, width: int) -> dict:
        return {
            "F": features,
            "E": width,
            "CHUNK": self.chunk,
            "BLOCK_F": power_of_two(features, 16, self.chunk),
            "BLOCK_E": power_of_two(width, 16, self.chunk),
            **_of_features(self.features),
            "num_warps": 4,
            "num_stages": 1,
        }


# Chunks of 64 spill up to 5 kB of registers in half precision (8.0), and up to 16 kB in single. See also
# `triton_support`.
_IN_HALF = _Plan(32, "tf32", "tf32x3")
_IN_SINGLE = _Plan(32, "ieee", "ieee")


def _plan(features: Features, *inputs: Tensor) -> _Plan:
    plan = _IN_HALF if all(x.dtype in (torch.float16, torch.bfloat16) for x in inputs) else _IN_SINGLE
    return plan._replace(features=features)


def _of_features(features: Features) -> dict:
    return {"MAP": features.feature_map, "NORM": features.qk_norm, "NORM_EPS": features.eps}


def _count(size: int, block: int) -> int:
    return -(-size // block)


def _dense_rows(*tensors: Tensor | None) -> Iterator[Tensor | None]:
    """The tensors with their last dimension dense, which is all that the kernels ask for."""
    for x in tensors:
        yield x if x is None or x.stride(3) == 1 or x.shape[3] <= 1 else x.contiguous()


def _strides(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else x.stride()[:3]


def _bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.contiguous().view(torch.uint8)


def _states_of_chunks(
    plan: _Plan,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    s: Tensor | None,
    z: Tensor | None,
    gamma: Tensor | None,
    return_last: bool,
) -> tuple[State | None, tuple[Tensor | None, Tensor | None]]:
    """What each chunk finds, (B, H, T, F, E) and (B, H, T, F), None for nothing, and the last state, if asked for."""
    several = k.shape[2] > plan.chunk
    each, last = None, (None, None)
    if several or return_last:
        each, last = _fold(plan, k, v, gamma=gamma, mask=mask, first=(s, z), each=several)
    if each is None and s is not None:
        each = s.contiguous(), z.contiguous()
    return each, last


def _grad_states_of_chunks(
    plan: _Plan,
    q: Tensor,
    gamma: Tensor | None,
    g: Tensor,
    denominator: Tensor | None,
    delta: Tensor | None,
    g_s: Tensor | None,
    g_z: Tensor | None,
    *,
    has_state: bool,
) -> tuple[State | None, tuple[Tensor | None, Tensor | None]]:
    """The derivatives of what each chunk leaves behind, None for nothing, and those of the first state, if any."""
    at_end = g_s is not None or g_z is not None
    if not at_end and not has_state and q.shape[2] <= plan.chunk:
        return None, (None, None)
    if at_end:
        shape = (*q.shape[:2], q.shape[3])
        g_s = q.new_zeros(*shape, g.shape[3], dtype=torch.float32) if g_s is None else g_s
        g_z = q.new_zeros(*shape, dtype=torch.float32) if g_z is None else g_z
    options = dict(first=(g_s, g_z), each=True, reverse=True, counts=denominator is not None)
    after, first = _fold(plan, q, g, gamma=gamma, divisor=denominator, weight=delta, **options)
    return after, first if has_state else (None, None)


def _fold(
    plan: _Plan,
    x: Tensor,
    y: Tensor,
    *,
    gamma: Tensor | None,
    divisor: Tensor | None = None,
    weight: Tensor | None = None,
    mask: Tensor | None = None,
    first: tuple[Tensor | None, Tensor | None] = (None, None),
    each: bool = False,
    reverse: bool = False,
    counts: bool = True,
) -> tuple[State | None, State]:
    """Σ x_i (y_i / divisor_i)ᵀ and, if it `counts`, Σ x_i weight_i, from `first` on: before `each` chunk and of all."""
    (batch, heads, length, features), width = x.shape, y.shape[3]
    chunks = _count(length, plan.chunk)
    x, y = _dense_rows(x, y)

    def empty(*shape: int) -> Tensor:
        return torch.empty(batch, heads, *shape, dtype=torch.float32, device=x.device)

    before = (empty(chunks, features, width), empty(chunks, features)) if each else (None, None)
    last = empty(features, width), empty(features)
    options = plan.options(features, width)
    launch(
        _fold_kernel,
        (batch * heads, _count(features, options["BLOCK_F"]), _count(width, options["BLOCK_E"])),
        x,
        y,
        gamma,
        divisor,
        weight,
        _bytes(mask),
        *(None if x is None else x.contiguous() for x in first),
        *before,
        *last,
        *_strides(x),
        *_strides(y),
        heads,
        length,
        REVERSE=reverse,
        COUNTS=counts,
        PRECISION=plan.of_features if divisor is None else plan.mixed,
        **options,
    )
    return before if each else None, last


def _read(
    plan: _Plan,
    q: Tensor,
    q_gamma: Tensor | None,
    state: State | None,
    dtype: torch.dtype,
    normalize: bool,
    eps: float,
    keep: bool,
    keys: tuple[Tensor, Tensor, Tensor | None, Tensor | None] | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """out, and what of it the backward pass needs: out in float32, and the denominators; None where it does not.

    `keys` are k, v, the mask and γ of the keys in the causal form, which has a state for each chunk, or none.
    """
    batch, heads, length, features = q.shape
    k, v, mask, k_gamma = keys or (None, None, None, None)
    width = state[0].shape[-1] if v is None else v.shape[3]
    q, k, v = _dense_rows(q, k, v)
    out = torch.empty(batch, heads, length, width, dtype=dtype, device=q.device)
    exact = denominator = None
    if keep and (normalize or plan.features.qk_norm is not None):
        exact = out if dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    if keep and normalize:
        denominator = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
    options = plan.options(features, width)
    launch(
        _out_kernel,
        (batch * heads, _count(length, plan.chunk), _count(width, options["BLOCK_E"])),
        q,
        k,
        v,
        q_gamma,
        k_gamma,
        _bytes(mask),
        *(state or (None, None)),
        out,
        None if exact is out else exact,
        denominator,
        *_strides(q),
        *_strides(k),
        *_strides(v),
        heads,
        length,
        eps,
        CAUSAL=keys is not None,
        NORMALIZE=normalize,
        EXACT=plan.of_features,
        MIXED=plan.mixed,
        **options,
    )
    return out, exact, denominator


def _grad_q(
    plan: _Plan,
    q: Tensor,
    q_gamma: Tensor | None,
    g: Tensor,
    state: State | None,
    exact: Tensor | None,
    denominator: Tensor | None,
    eps: float,
    keys: tuple[Tensor, Tensor, Tensor | None, Tensor | None] | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """∂q, ∂γ of the queries if there is one, and δ of every position if normalized."""
    (batch, heads, length, features), width = q.shape, g.shape[3]
    k, v, mask, k_gamma = keys or (None, None, None, None)
    q, g, k, v = _dense_rows(q, g, k, v)
    parts = _parts_of_gamma(plan, q, q_gamma)
    grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    delta = None if denominator is None else torch.empty_like(denominator)
    options = plan.options(features, width)
    launch(
        _grad_q_kernel,
        (batch * heads, _count(length, plan.chunk), _count(features, options["BLOCK_F"])),
        q,
        g,
        k,
        v,
        q_gamma,
        k_gamma,
        _bytes(mask),
        *(state or (None, None)),
        exact,
        denominator,
        delta,
        grad_q,
        parts,
        *_strides(q),
        *_strides(g),
        *_strides(k),
        *_strides(v),
        heads,
        length,
        eps,
        CAUSAL=keys is not None,
        NORMALIZE=denominator is not None,
        EXACT=plan.exact,
        MIXED=plan.mixed,
        **options,
    )
    return grad_q, _summed(parts), delta


def _grad_k_v(
    plan: _Plan,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    k_gamma: Tensor | None,
    state: State | None,
    queries: tuple | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """∂k, ∂γ of the keys and ∂v from the derivatives of the state, or of those of all chunks and of queries in each."""
    (batch, heads, length, features), width = k.shape, v.shape[3]
    q, q_gamma, g, denominator, delta = queries or (None, None, None, None, None)
    k, v, q, g = _dense_rows(k, v, q, g)
    parts = _parts_of_gamma(plan, k, k_gamma)
    grad_k, grad_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    inputs = k, v, q, g, k_gamma, q_gamma, _bytes(mask), *(state or (None, None)), denominator, delta
    sizes = *_strides(k), *_strides(v), *_strides(q), *_strides(g), heads, length
    options = plan.options(features, width) | {
        "CAUSAL": queries is not None,
        "NORMALIZE": denominator is not None,
        "EXACT": plan.exact,
        "MIXED": plan.mixed,
    }
    grid = (batch * heads, _count(length, plan.chunk))
    tiles_f, tiles_e = _count(features, options["BLOCK_F"]), _count(width, options["BLOCK_E"])
    along = None
    if plan.features.qk_norm is not None:
        along = torch.empty(tiles_e, batch, heads, length, dtype=torch.float32, device=k.device)
    of_values = options | {"EXACT": plan.of_features}
    launch(_grad_v_kernel, (*grid, tiles_e), *inputs, grad_v, along, *sizes, **of_values)
    launch(_grad_k_kernel, (*grid, tiles_f), *inputs, grad_k, along, parts, *sizes, TILES_E=tiles_e, **options)
    return grad_k, _summed(parts), grad_v


def _parts_of_gamma(plan: _Plan, x: Tensor, gamma: Tensor | None) -> Tensor | None:
    """Room for what each chunk of x contributes to ∂γ."""
    if gamma is None:
        return None
    batch, heads, length, features = x.shape
    shape = batch * heads, _count(length, plan.chunk), features
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def _summed(parts: Tensor | None) -> Tensor | None:
    return None if parts is None else parts.sum((0, 1))


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    s: Tensor,
    z: Tensor,
    q_gamma: Tensor | None,
    k_gamma: Tensor | None,
    normalize: bool,
    eps: float,
    features: Features,
) -> tuple[Tensor, Tensor, Tensor]:
    """One position after the state, without gradients: out and the new state."""
    (batch, heads, _, size), width = q.shape, v.shape[3]
    q, k, v = _dense_rows(q, k, v)
    block = power_of_two(width, 16, 64)
    out = torch.empty(batch, heads, 1, width, dtype=v.dtype, device=v.device)
    new_s, new_z = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (s, z))
    launch(
        _step_kernel,
        (batch * heads, _count(width, block)),
        q,
        k,
        v,
        q_gamma,
        k_gamma,
        _bytes(mask),
        s.contiguous(),
        z.contiguous(),
        out,
        new_s,
        new_z,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        heads,
        eps,
        F=size,
        E=width,
        BLOCK_F=power_of_two(size, 16, 64),
        BLOCK_E=block,
        NORMALIZE=normalize,
        **_of_features(features),
        num_warps=4,
    )
    return out, new_s, new_z


@triton.jit
def _state_tile(base, f, e, F: tl.constexpr, E: tl.constexpr):
    inside = (f < F)[:, None] & (e < E)[None, :]
    return tl.load(base + f[:, None] * E + e[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["length"])
def _fold_kernel(
    x,
    y,
    gamma,
    divisor,
    weight,
    mask,
    first_s,
    first_z,
    each_s,
    each_z,
    last_s,
    last_z,
    x_batch,
    x_head,
    x_row,
    y_batch,
    y_head,
    y_row,
    heads,
    length,
    F: tl.constexpr,
    E: tl.constexpr,
    CHUNK: tl.constexpr,
    REVERSE: tl.constexpr,
    COUNTS: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr,
    MAP: tl.constexpr,
    NORM: tl.constexpr,
    NORM_EPS: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    batch, head = pair // heads, pair % heads
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    e = tl.program_id(2) * BLOCK_E + tl.arange(0, BLOCK_E)
    inside = (f < F)[:, None] & (e < E)[None, :]
    cell = f[:, None] * E + e[None, :]
    writes_z = (f < F) & (tl.program_id(2) == 0)
    x += batch * x_batch + head * x_head
    y += batch * y_batch + head * y_head

    s = tl.zeros((BLOCK_F, BLOCK_E), dtype=tl.float32)
    z = tl.zeros((BLOCK_F,), dtype=tl.float32)
    if first_s is not None:
        s += _state_tile(first_s + pair * F * E, f, e, F, E)
        z += tl.load(first_z + pair * F + f, mask=f < F, other=0.0)
    chunks = tl.cdiv(length, CHUNK)
    for step in range(chunks):
        chunk = step
        if REVERSE:
            chunk = chunks - 1 - step
        if each_s is not None:
            tl.store(each_s + (pair * chunks + chunk) * F * E + cell, s, mask=inside)
            tl.store(each_z + (pair * chunks + chunk) * F + f, z, mask=writes_z)
        rows = (chunk * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)
        present = real_rows(mask, batch, rows, length)
        norms = row_norms(x, rows, x_row, present, F, BLOCK_F, MAP, NORM)
        x_tile = load_features(x, rows, f, x_row, present, norms, gamma, F, MAP, NORM, NORM_EPS)
        y_tile = load_tile(y, rows, e, y_row, present, E)
        if divisor is not None:
            y_tile = y_tile / tl.load(divisor + pair * length + rows, mask=present, other=1.0)[:, None]
        s += tl.dot(tl.trans(x_tile), y_tile, input_precision=PRECISION)
        if COUNTS:
            if weight is None:
                z += tl.sum(x_tile, axis=0)
            else:
                weights = tl.load(weight + pair * length + rows, mask=present, other=0.0)
                z += tl.sum(x_tile * weights[:, None], axis=0)
    tl.store(last_s + pair * F * E + cell, s, mask=inside)
    tl.store(last_z + pair * F + f, z, mask=writes_z)


@triton.jit(do_not_specialize=["length"])
def _out_kernel(
    q,
    k,
    v,
    q_gamma,
    k_gamma,
    mask,
    s,
    z,
    out,
    exact,
    denominator,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    heads,
    length,
    eps,
    F: tl.constexpr,
    E: tl.constexpr,
    CHUNK: tl.constexpr,
    CAUSAL: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_E: tl.constexpr,
    MIXED: tl.constexpr,
    MAP: tl.constexpr,
    NORM: tl.constexpr,
    NORM_EPS: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    batch, head = pair // heads, pair % heads
    chunk = tl.program_id(1)
    e = tl.program_id(2) * BLOCK_E + tl.arange(0, BLOCK_E)
    rows = (chunk * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)
    inside = rows < length
    q += batch * q_batch + head * q_head
    of_state = pair
    if CAUSAL:
        of_state = pair * tl.cdiv(length, CHUNK) + chunk
        k += batch * k_batch + head * k_head
        v += batch * v_batch + head * v_head
        present = real_rows(mask, batch, rows, length)

    q_norms = row_norms(q, rows, q_row, inside, F, BLOCK_F, MAP, NORM)
    if CAUSAL:
        k_norms = row_norms(k, rows, k_row, present, F, BLOCK_F, MAP, NORM)
    numerator = tl.zeros((CHUNK, BLOCK_E), dtype=tl.float32)
    total = tl.zeros((CHUNK,), dtype=tl.float32)
    scores = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    for start in range(0, F, BLOCK_F):
        f = start + tl.arange(0, BLOCK_F)
        q_tile = load_features(q, rows, f, q_row, inside, q_norms, q_gamma, F, MAP, NORM, NORM_EPS)
        if CAUSAL:
            k_tile = load_features(k, rows, f, k_row, present, k_norms, k_gamma, F, MAP, NORM, NORM_EPS)
            scores += tl.dot(q_tile, tl.trans(k_tile), input_precision=EXACT)
        if s is not None:
            numerator += tl.dot(q_tile, _state_tile(s + of_state * F * E, f, e, F, E), input_precision=MIXED)
            if NORMALIZE:
                z_tile = tl.load(z + of_state * F + f, mask=f < F, other=0.0)
                total += tl.sum(q_tile * z_tile[None, :], axis=1)
    if CAUSAL:
        scores = tl.where(rows[:, None] >= rows[None, :], scores, 0.0)
        numerator += tl.dot(scores, load_tile(v, rows, e, v_row, present, E), input_precision=MIXED)
        total += tl.sum(scores, axis=1)
    if NORMALIZE:
        total += eps
        numerator = numerator / total[:, None]
        if denominator is not None:
            tl.store(denominator + pair * length + rows, total, mask=inside & (tl.program_id(2) == 0))
    cell = (pair * length + rows)[:, None] * E + e[None, :]
    kept = inside[:, None] & (e < E)[None, :]
    tl.store(out + cell, numerator, mask=kept)
    if exact is not None:
        tl.store(exact + cell, numerator, mask=kept)


@triton.jit(do_not_specialize=["length"])
def _grad_q_kernel(
    q,
    g,
    k,
    v,
    q_gamma,
    k_gamma,
    mask,
    s,
    z,
    exact,
    denominator,
    delta,
    grad_q,
    grad_gamma,
    q_batch,
    q_head,
    q_row,
    g_batch,
    g_head,
    g_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    heads,
    length,
    eps,
    F: tl.constexpr,
    E: tl.constexpr,
    CHUNK: tl.constexpr,
    CAUSAL: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_E: tl.constexpr,
    MIXED: tl.constexpr,
    MAP: tl.constexpr,
    NORM: tl.constexpr,
    NORM_EPS: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    batch, head = pair // heads, pair % heads
    chunk = tl.program_id(1)
    f = tl.program_id(2) * BLOCK_F + tl.arange(0, BLOCK_F)
    rows = (chunk * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)
    inside = rows < length
    q += batch * q_batch + head * q_head
    g += batch * g_batch + head * g_head
    of_state = pair
    if CAUSAL:
        of_state = pair * tl.cdiv(length, CHUNK) + chunk
        k += batch * k_batch + head * k_head
        v += batch * v_batch + head * v_head
        present = real_rows(mask, batch, rows, length)

    grad = tl.zeros((CHUNK, BLOCK_F), dtype=tl.float32)
    grad_scores = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    along = tl.zeros((CHUNK,), dtype=tl.float32)
    for start in range(0, E, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)
        g_tile = load_tile(g, rows, e, g_row, inside, E)
        if CAUSAL:
            v_tile = load_tile(v, rows, e, v_row, present, E)
            grad_scores += tl.dot(g_tile, tl.trans(v_tile), input_precision=EXACT)
        if s is not None:
            s_tile = _state_tile(s + of_state * F * E, f, e, F, E)
            grad += tl.dot(g_tile, tl.trans(s_tile), input_precision=MIXED)
        if exact is not None:
            along += tl.sum(g_tile * load_tile(exact + pair * length * E, rows, e, E, inside, E), axis=1)
    if NORMALIZE:
        divisor = tl.load(denominator + pair * length + rows, mask=inside, other=1.0)
        of_total = -along / divisor
        tl.store(delta + pair * length + rows, of_total, mask=inside & (tl.program_id(2) == 0))
        along = -eps * of_total
        grad = grad / divisor[:, None]
        grad_scores = grad_scores / divisor[:, None] + of_total[:, None]
        if z is not None:
            z_tile = tl.load(z + of_state * F + f, mask=f < F, other=0.0)
            grad += of_total[:, None] * z_tile[None, :]
    if CAUSAL:
        grad_scores = tl.where(rows[:, None] >= rows[None, :], grad_scores, 0.0)
        k_norms = row_norms(k, rows, k_row, present, F, BLOCK_F, MAP, NORM)
        k_tile = load_features(k, rows, f, k_row, present, k_norms, k_gamma, F, MAP, NORM, NORM_EPS)
        grad += tl.dot(grad_scores, k_tile, input_precision=MIXED)
    norms = row_norms(q, rows, q_row, inside, F, BLOCK_F, MAP, NORM)
    raw = load_raw(q, rows, f, q_row, inside, F, MAP)
    if grad_gamma is not None:
        part = (pair * tl.cdiv(length, CHUNK) + chunk) * F + f
        tl.store(grad_gamma + part, grad_of_gamma(grad, raw, norms, MAP, NORM_EPS), mask=f < F)
    grad = grad_of_raw(grad, raw, f, norms, along, q_gamma, F, MAP, NORM, NORM_EPS)
    cell = (pair * length + rows)[:, None] * F + f[None, :]
    tl.store(grad_q + cell, grad, mask=inside[:, None] & (f < F)[None, :])


@triton.jit(do_not_specialize=["length"])
def _grad_v_kernel(
    k,
    v,
    q,
    g,
    k_gamma,
    q_gamma,
    mask,
    s,
    z,
    denominator,
    delta,
    grad_v,
    along,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    q_batch,
    q_head,
    q_row,
    g_batch,
    g_head,
    g_row,
    heads,
    length,
    F: tl.constexpr,
    E: tl.constexpr,
    CHUNK: tl.constexpr,
    CAUSAL: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_E: tl.constexpr,
    MIXED: tl.constexpr,
    MAP: tl.constexpr,
    NORM: tl.constexpr,
    NORM_EPS: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    batch, head = pair // heads, pair % heads
    chunk = tl.program_id(1)
    e = tl.program_id(2) * BLOCK_E + tl.arange(0, BLOCK_E)
    rows = (chunk * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)
    inside = rows < length
    present = real_rows(mask, batch, rows, length)
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    k_norms = row_norms(k, rows, k_row, present, F, BLOCK_F, MAP, NORM)
    of_state = pair
    if CAUSAL:
        of_state = pair * tl.cdiv(length, CHUNK) + chunk
        q += batch * q_batch + head * q_head
        g += batch * g_batch + head * g_head
        q_norms = row_norms(q, rows, q_row, inside, F, BLOCK_F, MAP, NORM)

    grad = tl.zeros((CHUNK, BLOCK_E), dtype=tl.float32)
    scores = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)  # of keys (rows) and queries (columns)
    by_totals = tl.zeros((CHUNK,), dtype=tl.float32)
    for start in range(0, F, BLOCK_F):
        f = start + tl.arange(0, BLOCK_F)
        k_tile = load_features(k, rows, f, k_row, present, k_norms, k_gamma, F, MAP, NORM, NORM_EPS)
        if CAUSAL:
            q_tile = load_features(q, rows, f, q_row, inside, q_norms, q_gamma, F, MAP, NORM, NORM_EPS)
            scores += tl.dot(k_tile, tl.trans(q_tile), input_precision=EXACT)
        if s is not None:
            grad += tl.dot(k_tile, _state_tile(s + of_state * F * E, f, e, F, E), input_precision=MIXED)
            if along is not None:
                z_tile = tl.load(z + of_state * F + f, mask=f < F, other=0.0)
                by_totals += tl.sum(k_tile * z_tile[None, :], axis=1)
    if CAUSAL:
        scores = tl.where(rows[:, None] <= rows[None, :], scores, 0.0)
        if NORMALIZE:
            if along is not None:
                of_total = tl.load(delta + pair * length + rows, mask=inside, other=0.0)
                by_totals += tl.sum(scores * of_total[None, :], axis=1)
            scores = scores / tl.load(denominator + pair * length + rows, mask=inside, other=1.0)[None, :]
        grad += tl.dot(scores, load_tile(g, rows, e, g_row, inside, E), input_precision=MIXED)
    if along is not None:
        part = tl.sum(grad * load_tile(v, rows, e, v_row, present, E), axis=1)
        part += tl.where(tl.program_id(2) == 0, by_totals, 0.0)
        tl.store(along + (tl.program_id(2) * tl.num_programs(0) + pair) * length + rows, part, mask=inside)
    cell = (pair * length + rows)[:, None] * E + e[None, :]
    tl.store(grad_v + cell, grad, mask=inside[:, None] & (e < E)[None, :])


@triton.jit(do_not_specialize=["length"])
def _grad_k_kernel(
    k,
    v,
    q,
    g,
    k_gamma,
    q_gamma,
    mask,
    s,
    z,
    denominator,
    delta,
    grad_k,
    along,
    grad_gamma,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    q_batch,
    q_head,
    q_row,
    g_batch,
    g_head,
    g_row,
    heads,
    length,
    F: tl.constexpr,
    E: tl.constexpr,
    CHUNK: tl.constexpr,
    CAUSAL: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_E: tl.constexpr,
    MIXED: tl.constexpr,
    MAP: tl.constexpr,
    NORM: tl.constexpr,
    NORM_EPS: tl.constexpr,
    TILES_E: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    batch, head = pair // heads, pair % heads
    chunk = tl.program_id(1)
    f = tl.program_id(2) * BLOCK_F + tl.arange(0, BLOCK_F)
    rows = (chunk * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)
    inside = rows < length
    present = real_rows(mask, batch, rows, length)
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    of_state = pair
    if CAUSAL:
        of_state = pair * tl.cdiv(length, CHUNK) + chunk
        q += batch * q_batch + head * q_head
        g += batch * g_batch + head * g_head

    grad = tl.zeros((CHUNK, BLOCK_F), dtype=tl.float32)
    grad_scores = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)  # of keys (rows) and queries (columns)
    for start in range(0, E, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)
        v_tile = load_tile(v, rows, e, v_row, present, E)
        if CAUSAL:
            g_tile = load_tile(g, rows, e, g_row, inside, E)
            grad_scores += tl.dot(v_tile, tl.trans(g_tile), input_precision=EXACT)
        if s is not None:
            s_tile = _state_tile(s + of_state * F * E, f, e, F, E)
            grad += tl.dot(v_tile, tl.trans(s_tile), input_precision=MIXED)
    if z is not None:
        grad += tl.load(z + of_state * F + f, mask=f < F, other=0.0)[None, :]
    if CAUSAL:
        if NORMALIZE:
            divisor = tl.load(denominator + pair * length + rows, mask=inside, other=1.0)
            of_total = tl.load(delta + pair * length + rows, mask=inside, other=0.0)
            grad_scores = grad_scores / divisor[None, :] + of_total[None, :]
        grad_scores = tl.where(rows[:, None] <= rows[None, :], grad_scores, 0.0)
        q_norms = row_norms(q, rows, q_row, inside, F, BLOCK_F, MAP, NORM)
        q_tile = load_features(q, rows, f, q_row, inside, q_norms, q_gamma, F, MAP, NORM, NORM_EPS)
        grad += tl.dot(grad_scores, q_tile, input_precision=MIXED)
    norms = row_norms(k, rows, k_row, present, F, BLOCK_F, MAP, NORM)
    raw = load_raw(k, rows, f, k_row, present, F, MAP)
    if grad_gamma is not None:
        part = (pair * tl.cdiv(length, CHUNK) + chunk) * F + f
        tl.store(grad_gamma + part, grad_of_gamma(grad, raw, norms, MAP, NORM_EPS), mask=f < F)
    of_rows = tl.zeros((CHUNK,), dtype=tl.float32)
    if NORM is not None:
        for tile in range(TILES_E):
            of_rows += tl.load(along + (tile * tl.num_programs(0) + pair) * length + rows, mask=inside, other=0.0)
    grad = grad_of_raw(grad, raw, f, norms, of_rows, k_gamma, F, MAP, NORM, NORM_EPS)
    cell = (pair * length + rows)[:, None] * F + f[None, :]
    grad = tl.where(present[:, None], grad, 0.0)
    tl.store(grad_k + cell, grad, mask=inside[:, None] & (f < F)[None, :])


@triton.jit
def _step_kernel(
    q,
    k,
    v,
    q_gamma,
    k_gamma,
    mask,
    s,
    z,
    out,
    new_s,
    new_z,
    q_batch,
    q_head,
    k_batch,
    k_head,
    v_batch,
    v_head,
    heads,
    eps,
    F: tl.constexpr,
    E: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_E: tl.constexpr,
    NORMALIZE: tl.constexpr,
    MAP: tl.constexpr,
    NORM: tl.constexpr,
    NORM_EPS: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    batch, head = pair // heads, pair % heads
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    row = tl.arange(0, 1)
    inside = row < 1
    present = real_rows(mask, batch, row, 1)
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head

    q_norm = row_norms(q, row, 0, inside, F, BLOCK_F, MAP, NORM)
    k_norm = row_norms(k, row, 0, present, F, BLOCK_F, MAP, NORM)
    value = load_tile(v, row, e, 0, present, E)
    numerator = tl.zeros((BLOCK_E,), dtype=tl.float32)
    products = tl.zeros((BLOCK_F,), dtype=tl.float32)
    for start in range(0, F, BLOCK_F):
        f = start + tl.arange(0, BLOCK_F)
        query = tl.sum(load_features(q, row, f, 0, inside, q_norm, q_gamma, F, MAP, NORM, NORM_EPS), axis=0)
        key = tl.sum(load_features(k, row, f, 0, present, k_norm, k_gamma, F, MAP, NORM, NORM_EPS), axis=0)
        s_tile = _state_tile(s + pair * F * E, f, e, F, E) + key[:, None] * value
        z_tile = tl.load(z + pair * F + f, mask=f < F, other=0.0) + key
        kept = (f < F)[:, None] & (e < E)[None, :]
        tl.store(new_s + pair * F * E + f[:, None] * E + e[None, :], s_tile, mask=kept)
        tl.store(new_z + pair * F + f, z_tile, mask=(f < F) & (tl.program_id(1) == 0))
        numerator += tl.sum(query[:, None] * s_tile, axis=0)
        products += query * z_tile
    if NORMALIZE:
        numerator = numerator / (tl.sum(products, axis=0) + eps)
    tl.store(out + pair * E + e, numerator, mask=e < E)
