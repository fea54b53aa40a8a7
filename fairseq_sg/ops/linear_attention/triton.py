"""Causal linear attention in Triton, in chunks, forward and backward.

With the sequence cut into chunks, a program for each sentence and head walks along them and writes the state that each
chunk finds, S_t = Σ_{i before t} k_i v_iᵀ and z_t = Σ k_i (`_fold_kernel`); then all chunks at once (`_out_kernel`)
compute

    num = q S_t + tril(q kᵀ) v,   den = q z_t + tril(q kᵀ) 1 + eps,   out = num / den.

Let g be the derivatives of a loss with respect to out, and d = g / den and δ = −(g · out) / den those with respect to
num and den. The same walk, from the end, collects the states' derivatives G_t = Σ_{n after t} q_nᵀ d_n and
γ_t = Σ q_n δ_n. Then

    ∂q = d S_tᵀ + δ z_t + tril(d vᵀ + δ) k,   ∂k = v G_tᵀ + γ_t + tril(d vᵀ + δ)ᵀ q,   ∂v = k G_t + tril(q kᵀ)ᵀ d.

States are not kept for the backward pass but computed again. Nothing is added atomically: results are the same in every
run.

Features and values are taken in tiles of at most 32, so any number of them will do; a chunk has 32 positions. All
arithmetic is float32. Where an input is float32, products are float32 too, without tensor cores. If all inputs are in
half precision, products of two inputs are exact in TF32. Products with a float32 factor are split into three of TF32,
which keeps about 21 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fairseq_sg.ops.checks import refuse_second_derivative
from fairseq_sg.ops.linear_attention.full import State
from fairseq_sg.ops.triton_support import dense_rows, launch, mask_bytes, power_of_two
from fairseq_sg.ops.triton_tiles import load_tile, real_rows


def linear_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_padding_mask: Tensor | None,
    state: State | None,
    return_state: bool,
    normalize: bool,
    eps: float,
) -> tuple[Tensor, State | None]:
    """The causal form of `fairseq_sg.ops.linear_attention`; the state is None where it is not asked for."""
    s, z = (None, None) if state is None else (state[0].float(), state[1].float())
    out, s, z = _Causal.apply(q, k, v, key_padding_mask, s, z, return_state, normalize, eps)
    return out, (s, z) if return_state else None


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
        precision = _precision(q, k, v)
        before, last = _states_of_chunks(precision, k, v, mask, s, z, return_state)
        keep = any(ctx.needs_input_grad)
        out, exact, denominator = _read(precision, q, k, v, mask, before, normalize, eps, keep)
        ctx.save_for_backward(q, k, v, mask, s, z, exact, denominator)
        ctx.set_materialize_grads(False)
        return out, *last

    @staticmethod
    def backward(ctx: FunctionCtx, g: Tensor | None, g_s: Tensor | None, g_z: Tensor | None) -> tuple:
        refuse_second_derivative("linear_attention")
        q, k, v, mask, s, z, exact, denominator = ctx.saved_tensors
        precision = _precision(q, k, v)
        g = torch.zeros_like(v) if g is None else g
        before, _ = _states_of_chunks(precision, k, v, mask, s, z, False)
        grad_q, delta = _grad_q(precision, q, k, v, mask, g, before, exact, denominator)
        after, first = _grad_states_of_chunks(precision, q, g, denominator, delta, g_s, g_z, has_state=s is not None)
        grad_k, grad_v = _grad_k_v(precision, q, k, v, mask, g, after, denominator, delta)
        return grad_q, grad_k, grad_v, None, *first, None, None, None


# The length of a chunk, and the size of tiles. Chunks of 64 spill up to 5 kB of registers in half precision (compute
# capability 8.0), and up to 16 kB in single. See also `triton_support`.
CHUNK = 32


class _Precision(NamedTuple):
    """Of products of two inputs, and of others."""

    exact: str
    mixed: str


def _precision(*inputs: Tensor) -> _Precision:
    in_half = all(x.dtype in (torch.float16, torch.bfloat16) for x in inputs)
    return _Precision("tf32", "tf32x3") if in_half else _Precision("ieee", "ieee")


def _options(features: int, width: int) -> dict:
    return {
        "F": features,
        "E": width,
        "CHUNK": CHUNK,
        "BLOCK_F": power_of_two(features, 16, CHUNK),
        "BLOCK_E": power_of_two(width, 16, CHUNK),
        "num_warps": 4,
        "num_stages": 1,
    }


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for x in tensors for stride in x.stride()[:3])


def _states_of_chunks(
    precision: _Precision,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    s: Tensor | None,
    z: Tensor | None,
    return_last: bool,
) -> tuple[State | None, tuple[Tensor | None, Tensor | None]]:
    """The state before each chunk, (B, H, T, F, E) and (B, H, T, F), None for zero, and the last one, if asked for."""
    several = k.shape[2] > CHUNK
    each, last = None, (None, None)
    if several or return_last:
        each, last = _fold(precision, k, v, mask=mask, first=(s, z), each=several)
    if each is None and s is not None:
        each = s.contiguous(), z.contiguous()
    return each, last if return_last else (None, None)


def _grad_states_of_chunks(
    precision: _Precision,
    q: Tensor,
    g: Tensor,
    denominator: Tensor | None,
    delta: Tensor | None,
    g_s: Tensor | None,
    g_z: Tensor | None,
    *,
    has_state: bool,
) -> tuple[State | None, tuple[Tensor | None, Tensor | None]]:
    """The derivatives of the state after each chunk, None for zero, and those of the first state, if there is one."""
    at_end = g_s is not None or g_z is not None
    if not at_end and not has_state and q.shape[2] <= CHUNK:
        return None, (None, None)
    if at_end:
        shape = (*q.shape[:2], q.shape[3])  # (B, H, F)
        g_s = q.new_zeros(*shape, g.shape[3], dtype=torch.float32) if g_s is None else g_s
        g_z = q.new_zeros(*shape, dtype=torch.float32) if g_z is None else g_z
    options = dict(first=(g_s, g_z), each=True, reverse=True, with_z=denominator is not None)
    after, first = _fold(precision, q, g, divisor=denominator, weight=delta, **options)
    return after, first if has_state else (None, None)


def _fold(
    precision: _Precision,
    x: Tensor,
    y: Tensor,
    *,
    divisor: Tensor | None = None,
    weight: Tensor | None = None,
    mask: Tensor | None = None,
    first: tuple[Tensor | None, Tensor | None] = (None, None),
    each: bool = False,
    reverse: bool = False,
    with_z: bool = True,
) -> tuple[State | None, State]:
    """Σ x_i (y_i / divisor_i)ᵀ and, `with_z`, Σ x_i weight_i, starting at `first`: before `each` chunk, and in all."""
    (batch, heads, length, features), width = x.shape, y.shape[3]
    chunks = triton.cdiv(length, CHUNK)
    x, y = map(dense_rows, (x, y))

    def empty(*shape: int) -> Tensor:
        return torch.empty(batch, heads, *shape, dtype=torch.float32, device=x.device)

    before = (empty(chunks, features, width), empty(chunks, features)) if each else (None, None)
    last = empty(features, width), empty(features)
    options = _options(features, width)
    launch(
        _fold_kernel,
        (batch * heads, triton.cdiv(features, options["BLOCK_F"]), triton.cdiv(width, options["BLOCK_E"])),
        x,
        y,
        divisor,
        weight,
        mask_bytes(mask),
        *(None if x is None else x.contiguous() for x in first),
        *before,
        *last,
        *_strides(x, y),
        heads,
        length,
        REVERSE=reverse,
        WITH_Z=with_z,
        PRECISION=precision.exact if divisor is None else precision.mixed,
        **options,
    )
    return before if each else None, last


def _read(
    precision: _Precision,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    state: State | None,
    normalize: bool,
    eps: float,
    keep: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """out; to `keep` for the backward pass, also out in float32 and the denominators if it is normalized, else None."""
    (batch, heads, length, features), width = q.shape, v.shape[3]
    q, k, v = map(dense_rows, (q, k, v))
    out = torch.empty(batch, heads, length, width, dtype=v.dtype, device=q.device)
    exact = denominator = None
    if keep and normalize:
        exact = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        denominator = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
    options = _options(features, width)
    launch(
        _out_kernel,
        (batch * heads, triton.cdiv(length, CHUNK), triton.cdiv(width, options["BLOCK_E"])),
        q,
        k,
        v,
        mask_bytes(mask),
        *(state or (None, None)),
        out,
        None if exact is out else exact,
        denominator,
        *_strides(q, k, v),
        heads,
        length,
        eps,
        NORMALIZE=normalize,
        EXACT=precision.exact,
        MIXED=precision.mixed,
        **options,
    )
    return out, exact, denominator


def _grad_q(
    precision: _Precision,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    g: Tensor,
    state: State | None,
    exact: Tensor | None,
    denominator: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """∂q, and δ of every position if normalized."""
    (batch, heads, length, features), width = q.shape, g.shape[3]
    q, k, v, g = map(dense_rows, (q, k, v, g))
    grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    delta = None if denominator is None else torch.empty_like(denominator)
    options = _options(features, width)
    launch(
        _grad_q_kernel,
        (batch * heads, triton.cdiv(length, CHUNK), triton.cdiv(features, options["BLOCK_F"])),
        k,
        v,
        g,
        mask_bytes(mask),
        *(state or (None, None)),
        exact,
        denominator,
        delta,
        grad_q,
        *_strides(k, v, g),
        heads,
        length,
        NORMALIZE=denominator is not None,
        EXACT=precision.exact,
        MIXED=precision.mixed,
        **options,
    )
    return grad_q, delta


def _grad_k_v(
    precision: _Precision,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    g: Tensor,
    state: State | None,
    denominator: Tensor | None,
    delta: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """∂k and ∂v; `state` holds the derivatives of the state after each chunk."""
    (batch, heads, length, features), width = k.shape, v.shape[3]
    q, k, v, g = map(dense_rows, (q, k, v, g))
    grad_k, grad_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    s, z = state or (None, None)
    options = _options(features, width)
    tiles_f, tiles_e = triton.cdiv(features, options["BLOCK_F"]), triton.cdiv(width, options["BLOCK_E"])
    options |= {"NORMALIZE": denominator is not None, "EXACT": precision.exact, "MIXED": precision.mixed}
    grid, mask = (batch * heads, triton.cdiv(length, CHUNK)), mask_bytes(mask)
    launch(
        _grad_v_kernel,
        (*grid, tiles_e),
        q,
        k,
        g,
        mask,
        s,
        denominator,
        grad_v,
        *_strides(q, k, g),
        heads,
        length,
        **options,
    )
    launch(
        _grad_k_kernel,
        (*grid, tiles_f),
        q,
        v,
        g,
        mask,
        s,
        z,
        denominator,
        delta,
        grad_k,
        *_strides(q, v, g),
        heads,
        length,
        **options,
    )
    return grad_k, grad_v


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
    WITH_Z: tl.constexpr,
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
        if WITH_Z:
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
    state = pair * tl.cdiv(length, CHUNK) + chunk
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head

    numerator = tl.zeros((CHUNK, BLOCK_E), dtype=tl.float32)
    total = tl.zeros((CHUNK,), dtype=tl.float32)
    scores = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)  # of queries (rows) and keys (columns)
    for start in range(0, F, BLOCK_F):
        f = start + tl.arange(0, BLOCK_F)
        q_tile = load_tile(q, rows, f, q_row, inside, F)
        k_tile = load_tile(k, rows, f, k_row, present, F)
        scores += tl.dot(q_tile, tl.trans(k_tile), input_precision=EXACT)
        if s is not None:
            numerator += tl.dot(q_tile, _state_tile(s + state * F * E, f, e, F, E), input_precision=MIXED)
            if NORMALIZE:
                z_tile = tl.load(z + state * F + f, mask=f < F, other=0.0)
                total += tl.sum(q_tile * z_tile[None, :], axis=1)
    scores = tl.where(rows[:, None] >= rows[None, :], scores, 0.0)
    numerator += tl.dot(scores, load_tile(v, rows, e, v_row, present, E), input_precision=MIXED)
    if NORMALIZE:
        total += tl.sum(scores, axis=1) + eps
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
    k,
    v,
    g,
    mask,
    s,
    z,
    exact,
    denominator,
    delta,
    grad_q,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    g_batch,
    g_head,
    g_row,
    heads,
    length,
    F: tl.constexpr,
    E: tl.constexpr,
    CHUNK: tl.constexpr,
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
    state = pair * tl.cdiv(length, CHUNK) + chunk
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    g += batch * g_batch + head * g_head

    grad = tl.zeros((CHUNK, BLOCK_F), dtype=tl.float32)
    grad_scores = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)  # of queries (rows) and keys (columns)
    along = tl.zeros((CHUNK,), dtype=tl.float32)  # g · out
    for start in range(0, E, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)
        g_tile = load_tile(g, rows, e, g_row, inside, E)
        v_tile = load_tile(v, rows, e, v_row, present, E)
        grad_scores += tl.dot(g_tile, tl.trans(v_tile), input_precision=EXACT)
        if s is not None:
            s_tile = _state_tile(s + state * F * E, f, e, F, E)
            grad += tl.dot(g_tile, tl.trans(s_tile), input_precision=MIXED)
        if NORMALIZE:
            along += tl.sum(g_tile * load_tile(exact + pair * length * E, rows, e, E, inside, E), axis=1)
    if NORMALIZE:
        divisor = tl.load(denominator + pair * length + rows, mask=inside, other=1.0)
        grad_total = -along / divisor
        tl.store(delta + pair * length + rows, grad_total, mask=inside & (tl.program_id(2) == 0))
        grad = grad / divisor[:, None]
        grad_scores = grad_scores / divisor[:, None] + grad_total[:, None]
        if z is not None:
            z_tile = tl.load(z + state * F + f, mask=f < F, other=0.0)
            grad += grad_total[:, None] * z_tile[None, :]
    grad_scores = tl.where(rows[:, None] >= rows[None, :], grad_scores, 0.0)
    grad += tl.dot(grad_scores, load_tile(k, rows, f, k_row, present, F), input_precision=MIXED)
    cell = (pair * length + rows)[:, None] * F + f[None, :]
    tl.store(grad_q + cell, grad, mask=inside[:, None] & (f < F)[None, :])


@triton.jit(do_not_specialize=["length"])
def _grad_v_kernel(
    q,
    k,
    g,
    mask,
    s,
    denominator,
    grad_v,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    g_batch,
    g_head,
    g_row,
    heads,
    length,
    F: tl.constexpr,
    E: tl.constexpr,
    CHUNK: tl.constexpr,
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
    state = pair * tl.cdiv(length, CHUNK) + chunk
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head * k_head
    g += batch * g_batch + head * g_head

    grad = tl.zeros((CHUNK, BLOCK_E), dtype=tl.float32)
    scores = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)  # of keys (rows) and queries (columns)
    for start in range(0, F, BLOCK_F):
        f = start + tl.arange(0, BLOCK_F)
        k_tile = load_tile(k, rows, f, k_row, present, F)
        q_tile = load_tile(q, rows, f, q_row, inside, F)
        scores += tl.dot(k_tile, tl.trans(q_tile), input_precision=EXACT)
        if s is not None:
            grad += tl.dot(k_tile, _state_tile(s + state * F * E, f, e, F, E), input_precision=MIXED)
    scores = tl.where(rows[:, None] <= rows[None, :], scores, 0.0)
    if NORMALIZE:
        scores = scores / tl.load(denominator + pair * length + rows, mask=inside, other=1.0)[None, :]
    grad += tl.dot(scores, load_tile(g, rows, e, g_row, inside, E), input_precision=MIXED)
    cell = (pair * length + rows)[:, None] * E + e[None, :]
    tl.store(grad_v + cell, grad, mask=inside[:, None] & (e < E)[None, :])


@triton.jit(do_not_specialize=["length"])
def _grad_k_kernel(
    q,
    v,
    g,
    mask,
    s,
    z,
    denominator,
    delta,
    grad_k,
    q_batch,
    q_head,
    q_row,
    v_batch,
    v_head,
    v_row,
    g_batch,
    g_head,
    g_row,
    heads,
    length,
    F: tl.constexpr,
    E: tl.constexpr,
    CHUNK: tl.constexpr,
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
    state = pair * tl.cdiv(length, CHUNK) + chunk
    q += batch * q_batch + head * q_head
    v += batch * v_batch + head * v_head
    g += batch * g_batch + head * g_head

    grad = tl.zeros((CHUNK, BLOCK_F), dtype=tl.float32)
    grad_scores = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)  # of keys (rows) and queries (columns)
    for start in range(0, E, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)
        v_tile = load_tile(v, rows, e, v_row, present, E)
        g_tile = load_tile(g, rows, e, g_row, inside, E)
        grad_scores += tl.dot(v_tile, tl.trans(g_tile), input_precision=EXACT)
        if s is not None:
            s_tile = _state_tile(s + state * F * E, f, e, F, E)
            grad += tl.dot(v_tile, tl.trans(s_tile), input_precision=MIXED)
    if z is not None:
        grad += tl.load(z + state * F + f, mask=f < F, other=0.0)[None, :]
    if NORMALIZE:
        divisor = tl.load(denominator + pair * length + rows, mask=inside, other=1.0)
        grad_total = tl.load(delta + pair * length + rows, mask=inside, other=0.0)
        grad_scores = grad_scores / divisor[None, :] + grad_total[None, :]
    grad_scores = tl.where(rows[:, None] <= rows[None, :], grad_scores, 0.0)
    grad += tl.dot(grad_scores, load_tile(q, rows, f, q_row, inside, F), input_precision=MIXED)
    cell = (pair * length + rows)[:, None] * F + f[None, :]
    grad = tl.where(present[:, None], grad, 0.0)
    tl.store(grad_k + cell, grad, mask=inside[:, None] & (f < F)[None, :])
