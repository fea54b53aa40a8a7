"""The operators of a differentiable neural computer (Graves et al. 2016; Csordás & Schmidhuber 2019).

The equations are those of Csordás 2023, appendix A.1.

Letters: B batch, R read heads, K look-ups, N memory cells, W width of a cell. The state that they work on:

    memory M (B, N, W)     usage u (B, N)     links L (B, N, N)     precedence p (B, N)
    write weights w (B, N)                    read weights r (B, R, N)

All are computed in float32 (float64 where an input has it), also under ``torch.autocast``, and their results keep that
dtype: a state in half precision would lose the small links and usages of old writes. Each operator raises TypeError for
an argument that is not floating, and ValueError for shapes that do not fit and for an unknown ``implementation``:
``"auto"``, ``"naive"``, with loops over sentences, heads and cells, or ``"batched"``, which ``"auto"`` takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from fairseq_sg.ops.checks import check_floating, describe
from fairseq_sg.ops.dispatch import AUTO, choose, declare
from fairseq_sg.ops.memory import batched, naive
from fairseq_sg.ops.precision import accumulation_dtype, autocast_disabled


class Functions(NamedTuple):
    """The bare operators of one implementation (`functions`): with the same arguments, all by position."""

    content_weights: Callable[..., Tensor]
    retention: Callable[..., Tensor]
    usage: Callable[..., Tensor]
    allocation: Callable[..., Tensor]
    write: Callable[..., Tensor]
    links: Callable[..., tuple[Tensor, Tensor]]
    follow: Callable[..., tuple[Tensor, Tensor]]
    read: Callable[..., Tensor]


for _name in Functions._fields:
    declare(
        f"memory_{_name}",
        {of.__name__.rpartition(".")[2]: getattr(of, _name) for of in (naive, batched)},
        default="batched",
        transformed="batched",
    )


def functions(like: Tensor, implementation: str = AUTO) -> Functions:
    """The operators without checks, for a loop that calls them once a step: there the checks would take a tenth of the
    time. Tensors are to be float32 or float64 already and to fit, and autocast to be disabled. ``like`` has their
    device and dtype.

    Raises ValueError for an unknown implementation.
    """
    return Functions(*(choose(f"memory_{name}", implementation, like) for name in Functions._fields))


def content_weights(
    memory: Tensor,
    keys: Tensor,
    strengths: Tensor,
    masks: Tensor | None = None,
    *,
    implementation: str = AUTO,
) -> Tensor:
    """softmax over cells i of β D(k ∘ m, M_i ∘ m), with D(a, b) = a·b / (|a||b| + ε) (equations A.3 and A.4).

    Args:
        memory: M (B, N, W).
        keys: k (B, K, W). strengths: β (B, K).
        masks: m (B, K, W); None for no mask, m = 1.

    Returns:
        (B, K, N).
    """
    given = {"memory": memory, "keys": keys, "strengths": strengths} | ({} if masks is None else {"masks": masks})
    (b, _, w), (_, k, _) = _sizes(memory, 3), _sizes(keys, 3)
    expected = {"keys": (b, k, w), "strengths": (b, k), "masks": (b, k, w)}
    return _run("content_weights", implementation, given, expected)


def retention(read_weights: Tensor, free: Tensor, *, implementation: str = AUTO) -> Tensor:
    """ψ = Π_i (1 − f_i r_i), how much of every cell is kept (equation A.5).

    Args:
        read_weights: r (B, R, N), of the step before.
        free: f (B, R), the free gates.

    Returns:
        (B, N).
    """
    b, r, _ = _sizes(read_weights, 3)
    return _run("retention", implementation, {"read_weights": read_weights, "free": free}, {"free": (b, r)})


def usage(usage: Tensor, write_weights: Tensor, retention: Tensor, *, implementation: str = AUTO) -> Tensor:
    """(u + w − u ∘ w) ∘ ψ (equation A.6), all of them (B, N); w is that of the step before."""
    given = {"usage": usage, "write_weights": write_weights, "retention": retention}
    shape = _sizes(usage, 2)
    return _run("usage", implementation, given, dict.fromkeys(("write_weights", "retention"), shape))


def allocation(usage: Tensor, *, implementation: str = AUTO) -> Tensor:
    """a[φ_j] = (1 − u[φ_j]) Π_{i<j} u[φ_i], where φ sorts the cells by their usage (appendix A.1).

    The usage that is sorted is u (1 − ε) + ε: the derivative of a product with a factor 0 would be 0 · ∞. Of equal
    usages the lowest cell comes first. The order itself has no derivative.

    Args:
        usage: u (B, N).

    Returns:
        (B, N), which sums up to 1 − Π_i u_i.
    """
    return _run("allocation", implementation, {"usage": usage}, {"usage": _sizes(usage, 2)})


def write(
    memory: Tensor,
    write_weights: Tensor,
    erase: Tensor,
    vector: Tensor,
    retention: Tensor | None = None,
    *,
    implementation: str = AUTO,
) -> Tensor:
    """M ∘ ψ 1ᵀ ∘ (E − w eᵀ) + w vᵀ (equation A.8); without ψ that of Graves et al.

    Args:
        memory: M (B, N, W).
        write_weights: w (B, N).
        erase: e (B, W). vector: v (B, W).
        retention: ψ (B, N), or None for a memory that keeps what is de-allocated.

    Returns:
        (B, N, W).
    """
    given = {"memory": memory, "write_weights": write_weights, "erase": erase, "vector": vector}
    given |= {} if retention is None else {"retention": retention}
    b, n, w = _sizes(memory, 3)
    expected = {"write_weights": (b, n), "erase": (b, w), "vector": (b, w), "retention": (b, n)}
    return _run("write", implementation, given, expected)


def links(
    links: Tensor, precedence: Tensor, write_weights: Tensor, *, implementation: str = AUTO
) -> tuple[Tensor, Tensor]:
    """The links and the precedence after a write (equation A.9).

        L_ij ← (1 − w_i − w_j) L_ij + w_i p_j   for i ≠ j,   L_ii = 0
        p    ← (1 − Σ_i w_i) p + w

    L_ij says how far cell i was written right after cell j.

    Args:
        links: L (B, N, N).
        precedence: p (B, N). write_weights: w (B, N).

    Returns:
        L (B, N, N) and p (B, N).
    """
    b, n, _ = _sizes(links, 3)
    given = {"links": links, "precedence": precedence, "write_weights": write_weights}
    expected = {"links": (b, n, n), "precedence": (b, n), "write_weights": (b, n)}
    return _run("links", implementation, given, expected)


def follow(
    links: Tensor,
    read_weights: Tensor,
    forward_sharpness: Tensor | None = None,
    backward_sharpness: Tensor | None = None,
    *,
    implementation: str = AUTO,
) -> tuple[Tensor, Tensor]:
    """The cells after and before those of the last reads: f_i = S(L r_i, s^f_i) and b_i = S(Lᵀ r_i, s^b_i) (A.10).

        S(d, s)_i = (d_i + ε)^s / Σ_j (d_j + ε)^s

    The paper divides by max(d + ε) first, which changes neither the value nor the gradient. Without sharpness S is the
    identity, and the weights sum up to at most 1; with it they always sum up to 1.

    Args:
        links: L (B, N, N).
        read_weights: r (B, R, N), of the step before.
        forward_sharpness, backward_sharpness: s^f and s^b, both (B, R), or both None.

    Returns:
        f and b, both (B, R, N).
    """
    given = {"links": links, "read_weights": read_weights}
    if (forward_sharpness is None) != (backward_sharpness is None):
        raise ValueError("follow takes the sharpness of both directions, or of none")
    if forward_sharpness is not None:
        given |= {"forward_sharpness": forward_sharpness, "backward_sharpness": backward_sharpness}
    (b, n, _), (_, r, _) = _sizes(links, 3), _sizes(read_weights, 3)
    expected = {"links": (b, n, n), "read_weights": (b, r, n)}
    expected |= dict.fromkeys(("forward_sharpness", "backward_sharpness"), (b, r))
    return _run("follow", implementation, given, expected)


def read(memory: Tensor, read_weights: Tensor, *, implementation: str = AUTO) -> Tensor:
    """Mᵀ r_i (appendix A.1).

    Args:
        memory: M (B, N, W).
        read_weights: r (B, R, N).

    Returns:
        (B, R, W).
    """
    (b, n, _), (_, r, _) = _sizes(memory, 3), _sizes(read_weights, 3)
    given = {"memory": memory, "read_weights": read_weights}
    return _run("read", implementation, given, {"read_weights": (b, r, n)})


def _sizes(tensor: Tensor, dims: int) -> tuple[int, ...]:
    """The sizes of an argument; −1 for each of ``dims`` where it has another number, which ``_run`` refuses."""
    return tuple(tensor.shape) if tensor.dim() == dims else (-1,) * dims


def _run(name: str, implementation: str, given: dict[str, Tensor], expected: dict[str, tuple[int, ...]]):
    check_floating(**given)
    first = next(iter(given.values()))
    if any(tensor.shape != expected.get(argument, tensor.shape) for argument, tensor in given.items()):
        raise ValueError(f"{name}: shapes do not fit: {describe(**given)}")
    function = choose(f"memory_{name}", implementation, first)
    dtype = accumulation_dtype(*given.values())
    with autocast_disabled(first.device):
        return function(*(tensor.to(dtype) for tensor in given.values()))
