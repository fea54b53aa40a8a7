"""Features x̂ = φ(x) / (‖φ(x)‖ + ε) ⊙ γ of Queries and Keys, made where a kernel loads them, and the way back to ∂x.

A tile may hold some of the features only; a row's norm is therefore summed up before, over all of them. Of the
derivatives of a row, their sum a = x̂·∂x̂ is all that is needed beside those of a tile:

    ∂φ = (γ ⊙ ∂x̂ − a ∂‖φ‖/∂φ) / (‖φ‖ + ε),   ∂γ = Σ ∂x̂ ⊙ φ / (‖φ‖ + ε) over all rows,   ∂x = φ'(x) ⊙ ∂φ.

`MAP` and `NORM` are names in `fairseq_sg.ops.features`, None for neither. Like the paths in torch, the derivative of a
norm is 0 for a row of zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_raw(base, rows, columns, stride, present, WIDTH: tl.constexpr, MAP: tl.constexpr):
    """base[rows, columns] in float32; where a row is not present or a column beyond WIDTH, what φ maps to 0."""
    inside = present[:, None] & (columns < WIDTH)[None, :]
    pointers = base + rows[:, None] * stride + columns[None, :]
    return tl.load(pointers, mask=inside, other=float("-inf") if MAP == "elu" else 0.0).to(tl.float32)


@triton.jit
def mapped(x, MAP: tl.constexpr):
    """φ(x); NaN stays NaN."""
    if MAP == "elu":
        x = tl.where(x < 0, tl.exp(x), x + 1)
    elif MAP == "relu":
        x = tl.where(x < 0, 0.0, x)
    elif MAP == "squared":
        x = x * x
    return x


@triton.jit
def row_norms(
    base, rows, stride, present, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MAP: tl.constexpr, NORM: tl.constexpr
):
    """‖φ(base[row])‖ of each row, 0 where a row is not present; and where nothing is normalized."""
    total = tl.zeros((rows.shape[0],), dtype=tl.float32)
    if NORM is not None:
        for start in range(0, WIDTH, BLOCK):
            x = mapped(load_raw(base, rows, start + tl.arange(0, BLOCK), stride, present, WIDTH, MAP), MAP)
            total += tl.sum(tl.abs(x) if NORM == "l1" else x * x, axis=1)
        if NORM == "rms":
            total = total / WIDTH
        if NORM != "l1":
            total = tl.sqrt(total)
    return total


@triton.jit
def load_features(
    base,
    rows,
    columns,
    stride,
    present,
    norms,
    gamma,
    WIDTH: tl.constexpr,
    MAP: tl.constexpr,
    NORM: tl.constexpr,
    NORM_EPS: tl.constexpr,
):
    """x̂ of base[rows, columns], 0 where a row is not present or a column beyond WIDTH."""
    x = mapped(load_raw(base, rows, columns, stride, present, WIDTH, MAP), MAP)
    if NORM is not None:
        x = x / (norms + NORM_EPS)[:, None]
        if gamma is not None:
            x = x * tl.load(gamma + columns, mask=columns < WIDTH, other=0.0)[None, :]
    return x


@triton.jit
def grad_of_gamma(grad, x, norms, MAP: tl.constexpr, NORM_EPS: tl.constexpr):
    """What these rows contribute to ∂γ, from ∂x̂ and x."""
    return tl.sum(grad * mapped(x, MAP) / (norms + NORM_EPS)[:, None], axis=0)


@triton.jit
def grad_of_raw(
    grad,
    x,
    columns,
    norms,
    along,
    gamma,
    WIDTH: tl.constexpr,
    MAP: tl.constexpr,
    NORM: tl.constexpr,
    NORM_EPS: tl.constexpr,
):
    """∂x from ∂x̂, x and, of each row, its norm and x̂·∂x̂."""
    if NORM is not None:
        if gamma is not None:
            grad = grad * tl.load(gamma + columns, mask=columns < WIDTH, other=0.0)[None, :]
        features = mapped(x, MAP)
        if NORM == "l1":
            slope = tl.where(features > 0, 1.0, tl.where(features < 0, -1.0, 0.0))
        else:
            lengths = norms * WIDTH if NORM == "rms" else norms
            slope = features / tl.where(norms > 0, lengths, 1.0)[:, None]
        grad = (grad - along[:, None] * slope) / (norms + NORM_EPS)[:, None]
    if MAP == "elu":
        grad = grad * tl.where(x < 0, tl.exp(x), 1.0)
    elif MAP == "relu":
        grad = tl.where(x > 0, grad, 0.0)
    elif MAP == "squared":
        grad = grad * 2 * x
    return grad
