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

Features and values are taken in tiles, so any number of them will do. All arithmetic is float32. Where an input is
float32, products are float32 too, without tensor cores, and chunks and tiles are 32; if all are in half precision,
products of two inputs are exact in TF32, those with a float32 factor are split into three of TF32, which loses nothing
that counts, and chunks and tiles are 64. With more, float32 kernels run out of registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx

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
) -> tuple[Tensor, State | None]:
    """See `fairseq_sg.ops.linear_attention`; the state is None where it was not asked for."""
    s, z = (None, None) if state is None else (state[0].float(), state[1].float())
    if not causal:
        s, z = _Fold.apply(k, v, key_padding_mask, s, z)
        return _Read.apply(q, s, z, v.dtype, normalize, eps), (s, z) if return_state else None
    if s is not None and q.shape[2] == 1 and not _needs_gradient(q, k, v, s, z):
        out, s, z = _step(q, k, v, key_padding_mask, s, z, normalize, eps)
    else:
        out, s, z = _Causal.apply(q, k, v, key_padding_mask, s, z, return_state, normalize, eps)
    return out, (s, z) if return_state else None


def fold_triton(k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> State:
    """S = Σ_i k_i v_iᵀ and z = Σ_i k_i over what is not padding, float32."""
    return _Fold.apply(k, v, key_padding_mask, None, None)


def read_triton(q: Tensor, state: State, normalize: bool, eps: float) -> Tensor:
    """q S / (q·z + eps), or q S: (B, H, N, E) in the dtype of q."""
    return _Read.apply(q, state[0].float(), state[1].float(), q.dtype, normalize, eps)


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
        return_state: bool,
        normalize: bool,
        eps: float,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        plan = _plan(q, k, v)
        before, last = _states_of_chunks(plan, k, v, mask, s, z, return_state)
        keep = any(ctx.needs_input_grad)
        out, exact, denominator = _read(plan, q, before, v.dtype, normalize, eps, keep, (k, v, mask))
        ctx.save_for_backward(q, k, v, mask, s, z, exact, denominator)
        ctx.set_materialize_grads(False)
        return out, *last

    @staticmethod
    def backward(ctx: FunctionCtx, g: Tensor | None, g_s: Tensor | None, g_z: Tensor | None) -> tuple:
        _refuse_second_derivative()
        q, k, v, mask, s, z, exact, denominator = ctx.saved_tensors
        plan = _plan(q, k, v)
        g = torch.zeros_like(v) if g is None else g
        before, _ = _states_of_chunks(plan, k, v, mask, s, z, False)
        grad_q, delta = _grad_q(plan, q, g, before, exact, denominator, (k, v, mask))
        after, first = _grad_states_of_chunks(plan, q, g, denominator, delta, g_s, g_z, s is not None)
        grad_k, grad_v = _grad_k_v(plan, k, v, mask, after, (q, g, denominator, delta))
        return grad_q, grad_k, grad_v, None, *first, None, None, None


class _Fold(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, k: Tensor, v: Tensor, mask: Tensor | None, s: Tensor | None, z: Tensor | None
    ) -> State:
        ctx.save_for_backward(k, v, mask)
        ctx.has_state = s is not None
        return _fold(_plan(k, v), k, v, mask=mask, first=(s, z))[1]

    @staticmethod
    def backward(ctx: FunctionCtx, g_s: Tensor, g_z: Tensor) -> tuple:
        _refuse_second_derivative()
        k, v, mask = ctx.saved_tensors
        grad_k, grad_v = _grad_k_v(_plan(k, v), k, v, mask, (g_s.contiguous(), g_z.contiguous()), None)
        return grad_k, grad_v, None, *((g_s, g_z) if ctx.has_state else (None, None))


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, q: Tensor, s: Tensor, z: Tensor, dtype: torch.dtype, normalize: bool, eps: float
    ) -> Tensor:
        s, z = s.contiguous(), z.contiguous()
        keep = any(ctx.needs_input_grad)
        out, exact, denominator = _read(_plan(q), q, (s, z), dtype, normalize, eps, keep, None)
        ctx.save_for_backward(q, s, z, exact, denominator)
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, g: Tensor) -> tuple:
        _refuse_second_derivative()
        q, s, z, exact, denominator = ctx.saved_tensors
        plan = _plan(q, g)
        grad_q, delta = _grad_q(plan, q, g, (s, z), exact, denominator, None)
        _, of_state = _fold(plan, q, g, divisor=denominator, weight=delta, counts=denominator is not None)
        return grad_q, *of_state, None, None, None


def _refuse_second_derivative() -> None:
    # With torch's `once_differentiable` a second derivative would be 0 without a word where grad is a constant.
    if torch.is_grad_enabled():
        raise RuntimeError(
            "linear_attention has no second derivative in Triton (create_graph=True); "
            "implementation='naive' and 'chunked' have one"
        )


def _needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


class _Plan(NamedTuple):
    """Length of a chunk, which is the size of tiles too, and precision of products: of two inputs, and of others."""

    chunk: int
    exact: str
    mixed: str

    def options(self, features: int, width: int) -> dict:
        return {
            "F": features,
            "E": width,
            "CHUNK": self.chunk,
            "BLOCK_F": power_of_two(features, 16, self.chunk),
            "BLOCK_E": power_of_two(width, 16, self.chunk),
            "num_warps": 4,
            "num_stages": 1,
        }


_IN_HALF = _Plan(64, "tf32", "tf32x3")
_IN_SINGLE = _Plan(32, "ieee", "ieee")


def _plan(*inputs: Tensor) -> _Plan:
    return _IN_HALF if all(x.dtype in (torch.float16, torch.bfloat16) for x in inputs) else _IN_SINGLE


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
    plan: _Plan, k: Tensor, v: Tensor, mask: Tensor | None, s: Tensor | None, z: Tensor | None, return_last: bool
) -> tuple[State | None, tuple[Tensor | None, Tensor | None]]:
    """What each chunk finds, (B, H, T, F, E) and (B, H, T, F), None for nothing, and the last state, if asked for."""
    several = k.shape[2] > plan.chunk
    each, last = None, (None, None)
    if several or return_last:
        each, last = _fold(plan, k, v, mask=mask, first=(s, z), each=several)
    if each is None and s is not None:
        each = s.contiguous(), z.contiguous()
    return each, last


def _grad_states_of_chunks(
    plan: _Plan,
    q: Tensor,
    g: Tensor,
    denominator: Tensor | None,
    delta: Tensor | None,
    g_s: Tensor | None,
    g_z: Tensor | None,
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
    after, first = _fold(plan, q, g, divisor=denominator, weight=delta, **options)
    return after, first if has_state else (None, None)


def _fold(
    plan: _Plan,
    x: Tensor,
    y: Tensor,
    *,
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
        PRECISION=plan.exact if divisor is None else plan.mixed,
        **options,
    )
    return before if each else None, last


def _read(
    plan: _Plan,
    q: Tensor,
    state: State | None,
    dtype: torch.dtype,
    normalize: bool,
    eps: float,
    keep: bool,
    keys: tuple[Tensor, Tensor, Tensor | None] | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """out, and if it is to be kept for the backward pass: out in float32 and the denominators, both if normalized.

    `keys` are k, v and the mask in the causal form, which has a state for each chunk, or none.
    """
    batch, heads, length, features = q.shape
    k, v, mask = keys or (None, None, None)
    width = state[0].shape[-1] if v is None else v.shape[3]
    q, k, v = _dense_rows(q, k, v)
    out = torch.empty(batch, heads, length, width, dtype=dtype, device=q.device)
    exact = denominator = None
    if keep and normalize:
        exact = out if dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        denominator = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
    options = plan.options(features, width)
    launch(
        _out_kernel,
        (batch * heads, _count(length, plan.chunk), _count(width, options["BLOCK_E"])),
        q,
        k,
        v,
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
        EXACT=plan.exact,
        MIXED=plan.mixed,
        **options,
    )
    return out, exact, denominator


def _grad_q(
    plan: _Plan,
    q: Tensor,
    g: Tensor,
    state: State | None,
    exact: Tensor | None,
    denominator: Tensor | None,
    keys: tuple[Tensor, Tensor, Tensor | None] | None,
) -> tuple[Tensor, Tensor | None]:
    """∂q, and δ of every position if normalized."""
    (batch, heads, length, features), width = q.shape, g.shape[3]
    k, v, mask = keys or (None, None, None)
    g, k, v = _dense_rows(g, k, v)
    grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    delta = None if denominator is None else torch.empty_like(denominator)
    options = plan.options(features, width)
    launch(
        _grad_q_kernel,
        (batch * heads, _count(length, plan.chunk), _count(features, options["BLOCK_F"])),
        g,
        k,
        v,
        _bytes(mask),
        *(state or (None, None)),
        exact,
        denominator,
        delta,
        grad_q,
        *_strides(g),
        *_strides(k),
        *_strides(v),
        heads,
        length,
        CAUSAL=keys is not None,
        NORMALIZE=denominator is not None,
        EXACT=plan.exact,
        MIXED=plan.mixed,
        **options,
    )
    return grad_q, delta


def _grad_k_v(
    plan: _Plan, k: Tensor, v: Tensor, mask: Tensor | None, state: State | None, queries: tuple | None
) -> tuple[Tensor, Tensor]:
    """∂k and ∂v from the derivatives of the state, or of those of all chunks and of the queries within each chunk."""
    (batch, heads, length, features), width = k.shape, v.shape[3]
    q, g, denominator, delta = queries or (None, None, None, None)
    k, v, q, g = _dense_rows(k, v, q, g)
    mask = _bytes(mask)
    s, z = state or (None, None)
    grad_k, grad_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    of_queries = (q, g, denominator, *_strides(q), *_strides(g), heads, length)
    options = plan.options(features, width) | {
        "CAUSAL": queries is not None,
        "NORMALIZE": denominator is not None,
        "EXACT": plan.exact,
        "MIXED": plan.mixed,
    }
    grid = (batch * heads, _count(length, plan.chunk))
    tiles_f, tiles_e = _count(features, options["BLOCK_F"]), _count(width, options["BLOCK_E"])
    launch(_grad_k_kernel, (*grid, tiles_f), v, mask, s, z, grad_k, *_strides(v), delta, *of_queries, **options)
    launch(_grad_v_kernel, (*grid, tiles_e), k, mask, s, grad_v, *_strides(k), *of_queries, **options)
    return grad_k, grad_v


def _step(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, s: Tensor, z: Tensor, normalize: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """One position after the state, without gradients: out and the new state."""
    (batch, heads, _, features), width = q.shape, v.shape[3]
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
        F=features,
        E=width,
        BLOCK_F=power_of_two(features, 16, 64),
        BLOCK_E=block,
        NORMALIZE=normalize,
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
        x_tile = load_tile(x, rows, f, x_row, present, F)
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

    numerator = tl.zeros((CHUNK, BLOCK_E), dtype=tl.float32)
    total = tl.zeros((CHUNK,), dtype=tl.float32)
    scores = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    for start in range(0, F, BLOCK_F):
        f = start + tl.arange(0, BLOCK_F)
        q_tile = load_tile(q, rows, f, q_row, inside, F)
        if CAUSAL:
            k_tile = load_tile(k, rows, f, k_row, present, F)
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
    g,
    k,
    v,
    mask,
    s,
    z,
    exact,
    denominator,
    delta,
    grad_q,
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
    F: tl.constexpr,
    E: tl.constexpr,
    CHUNK: tl.constexpr,
    CAUSAL: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_E: tl.constexpr,
    MIXED: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    batch, head = pair // heads, pair % heads
    chunk = tl.program_id(1)
    f = tl.program_id(2) * BLOCK_F + tl.arange(0, BLOCK_F)
    rows = (chunk * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)
    inside = rows < length
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
        if NORMALIZE:
            along += tl.sum(g_tile * load_tile(exact + pair * length * E, rows, e, E, inside, E), axis=1)
    if NORMALIZE:
        divisor = tl.load(denominator + pair * length + rows, mask=inside, other=1.0)
        of_total = -along / divisor
        tl.store(delta + pair * length + rows, of_total, mask=inside & (tl.program_id(2) == 0))
        grad = grad / divisor[:, None]
        grad_scores = grad_scores / divisor[:, None] + of_total[:, None]
        if z is not None:
            z_tile = tl.load(z + of_state * F + f, mask=f < F, other=0.0)
            grad += of_total[:, None] * z_tile[None, :]
    if CAUSAL:
        grad_scores = tl.where(rows[:, None] >= rows[None, :], grad_scores, 0.0)
        grad += tl.dot(grad_scores, load_tile(k, rows, f, k_row, present, F), input_precision=MIXED)
    cell = (pair * length + rows)[:, None] * F + f[None, :]
    tl.store(grad_q + cell, grad, mask=inside[:, None] & (f < F)[None, :])


@triton.jit(do_not_specialize=["length"])
def _grad_k_kernel(
    v,
    mask,
    s,
    z,
    grad_k,
    v_batch,
    v_head,
    v_row,
    delta,
    q,
    g,
    denominator,
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
):
    pair = tl.program_id(0).to(tl.int64)
    batch, head = pair // heads, pair % heads
    chunk = tl.program_id(1)
    f = tl.program_id(2) * BLOCK_F + tl.arange(0, BLOCK_F)
    rows = (chunk * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)
    inside = rows < length
    present = real_rows(mask, batch, rows, length)
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
        grad += tl.dot(grad_scores, load_tile(q, rows, f, q_row, inside, F), input_precision=MIXED)
    cell = (pair * length + rows)[:, None] * F + f[None, :]
    grad = tl.where(present[:, None], grad, 0.0)
    tl.store(grad_k + cell, grad, mask=inside[:, None] & (f < F)[None, :])


@triton.jit(do_not_specialize=["length"])
def _grad_v_kernel(
    k,
    mask,
    s,
    grad_v,
    k_batch,
    k_head,
    k_row,
    q,
    g,
    denominator,
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
):
    pair = tl.program_id(0).to(tl.int64)
    batch, head = pair // heads, pair % heads
    chunk = tl.program_id(1)
    e = tl.program_id(2) * BLOCK_E + tl.arange(0, BLOCK_E)
    rows = (chunk * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)
    inside = rows < length
    present = real_rows(mask, batch, rows, length)
    k += batch * k_batch + head * k_head
    of_state = pair
    if CAUSAL:
        of_state = pair * tl.cdiv(length, CHUNK) + chunk
        q += batch * q_batch + head * q_head
        g += batch * g_batch + head * g_head

    grad = tl.zeros((CHUNK, BLOCK_E), dtype=tl.float32)
    scores = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)  # of keys (rows) and queries (columns)
    for start in range(0, F, BLOCK_F):
        f = start + tl.arange(0, BLOCK_F)
        k_tile = load_tile(k, rows, f, k_row, present, F)
        if CAUSAL:
            scores += tl.dot(k_tile, tl.trans(load_tile(q, rows, f, q_row, inside, F)), input_precision=EXACT)
        if s is not None:
            grad += tl.dot(k_tile, _state_tile(s + of_state * F * E, f, e, F, E), input_precision=MIXED)
    if CAUSAL:
        if NORMALIZE:
            scores = scores / tl.load(denominator + pair * length + rows, mask=inside, other=1.0)[None, :]
        scores = tl.where(rows[:, None] <= rows[None, :], scores, 0.0)
        grad += tl.dot(scores, load_tile(g, rows, e, g_row, inside, E), input_precision=MIXED)
    cell = (pair * length + rows)[:, None] * E + e[None, :]
    tl.store(grad_v + cell, grad, mask=inside[:, None] & (e < E)[None, :])


@triton.jit
def _step_kernel(
    q,
    k,
    v,
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
):
    pair = tl.program_id(0).to(tl.int64)
    batch, head = pair // heads, pair % heads
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    of_keys, of_values = F, E
    if mask is not None:
        padding = tl.load(mask + batch) != 0
        of_keys, of_values = tl.where(padding, 0, F), tl.where(padding, 0, E)

    value = tl.load(v + e, mask=e < of_values, other=0.0).to(tl.float32)
    numerator = tl.zeros((BLOCK_E,), dtype=tl.float32)
    products = tl.zeros((BLOCK_F,), dtype=tl.float32)
    for start in range(0, F, BLOCK_F):
        f = start + tl.arange(0, BLOCK_F)
        query = tl.load(q + f, mask=f < F, other=0.0).to(tl.float32)
        key = tl.load(k + f, mask=f < of_keys, other=0.0).to(tl.float32)
        s_tile = _state_tile(s + pair * F * E, f, e, F, E) + key[:, None] * value[None, :]
        z_tile = tl.load(z + pair * F + f, mask=f < F, other=0.0) + key
        inside = (f < F)[:, None] & (e < E)[None, :]
        tl.store(new_s + pair * F * E + f[:, None] * E + e[None, :], s_tile, mask=inside)
        tl.store(new_z + pair * F + f, z_tile, mask=(f < F) & (tl.program_id(1) == 0))
        numerator += tl.sum(query[:, None] * s_tile, axis=0)
        products += query * z_tile
    if NORMALIZE:
        numerator = numerator / (tl.sum(products, axis=0) + eps)
    tl.store(out + pair * E + e, numerator, mask=e < E)
