"""Relative attention in Triton: logits, softmax and weighted sum in one kernel, and two kernels for the backward pass.

The product of queries and distances (``shift.py``), (B, H, N, L), is made by torch. A kernel reads its entry
m − n + N − 1 of row n for the pair (n, m), so there is no copy in the order of the keys. A band of p multiplied in the
kernel would save this memory, but needs a shift within a tile, and an order of summation over sentences for ∂p. Here
the derivative of the product is written to the place of the logit, each place once, and torch multiplies it with p and
the queries. Nothing is added atomically: results are the same in every run.

A program of the forward pass has a tile of queries and walks along the keys; with x = scale · (q·k + product), largest
logit μ and sum Z so far,

    μ' = max(μ, max x),   Z ← Z e^{μ−μ'} + Σ e^{x−μ'},   out ← out e^{μ−μ'} + Σ e^{x−μ'} v,

and in the end out / Z, and ℓ = μ + ln Z, which is kept. With g the derivative of out, δ = g · out and A = e^{x−ℓ},

    ∂x = A (g vᵀ − δ),   ∂q = scale · ∂x k,   ∂product = scale · ∂x,   ∂k = scale · ∂xᵀ q,   ∂v = Aᵀ g,

the first two by tiles of queries, the others by tiles of keys, which compute A again. A query that sees nothing has
Z = 0; its ℓ is ∞, so that A is 0. Beside product and its derivative nothing of size N×M is made.

With dropout, out and ∂v have A K in the place of A, and ∂x has K (g vᵀ) in that of g vᵀ. K is 0 or 1 / (1 −
probability). Every kernel draws the same K, from a seed and the places of query and key.

Sums are float32. Products are those of the inputs' dtype. Each product of float32 is three of TF32 on tensor cores
for widths up to 64, which keep about 21 bits. In half precision A and ∂x are rounded to it, as they are in torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fairseq_sg.ops.checks import refuse_second_derivative
from fairseq_sg.ops.relative import WIDEST
from fairseq_sg.ops.relative.shift import distance_product
from fairseq_sg.ops.triton_support import dense_rows, launch, mask_bytes, power_of_two
from fairseq_sg.ops.triton_tiles import real_rows


def relative_attention_triton(
    q_content: Tensor,
    q_position: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    causal: bool,
    key_padding_mask: Tensor | None,
    scale: float,
    dropout_p: float,
) -> Tensor:
    """See `fairseq_sg.ops.relative_attention` for widths of at most `WIDEST`."""
    product = distance_product(q_position, p)
    # On the device, so that a recorded step (`graphs`) has other masks each time.
    seed = torch.randint(2**62, (1,), device=v.device) if dropout_p else None
    return _RelativeAttention.apply(q_content, product, k, v, causal, key_padding_mask, scale, seed, dropout_p)


class _RelativeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q: Tensor,
        product: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        key_padding_mask: Tensor | None,
        scale: float,
        seed: Tensor | None,
        dropout_p: float,
    ) -> Tensor:
        q, k, v = map(dense_rows, (q, k, v))
        mask = mask_bytes(key_padding_mask)
        out = v.new_empty(*q.shape[:3], v.shape[3])
        log_sum = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        options = causal, scale, seed, dropout_p
        _launch(_out_kernel, (q, product, k, v), mask, log_sum, (out,), *options, of_queries=True)
        ctx.save_for_backward(q, product, k, v, mask, log_sum, out, seed)
        ctx.causal, ctx.scale, ctx.dropout_p = causal, scale, dropout_p
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, g: Tensor) -> tuple:
        refuse_second_derivative("relative_attention")
        q, product, k, v, mask, log_sum, out, seed = ctx.saved_tensors
        inputs, g = (q, product, k, v), dense_rows(g)
        options = ctx.causal, ctx.scale, seed, ctx.dropout_p
        grad_q, grad_k, grad_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        delta = torch.empty_like(log_sum)
        # 0 is what stays where no pair of query and key has read the product. The strides are the product's.
        grad_product = torch.zeros_like(product)
        of_queries = out, g, delta, grad_q, grad_product, *g.stride()[:3]
        _launch(_grad_q_kernel, inputs, mask, log_sum, of_queries, *options, of_queries=True)
        of_keys = g, delta, grad_k, grad_v, *g.stride()[:3]
        _launch(_grad_k_v_kernel, inputs, mask, log_sum, of_keys, *options, of_queries=False)
        return grad_q, grad_product, grad_k, grad_v, None, None, None, None, None


def _launch(
    kernel,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    mask: Tensor | None,
    log_sum: Tensor,
    others: tuple,
    causal: bool,
    scale: float,
    seed: Tensor | None,
    dropout_p: float,
    *,
    of_queries: bool,
) -> None:
    """A program for every tile of queries or of keys; `others` are the arguments that this kernel alone has."""
    q, product, k, v = inputs
    (batch, heads, queries, dim), (keys, width) = q.shape, v.shape[2:]
    options = _options(q.dtype, dim, width)
    tiles = triton.cdiv(queries, options["BLOCK_N"]) if of_queries else triton.cdiv(keys, options["BLOCK_M"])
    launch(
        kernel,
        (batch * heads * tiles,),
        *inputs,
        mask,
        log_sum,
        seed,
        *others,
        *(stride for x in inputs for stride in x.stride()[:3]),
        heads,
        queries,
        keys,
        scale,
        dropout_p,
        1 / (1 - dropout_p) if dropout_p < 1 else 0.0,
        CAUSAL=causal,
        D=dim,
        E=width,
        **options,
    )


def _options(dtype: torch.dtype, dim: int, width: int) -> dict:
    """Tiles are as large as registers and 99 kB of shared memory allow, which is least without tensor cores.

    Those of queries are not of 64 rows: see `triton_support`.
    """
    block_d, block_e = (power_of_two(size, 16, WIDEST) for size in (dim, width))
    widest, single = max(block_d, block_e), dtype == torch.float32
    block = 16 if single and widest > 32 else 32
    return {
        "BLOCK_N": block,
        "BLOCK_M": block,
        "BLOCK_D": block_d,
        "BLOCK_E": block_e,
        # The parts of wider rows spill more than a kilobyte of registers a thread.
        "PRECISION": "tf32x3" if widest <= 64 else "ieee",
        "num_warps": 4 if widest <= 128 else 8,
        "num_stages": 1 if single or widest > 128 else 2,
    }


@triton.jit
def _load(base, rows, columns, stride, present, WIDTH: tl.constexpr):
    """base[rows, columns] in its own dtype, 0 where a row is not present or a column beyond WIDTH."""
    inside = present[:, None] & (columns < WIDTH)[None, :]
    return tl.load(base + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _store(base, rows, columns, length, values, WIDTH: tl.constexpr):
    """Rows below the length, of a dense base."""
    inside = (rows < length)[:, None] & (columns < WIDTH)[None, :]
    tl.store(base + rows.to(tl.int64)[:, None] * WIDTH + columns[None, :], values, mask=inside)


@triton.jit
def _visible(n, m, real, queries, keys, CAUSAL: tl.constexpr):
    visible = (n < queries)[:, None] & real[None, :]
    if CAUSAL:
        visible = visible & (m[None, :] <= n[:, None] + (keys - queries))
    return visible


@triton.jit
def _places(product, start, m, queries, by_row, BLOCK_N: tl.constexpr):
    """Where a product has the relative logits of the queries n from `start` on: in row n, entries m − n + N − 1."""
    in_tile = (tl.arange(0, BLOCK_N) * (by_row - 1))[:, None] + m[None, :]
    return product + tl.cast(start, tl.int64) * (by_row - 1) + (queries - 1) + in_tile


@triton.jit
def _logits(q, k, places, visible, scale, PRECISION: tl.constexpr):
    """x, −∞ where a key is not visible."""
    relative = tl.load(places, mask=visible, other=0.0).to(tl.float32)
    logits = (tl.dot(q, tl.trans(k), input_precision=PRECISION) + relative) * scale
    return tl.where(visible, logits, float("-inf"))


@triton.jit
def _kept(seed, pair, n, m, keys, dropout, enlarged):
    """K: 0 where dropout takes a weight, else ``enlarged``."""
    draws = tl.rand(tl.load(seed) + pair, n[:, None] * keys + m[None, :])
    return tl.where(draws >= dropout, enlarged, 0.0)


@triton.jit(do_not_specialize=["queries", "keys"])
def _out_kernel(
    q,
    product,
    k,
    v,
    mask,
    log_sum,
    seed,
    out,
    q_by_batch,
    q_by_head,
    q_by_row,
    product_by_batch,
    product_by_head,
    product_by_row,
    k_by_batch,
    k_by_head,
    k_by_row,
    v_by_batch,
    v_by_head,
    v_by_row,
    heads,
    queries,
    keys,
    scale,
    dropout,
    enlarged,
    CAUSAL: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tiles = tl.cdiv(queries, BLOCK_N)
    pair = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = pair // heads, pair % heads
    q += batch * q_by_batch + head * q_by_head
    product += batch * product_by_batch + head * product_by_head
    k += batch * k_by_batch + head * k_by_head
    v += batch * v_by_batch + head * v_by_head
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    first = tl.program_id(0) % tiles * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    q_tile = _load(q, n, d, q_by_row, n < queries, D)

    largest = tl.full((BLOCK_N,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    sums = tl.zeros((BLOCK_N, BLOCK_E), dtype=tl.float32)
    end = tl.minimum(keys, first + BLOCK_N + keys - queries) if CAUSAL else keys
    for start in range(0, end, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        real = real_rows(mask, batch, m, keys)
        visible = _visible(n, m, real, queries, keys, CAUSAL)
        k_tile = _load(k, m, d, k_by_row, real, D)
        places = _places(product, first, m, queries, product_by_row, BLOCK_N)
        logits = _logits(q_tile, k_tile, places, visible, scale, PRECISION)
        larger = tl.maximum(largest, tl.max(logits, axis=1))
        # As long as nothing was seen, −∞ − (−∞) is to be −∞.
        reference = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp(logits - reference[:, None])
        kept = tl.exp(largest - reference)
        v_tile = _load(v, m, e, v_by_row, real, E)
        total = total * kept + tl.sum(weights, axis=1)
        if seed is not None:
            weights = weights * _kept(seed, pair, n, m, keys, dropout, enlarged)
        sums = sums * kept[:, None] + tl.dot(weights.to(v_tile.dtype), v_tile, input_precision=PRECISION)
        largest = larger

    seen = total > 0
    total = tl.where(seen, total, 1.0)
    _store(out + pair * queries * E, n, e, queries, sums / total[:, None], E)
    tl.store(log_sum + pair * queries + n, tl.where(seen, largest + tl.log(total), float("inf")), mask=n < queries)


@triton.jit(do_not_specialize=["queries", "keys"])
def _grad_q_kernel(
    q,
    product,
    k,
    v,
    mask,
    log_sum,
    seed,
    out,
    g,
    delta,
    grad_q,
    grad_product,
    g_by_batch,
    g_by_head,
    g_by_row,
    q_by_batch,
    q_by_head,
    q_by_row,
    product_by_batch,
    product_by_head,
    product_by_row,
    k_by_batch,
    k_by_head,
    k_by_row,
    v_by_batch,
    v_by_head,
    v_by_row,
    heads,
    queries,
    keys,
    scale,
    dropout,
    enlarged,
    CAUSAL: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tiles = tl.cdiv(queries, BLOCK_N)
    pair = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = pair // heads, pair % heads
    q += batch * q_by_batch + head * q_by_head
    g += batch * g_by_batch + head * g_by_head
    product += batch * product_by_batch + head * product_by_head
    grad_product += batch * product_by_batch + head * product_by_head
    k += batch * k_by_batch + head * k_by_head
    v += batch * v_by_batch + head * v_by_head
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    first = tl.program_id(0) % tiles * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    present = n < queries
    q_tile = _load(q, n, d, q_by_row, present, D)
    g_tile = _load(g, n, e, g_by_row, present, E)
    out_tile = _load(out + pair * queries * E, n, e, E, present, E)
    along = tl.sum(g_tile.to(tl.float32) * out_tile.to(tl.float32), axis=1)
    tl.store(delta + pair * queries + n, along, mask=present)
    level = tl.load(log_sum + pair * queries + n, mask=present, other=float("inf"))

    sums = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    end = tl.minimum(keys, first + BLOCK_N + keys - queries) if CAUSAL else keys
    for start in range(0, end, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        real = real_rows(mask, batch, m, keys)
        visible = _visible(n, m, real, queries, keys, CAUSAL)
        k_tile = _load(k, m, d, k_by_row, real, D)
        v_tile = _load(v, m, e, v_by_row, real, E)
        places = _places(product, first, m, queries, product_by_row, BLOCK_N)
        weights = tl.exp(_logits(q_tile, k_tile, places, visible, scale, PRECISION) - level[:, None])
        grad_weights = tl.dot(g_tile, tl.trans(v_tile), input_precision=PRECISION)
        if seed is not None:
            grad_weights = grad_weights * _kept(seed, pair, n, m, keys, dropout, enlarged)
        grad_logits = weights * (grad_weights - along[:, None]) * scale
        grad_places = _places(grad_product, first, m, queries, product_by_row, BLOCK_N)
        tl.store(grad_places, grad_logits, mask=visible)
        sums += tl.dot(grad_logits.to(k_tile.dtype), k_tile, input_precision=PRECISION)
    _store(grad_q + pair * queries * D, n, d, queries, sums, D)


@triton.jit(do_not_specialize=["queries", "keys"])
def _grad_k_v_kernel(
    q,
    product,
    k,
    v,
    mask,
    log_sum,
    seed,
    g,
    delta,
    grad_k,
    grad_v,
    g_by_batch,
    g_by_head,
    g_by_row,
    q_by_batch,
    q_by_head,
    q_by_row,
    product_by_batch,
    product_by_head,
    product_by_row,
    k_by_batch,
    k_by_head,
    k_by_row,
    v_by_batch,
    v_by_head,
    v_by_row,
    heads,
    queries,
    keys,
    scale,
    dropout,
    enlarged,
    CAUSAL: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tiles = tl.cdiv(keys, BLOCK_M)
    pair = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = pair // heads, pair % heads
    q += batch * q_by_batch + head * q_by_head
    g += batch * g_by_batch + head * g_by_head
    product += batch * product_by_batch + head * product_by_head
    k += batch * k_by_batch + head * k_by_head
    v += batch * v_by_batch + head * v_by_head
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    first = tl.program_id(0) % tiles * BLOCK_M
    m = first + tl.arange(0, BLOCK_M)
    real = real_rows(mask, batch, m, keys)
    k_tile = _load(k, m, d, k_by_row, real, D)
    v_tile = _load(v, m, e, v_by_row, real, E)

    k_sums = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    v_sums = tl.zeros((BLOCK_M, BLOCK_E), dtype=tl.float32)
    begin = tl.maximum(0, first - (keys - queries)) if CAUSAL else 0
    for start in range(begin, queries, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        present = n < queries
        visible = _visible(n, m, real, queries, keys, CAUSAL)
        q_tile = _load(q, n, d, q_by_row, present, D)
        g_tile = _load(g, n, e, g_by_row, present, E)
        level = tl.load(log_sum + pair * queries + n, mask=present, other=float("inf"))
        along = tl.load(delta + pair * queries + n, mask=present, other=0.0)
        places = _places(product, start, m, queries, product_by_row, BLOCK_N)
        weights = tl.exp(_logits(q_tile, k_tile, places, visible, scale, PRECISION) - level[:, None])
        grad_weights = tl.dot(g_tile, tl.trans(v_tile), input_precision=PRECISION)
        dropped = weights
        if seed is not None:
            kept = _kept(seed, pair, n, m, keys, dropout, enlarged)
            dropped = weights * kept
            grad_weights = grad_weights * kept
        v_sums += tl.dot(tl.trans(dropped).to(g_tile.dtype), g_tile, input_precision=PRECISION)
        grad_logits = weights * (grad_weights - along[:, None]) * scale
        k_sums += tl.dot(tl.trans(grad_logits).to(q_tile.dtype), q_tile, input_precision=PRECISION)
    _store(grad_k + pair * keys * D, m, d, keys, k_sums, D)
    _store(grad_v + pair * keys * E, m, e, keys, v_sums, E)
