"""Calls of every operator: those that are verified, with the shapes that bite, and those that are timed.

Shapes that bite are lengths of 1, around tiles (32 and 64) and of several tiles, widths that are no powers of two, and
padding on the left, on the right and of whole rows. What stands at padding is large, so that a read of it is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fairseq_sg.ops import (
    cvmm,
    cvmm_sorted,
    geometric_attention,
    linear_attention,
    linear_attention_state,
    memory,
    orthogonality_loss,
    relative_attention,
    relative_logits,
    sort_selection,
    spectral_multiply,
)
from fairseq_sg.ops.spectral import most_modes

#: Stands at padding. Its products with queries are within float16.
GARBAGE = 100.0
PADDING = ("none", "left", "right", "row")
Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A call of an operator.

    Attributes:
        name: of the case, in reports.
        inputs: by name, in float64.
        function: of the inputs by name and an implementation; returns outputs by name.
        float32: inputs that stay float32 in half precision.
    """

    name: str
    inputs: Mapping[str, Tensor]
    function: Callable[..., Outputs]
    float32: tuple[str, ...] = ()

    def inputs_in(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return {name: x.to(torch.float32 if name in self.float32 else dtype) for name, x in self.inputs.items()}


class Make:
    """Random tensors on a device, the same ones in every process."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.random = {"generator": torch.Generator(device).manual_seed(0), "device": device}

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, **self.random)

    def positive(self, *shape: int) -> Tensor:
        """As feature maps give them."""
        return torch.rand(shape, dtype=torch.float64, **self.random).add(0.05)

    def integers(self, most: int, *shape: int) -> Tensor:
        return torch.randint(most, shape, **self.random)

    def mask(self, padding: str, batch: int, length: int) -> Tensor | None:
        """Row b has b + 1 positions of padding; with ``row``, the first has nothing else and the others none."""
        if padding == "none":
            return None
        at = torch.arange(length)
        if padding == "row":
            return (torch.arange(batch)[:, None] == 0).expand(batch, length).contiguous().to(self.device)
        count = torch.arange(1, batch + 1).clamp(max=length - 1)[:, None]
        return (at < count if padding == "left" else at >= length - count).to(self.device)


def spoiled(x: Tensor, mask: Tensor | None) -> Tensor:
    """x (B, H, N, D) with garbage at padding."""
    return x if mask is None else x.masked_fill(mask[:, None, :, None], GARBAGE)


def linear_attention_cases(make: Make, tiny: bool) -> Iterator[Case]:
    def case(
        batch, length, features, width, padding="none", state=False, keys=None, causal=True, normalize=True, float32=()
    ) -> Case:
        heads, keys = 2, keys or length
        mask = make.mask(padding, batch, keys)
        inputs = {
            "q": make.positive(batch, heads, length, features),
            "k": spoiled(make.positive(batch, heads, keys, features), mask),
            "v": spoiled(make.normal(batch, heads, keys, width), mask),
        }
        if state:
            before = make.positive(batch, heads, 3, features), make.normal(batch, heads, 3, width)
            inputs["S"], inputs["z"] = linear_attention_state(*before)

        def function(implementation, q, k, v, S=None, z=None) -> Outputs:  # noqa: N803
            options = {"causal": causal, "key_padding_mask": mask, "implementation": implementation}
            options["normalize"] = normalize
            if S is None:
                return {"out": linear_attention(q, k, v, **options)}
            out, (s, z) = linear_attention(q, k, v, state=(S, z), return_state=True, **options)
            return {"out": out, "final S": s, "final z": z}

        form = "causal" if causal else "all keys"
        name = f"{form}, {length} of {keys} positions, widths {features} and {width}, padding {padding}"
        name += ", a state" * state + ", no denominator" * (not normalize) + ", q and k in float32" * bool(float32)
        return Case(name, inputs, function, ("S", "z", *float32))

    yield case(1, 1, 1, 1)
    yield case(1, 33, 16, 16, "left")
    yield case(2, 7, 16, 16, "row", state=True)
    if tiny:
        return
    for length in (2, 31, 32, 63, 64, 65, 129, 300):
        yield case(2, length, 16, 16)
    for padding in PADDING[1:]:
        yield case(3, 70, 16, 16, padding)
        yield case(3, 70, 16, 16, padding, state=True)
    for widths in ((24, 40), (80, 64), (256, 8)):
        yield case(1, 40, *widths, "right")
    yield case(2, 9, 16, 16, "left", keys=40)
    yield case(2, 40, 16, 1, "left")  # the denominators of rotary positions
    yield case(3, 70, 16, 16, "left", state=True, normalize=False)
    yield case(3, 70, 16, 16, "left", float32=("q", "k"))  # features, of which most maps make float32
    for padding in PADDING:
        yield case(3, 33, 16, 16, padding, keys=20, causal=False)


def geometric_attention_cases(make: Make, tiny: bool) -> Iterator[Case]:
    def case(batch, queries, keys, offset=0, padding="none", causal=False, heads=2) -> Case:
        mask = make.mask(padding, batch, keys)
        logits = 2 * make.normal(batch, heads, queries, keys)
        logits = logits if mask is None else logits.masked_fill(mask[:, None, None, :], GARBAGE)

        def function(implementation, logits) -> Outputs:
            options = {"causal": causal, "offset": offset, "key_padding_mask": mask}
            return {"weights": geometric_attention(logits, implementation=implementation, **options)}

        name = f"{queries} queries, {keys} keys, the first at {offset}, padding {padding}" + ", causal" * causal
        return Case(name, {"logits": logits}, function)

    yield case(1, 1, 1)
    yield case(2, 5, 5, padding="left", causal=True)
    yield case(2, 3, 40, 20, "row")
    if tiny:
        return
    for causal in (False, True):
        for length in (2, 31, 32, 33, 65):
            yield case(2, length, length, causal=causal)
        for padding in PADDING[1:]:
            yield case(3, 37, 37, padding=padding, causal=causal)
        yield case(2, 1, 9, 8, "right", causal)
        yield case(1, 2, 1100, 700, causal=causal)
    for keys in (200, 2100, 4100):  # blocks are powers of two, of up to 16 warps
        yield case(1, 1, keys, keys // 2, heads=1)


def relative_logits_cases(make: Make, tiny: bool) -> Iterator[Case]:
    shapes = [(1, 1, 1, 1), (3, 1, 9, 8), (2, 5, 7, 3)]
    if not tiny:
        shapes += [(2, 32, 32, 16), (9, 33, 65, 2), (1, 300, 300, 16), (32, 5, 7, 3)]
    for batch, queries, keys, dim in shapes:
        inputs = {"q": make.normal(batch, 2, queries, dim), "p": make.normal(2, queries + keys - 1, dim)}
        name = f"{batch} sequences, {queries} queries, {keys} keys, width {dim}"
        yield Case(
            name, inputs, lambda implementation, q, p: {"R": relative_logits(q, p, implementation=implementation)}
        )


def relative_attention_cases(make: Make, tiny: bool) -> Iterator[Case]:
    def case(batch, queries, keys, dim, width, positional, padding="none", causal=False, dropout_p=0.0) -> Case:
        heads, mask = 2, make.mask(padding, batch, keys)
        inputs = {
            "q_content": make.normal(batch, heads, queries, dim),
            "q_position": make.normal(batch, heads, queries, positional),
            "k": spoiled(make.normal(batch, heads, keys, dim), mask),
            "v": spoiled(make.normal(batch, heads, keys, width), mask),
            "p": make.normal(heads, queries + keys - 1, positional),
        }

        def function(implementation, **inputs) -> Outputs:
            options = {"causal": causal, "key_padding_mask": mask, "dropout_p": dropout_p}
            return {"out": relative_attention(**inputs, implementation=implementation, **options)}

        widths = f"widths {dim}, {width} and {positional}"
        name = f"{queries} queries, {keys} keys, {widths}, padding {padding}" + ", causal" * causal
        return Case(name + ", with dropout" * (dropout_p > 0), inputs, function)

    yield case(1, 1, 1, 16, 16, 16)
    yield case(2, 5, 5, 4, 6, 4, "row")
    yield case(2, 7, 40, 16, 16, 16, "left", causal=True)
    if tiny:
        return
    for causal in (False, True):
        for length in (2, 16, 31, 32, 33, 65, 300):
            yield case(1, length, length, 16, 16, 16, causal=causal)
        for padding in PADDING[1:]:
            yield case(3, 40, 40, 16, 16, 16, padding, causal)
        yield case(2, 1, 9, 16, 16, 16, causal=causal)
        yield case(2, 33, 70, 24, 40, 16, "right", causal)
        # The kernels with dropout, with so small a p that nothing is dropped.
        yield case(2, 33, 70, 24, 40, 16, "right", causal, dropout_p=1e-9)
        yield case(32, 5, 5, 4, 6, 4, "right", causal)
        yield case(1, 20, 20, 256, 80, 8, causal=causal)
        for width in (64, 128):
            yield case(1, 70, 70, width, width, width, causal=causal)


def cvmm_cases(make: Make, tiny: bool) -> Iterator[Case]:
    def single(rows, count, into, out, kind="random") -> Case:
        selection = make.integers(count, rows)
        if kind == "last":
            selection.fill_(count - 1)
        if kind == "missing":
            selection[::3] = -1
        if kind == "nothing":
            selection.fill_(-1)
        inputs = {"x": make.normal(rows, into), "matrices": make.normal(count, into, out)}
        name = f"{rows} rows, {count} matrices {into} x {out}, selection {kind}"
        return Case(
            name,
            inputs,
            lambda implementation, x, matrices: {"y": cvmm(x, selection, matrices, implementation=implementation)},
        )

    def mixture(tokens, chosen, count, into, out, missing, second) -> Case:
        """The first product of a mixture; or the second, with ReLU and weights."""
        experts = make.integers(count, tokens, chosen)
        if missing:
            experts[::3] = -1
        routing = sort_selection(experts, count, complete=not missing)
        rows = tokens * chosen if second else tokens
        inputs = {"x": make.normal(rows, into), "matrices": make.normal(count, into, out)}
        if second:
            inputs["weights"] = make.positive(tokens, chosen)

        def function(implementation, x, matrices, weights=None) -> Outputs:
            options = {"to_tokens": True, "relu": True, "weights": weights} if second else {"from_tokens": True}
            return {"y": cvmm_sorted(x, routing, matrices, implementation=implementation, **options)}

        form = "second" if second else "first"
        name = f"{form} product of a mixture, {tokens} tokens, {chosen} of {count} experts {into} x {out}"
        return Case(name + ", some padding" * missing, inputs, function, ("weights",))

    yield single(1, 1, 1, 1)
    yield single(33, 3, 7, 5, "missing")
    yield mixture(11, 2, 3, 9, 6, True, True)
    if tiny:
        return
    for kind in ("random", "last", "missing", "nothing"):
        yield single(70, 4, 40, 70, kind)
    for shape in ((1, 5, 3, 2), (31, 1, 16, 16), (64, 2, 16, 16), (8, 1, 140, 130), (420, 2, 32, 144)):
        yield single(*shape)
    yield single(6, 300, 3, 2)
    yield single(2500, 2, 16, 16, "last")  # in parts
    for second in (False, True):
        yield mixture(17, 3, 4, 24, 20, True, second)
        for tokens in (40, 700):  # small blocks of rows, and the largest ones
            yield mixture(tokens, 2, 4, 48, 144, False, second)


def orthogonality_loss_cases(make: Make, tiny: bool) -> Iterator[Case]:
    for batch, length, width in [(1, 1, 1), (2, 5, 16), (2, 33, 8)] + [(1, 16, 16), (1, 300, 16)] * (not tiny):
        for padding in PADDING:
            mask = make.mask(padding, batch, length)
            inputs = {"values": spoiled(make.normal(batch, 2, length, width), mask)}

            def function(implementation, values, mask=mask) -> Outputs:
                options = {"padding_mask": mask, "reduction": "none"}
                return {"loss": orthogonality_loss(values, implementation=implementation, **options)}

            yield Case(f"{length} positions, width {width}, padding {padding}", inputs, function)


def spectral_multiply_cases(make: Make, tiny: bool) -> Iterator[Case]:
    for points in [(2,), (9,), (4, 6)] + [(64,), (65,), (9, 16), (64, 64), (8192,)] * (not tiny):
        modes = min(most_modes(points), 33)
        weight = (3, 2, modes, 2) if len(points) == 1 else (2, 3, 2, modes, modes, 2)
        inputs = {"x": make.normal(2, 3, *points), "weight": make.normal(*weight)}

        def function(implementation, x, weight) -> Outputs:
            return {"y": spectral_multiply(x, weight, implementation=implementation)}

        yield Case(f"{' x '.join(map(str, points))} points, {modes} frequencies", inputs, function)


def memory_cases(name: str, make: Make, tiny: bool) -> Iterator[Case]:
    """An operator on a memory of ``cells``; weights over the cells sum up to less than 1."""

    def function(implementation, **inputs) -> Outputs:
        out = getattr(memory, name)(**inputs, implementation=implementation)
        return {"out": out} if isinstance(out, Tensor) else {"first": out[0], "second": out[1]}

    for batch, cells, width, heads in [(1, 1 + (name == "links"), 1, 1), (2, 5, 3, 2)] + [(3, 33, 20, 4)] * (not tiny):
        weights, gates = partial(_weights, make, cells), partial(_gates, make)
        of_look_up = {"keys": make.normal(batch, heads, width), "strengths": 1 + make.positive(batch, heads)}
        of_write = {"erase": gates(batch, width), "vector": make.normal(batch, width)}
        of_links = {"links": weights(batch, cells), "read_weights": weights(batch, heads)}
        calls: dict[str, list[dict[str, Tensor]]] = {
            "content_weights": [of_look_up, of_look_up | {"masks": gates(batch, heads, width)}],
            "retention": [{"read_weights": weights(batch, heads), "free": gates(batch, heads)}],
            "usage": [{name: gates(batch, cells) for name in ("usage", "write_weights", "retention")}],
            "allocation": [{"usage": gates(batch, cells)}],
            "write": [of_write, of_write | {"retention": gates(batch, cells)}],
            "links": [{"links": weights(batch, cells), "precedence": weights(batch), "write_weights": weights(batch)}],
            "follow": [
                of_links,
                of_links | {f"{way}_sharpness": 1 + make.positive(batch, heads) for way in ("forward", "backward")},
            ],
            "read": [{"read_weights": weights(batch, heads)}],
        }
        for inputs in calls[name]:
            if name in ("content_weights", "write", "read"):
                inputs = {"memory": make.normal(batch, cells, width), **inputs}
            if name == "write":
                inputs["write_weights"] = weights(batch)
            yield Case(f"{batch} memories, {cells} cells of {width}, {', '.join(inputs)}", inputs, function)


def _weights(make: Make, cells: int, *shape: int) -> Tensor:
    return make.positive(*shape, cells) / (1.05 * cells)


def _gates(make: Make, *shape: int) -> Tensor:
    """Numbers in (0, 1)."""
    return make.positive(*shape) / 1.1


#: operator -> its cases to verify, on a device; few of them and small ones if ``tiny``.
CASES: dict[str, Callable[[Make, bool], Iterator[Case]]] = {
    "cvmm": cvmm_cases,
    "geometric_attention": geometric_attention_cases,
    "linear_attention": linear_attention_cases,
    **{f"memory_{name}": partial(memory_cases, name) for name in memory.Functions._fields},
    "orthogonality_loss": orthogonality_loss_cases,
    "relative_attention": relative_attention_cases,
    "relative_logits": relative_logits_cases,
    "spectral_multiply": spectral_multiply_cases,
}


# What is timed: the sizes are those that the operator chooses by.


def timed_linear_attention(make: Make, heads: int, length: int, width: int) -> Case:
    q, k = (make.positive(1, heads, length, width) for _ in range(2))
    inputs = {"q": q, "k": k, "v": make.normal(1, heads, length, width)}
    return Case("", inputs, partial(_out, partial(linear_attention, causal=True)))


def timed_geometric_attention(make: Make, rows: int, keys: int) -> Case:
    logits = make.normal(1, max(1, rows // keys), min(rows, keys), keys)
    return Case("", {"logits": logits}, partial(_out, geometric_attention))


def _relative_shape(sequences_per_width: int, heads: int, width: int) -> tuple[int, int]:
    """Sequences, and the heads of one."""
    batch = sequences_per_width * width or max(1, min(heads // 8, width - 1))
    return batch, heads // batch


def timed_relative_logits(make: Make, sequences_per_width: int, heads: int, length: int, width: int) -> Case:
    batch, of_one = _relative_shape(sequences_per_width, heads, width)
    inputs = {"q": make.normal(batch, of_one, length, width), "p": make.normal(of_one, 2 * length - 1, width)}
    return Case("", inputs, partial(_out, relative_logits))


def timed_relative_attention(make: Make, sequences_per_width: int, heads: int, length: int, width: int) -> Case:
    batch, of_one = _relative_shape(sequences_per_width, heads, width)
    names = ("q_content", "q_position", "k", "v")
    inputs = {name: make.normal(batch, of_one, length, width) for name in names}
    inputs["p"] = make.normal(of_one, 2 * length - 1, width)
    return Case("", inputs, partial(_out, relative_attention))


def timed_cvmm(make: Make, rows_per_matrix: int, rows: int, width: int) -> Case:
    count = rows // rows_per_matrix
    inputs = {"x": make.normal(rows, width), "matrices": make.normal(count, width, width)}
    selection = make.integers(count, rows)
    return Case("", inputs, partial(_out, lambda x, matrices, **how: cvmm(x, selection, matrices, **how)))


def _out(operator: Callable[..., Tensor], implementation: str, **inputs: Tensor) -> Outputs:
    return {"out": operator(**inputs, implementation=implementation)}


@dataclass(frozen=True)
class Timed:
    """The calls of an operator that are timed: a function of its sizes, and the sizes on a CPU and on a GPU."""

    case: Callable[..., Case]
    cpu: tuple[tuple[int, ...], ...] = ()
    cuda: tuple[tuple[int, ...], ...] = ()


def grid(*axes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(point.tolist()) for point in torch.cartesian_prod(*map(torch.tensor, axes)))


HEADS, WIDTHS = (16, 128, 1024), (16, 64)
RELATIVE_CUDA = grid(HEADS, (16, 64, 256), WIDTHS)  # eight heads
RELATIVE = (1, 256, 16, 16), (4, 512, 16, 16), (16, 2048, 16, 16), (1, 128, 64, 16), (4, 512, 64, 16), (4, 512, 16, 64)
#: operator -> what is timed. An operator that has no choice on a device is not timed there.
TIMED = {
    "cvmm": Timed(
        timed_cvmm,
        cpu=grid((16, 64, 256, 1024), (4096,), (64, 256)),
        cuda=grid((64, 512), (4096, 16384), (128, 512)),
    ),
    "geometric_attention": Timed(timed_geometric_attention, cuda=grid((4096, 65536), (16, 64, 256))),
    "linear_attention": Timed(timed_linear_attention, cuda=grid(HEADS, (16, 64, 256, 1024), WIDTHS)),
    "relative_attention": Timed(
        timed_relative_attention,
        cpu=RELATIVE,
        cuda=tuple((heads // 8 // width, heads, length, width) for heads, length, width in RELATIVE_CUDA),
    ),
    "relative_logits": Timed(timed_relative_logits, cpu=RELATIVE),
}
