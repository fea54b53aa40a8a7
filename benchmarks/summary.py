"""What a user wants to know first, computed from the sections of the page: ten answers, and what was promised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.peers import PEERS

SOFTMAX = "softmax: torch SDPA"
SAME_FLOPS, SAME_SIZE = "dense, same FLOPs", "dense, same parameters"
DEVICES = {"cpu": "CPU", "cuda": "GPU"}
#: What a mixture may cost, as a multiple of a dense layer of equal FLOPs.
MIXTURE_BOUND = 1.25
MARKS = {True: "met", False: "**not met**", None: "not measured"}


class Found:
    """The measurements of one device. A number that was not measured is None."""

    def __init__(self, sections: Sequence[Any], device: str) -> None:
        self.device = device
        self.sections = [section for section in sections if section.device == device]
        self.rows = [row for section in self.sections if section.kind == "operator" for row in section.measured()]

    def of(self, operator: str, size: int, contender: str, what: str = "median") -> float | None:
        """Milliseconds (or another number of a row) of an operator; the first if there are several settings."""
        key = (operator, size, contender)
        return next((getattr(r, what) for r in self.rows if (r.operator, r.size, r.contender) == key), None)

    def ratio(self, operator: str, size: int, one: str, other: str, what: str = "median") -> float | None:
        return over(self.of(operator, size, one, what), self.of(operator, size, other, what))

    def cell(self, kind: str, row: str, column: str, title: str = "") -> Any:
        """A cell of the first section of a kind whose title begins with `title`."""
        of = [section for section in self.sections if section.kind == kind and section.title.startswith(title)]
        return of[0].cell(row, column) if of else None


def over(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one / other


def said(text: str, *values: Any) -> str | None:
    """The text with the values in it; None if one of them is."""
    return None if any(value is None for value in values) else text.format(*values)


# Answers. None if something in an answer was not measured on the device.


def step(found: Found, model: str) -> str | None:
    cells = (found.cell("step", f"ours, {batches}", "× reference, random", model) for batches in ("random", "bucketed"))
    return said("**{:.2f} ×** on random batches, {:.2f} × on bucketed ones", *cells)


def linear_attention(found: Found, operator: str) -> str | None:
    """The shortest measured length from which on it beats softmax attention, and how many times at each length."""
    sizes = sorted({row.size for row in found.rows if row.operator == operator})
    ratios = {size: found.ratio(operator, size, SOFTMAX, "auto") for size in sizes}
    ratios = {size: ratio for size, ratio in ratios.items() if ratio is not None}
    if not ratios:
        return None
    since = [size for size in ratios if all(ratio > 1 for later, ratio in ratios.items() if later >= size)]
    # With two digits, as a decimal number.
    shown = ", ".join(f"{float(f'{ratio:.2g}'):g} × at {size:,}" for size, ratio in ratios.items())
    return f"from **{since[0]:,}** on: {shown}" if since else f"at no length: {shown}"


def linear_in_a_step(found: Found) -> str | None:
    time = found.cell("attentions", "linear elu", "times softmax")
    kept = over(*(found.cell("attentions", name, "MB kept") for name in ("linear elu", "softmax")))
    return said("{:.2f} × the time, {:.2f} × the memory", time, kept)


def decoding(found: Found, position: str) -> str | None:
    numbers = [
        found.cell("decoding", name, f"{unit} at {position}")
        for name in ("linear elu", "softmax")
        for unit in ("ms", "kB")
    ]
    return said("{:.2f} ms and {:,.0f} kB; softmax {:.2f} ms and {:,.0f} kB", *numbers)


def experts_time(found: Found) -> str | None:
    ratios = [found.ratio("sigma_moe", experts, "sigma_moe", SAME_FLOPS) for experts in (16, 64)]
    if None in ratios:
        return None
    verdict = MARKS[max(ratios) <= MIXTURE_BOUND]
    return said("**{:.2f} ×** with 16 experts, {:.2f} × with 64; promised ≤ {}: {}", *ratios, MIXTURE_BOUND, verdict)


def experts_gain(found: Found) -> str | None:
    ratios = (found.ratio("sigma_moe", experts, SAME_SIZE, "sigma_moe") for experts in (16, 64))
    return said("{:.1f} × with 16 experts, {:.1f} × with 64", *ratios)


def peak_memory(found: Found) -> str | None:
    linear = found.ratio("causal_linear_attention", 4096, "auto", SOFTMAX, "peak")
    mixture = found.ratio("sigma_moe", 64, "sigma_moe", SAME_SIZE, "peak")
    text = "causal linear attention {:.1f} × softmax at 4,096; σ-MoE with 64 experts {:.2f} × dense of equal size"
    return said(text, linear, mixture)


def orthogonality(found: Found) -> str | None:
    shares = (found.cell("orthogonality", "10", column) for column in ("encoder alone", "share"))
    return said("{:.1f} %; {:.1f} % on all nine attentions", *shares)


#: Question, answer on a device, kind of section that has its numbers.
ANSWERS: list[tuple[str, Callable[[Found], str | None], str]] = [
    ("SCAN training step: steps per second, as a multiple of the reference's", partial(step, model="SCAN"), "step"),
    ("PCFG training step, the same", partial(step, model="PCFG"), "step"),
    (
        "Causal linear attention is faster than softmax attention (torch's `scaled_dot_product_attention`)",
        partial(linear_attention, operator="causal_linear_attention"),
        "operator",
    ),
    ("Linear attention without a mask, the same", partial(linear_attention, operator="linear_attention"), "operator"),
    ("SCAN step (9 and 26 words): linear instead of softmax attention", linear_in_a_step, "attentions"),
    ("Decoding one token after 4,096 others: linear attention", partial(decoding, position="4,096"), "decoding"),
    ("σ-MoE: time, as a multiple of a dense layer of equal FLOPs", experts_time, "operator"),
    ("σ-MoE: times faster than a dense layer of equal size", experts_gain, "operator"),
    ("Peak memory of forward and backward", peak_memory, "operator"),
    ("Orthogonality loss in the encoder: share of a SCAN step at length 10", orthogonality, "orthogonality"),
]


@dataclass(frozen=True)
class Promise:
    """A bound for a ratio of times or rates.

    Attributes:
        text: what the ratio is of.
        bound: of the ratio.
        least: whether the bound is a minimum, else a maximum.
        ratio: as measured; None if it was not.
    """

    text: str
    bound: float
    least: bool
    ratio: float | None

    @property
    def met(self) -> bool | None:
        if self.ratio is None:
            return None
        return self.ratio >= self.bound if self.least else self.ratio <= self.bound

    def row(self, device: str) -> tuple[str, ...]:
        measured = "–" if self.ratio is None else f"{self.ratio:.3g}"
        return self.text, device, f"{'≥' if self.least else '≤'} {self.bound:g}", measured, MARKS[self.met]


def promises(found: Found) -> list[Promise]:
    """What is promised on a device."""
    return [*promised_steps(found), *promised_operators(found), *promised_losses(found)]


def promised_steps(found: Found) -> list[Promise]:
    def of(batches: str) -> float | None:
        return found.cell("step", f"ours, {batches}", "× reference, random", "SCAN")

    what = "SCAN step, {}: steps per second, × reference on random batches"
    if found.device == "cuda":
        return [Promise(what.format("random batches"), 3.0, True, of("random"))]
    return [
        Promise(what.format("random batches"), 1.5, True, of("random")),
        Promise(what.format("bucketed batches"), 2.5, True, of("bucketed")),
    ]


def promised_operators(found: Found) -> list[Promise]:
    def faster(what: str, operator: str, size: int, than: str, bound: float, ours: str = "auto") -> Promise:
        return Promise(f"{what}: times faster than {than}", bound, True, found.ratio(operator, size, than, ours))

    all_of_them = []
    if found.device == "cpu":
        for operator, name in (("causal_linear_attention", "causal linear"), ("linear_attention", "linear")):
            ratio = found.ratio(operator, 64, "auto", SOFTMAX)
            all_of_them.append(Promise(f"{name} attention, N = 64: time, × {SOFTMAX}", 1.1, False, ratio))
            for size, bound in ((256, 2.0), (4096, 10.0)):
                all_of_them.append(faster(f"{name} attention, N = {size:,}", operator, size, SOFTMAX, bound))
    else:
        for size in (256, 4096):
            what = f"causal linear attention, N = {size:,}"
            all_of_them.append(faster(what, "causal_linear_attention", size, "flash-linear-attention", 1.0))
        for than in ("scattermoe", "torch grouped_mm"):
            all_of_them += [faster(f"cvmm, {size} experts", "cvmm", size, than, 1.0) for size in (16, 64)]
    all_of_them.append(faster("geometric attention, N = 50", "geometric_attention", 50, "sums of logarithms", 2.0))
    for size, bound in ((16, 3.0), (64, 12.0)):
        all_of_them.append(faster(f"σ-MoE, {size} experts", "sigma_moe", size, SAME_SIZE, bound, "sigma_moe"))
        ratio = found.ratio("sigma_moe", size, "sigma_moe", SAME_FLOPS)
        all_of_them.append(Promise(f"σ-MoE, {size} experts: time, × {SAME_FLOPS}", MIXTURE_BOUND, False, ratio))
    return all_of_them


def promised_losses(found: Found) -> list[Promise]:
    """At every length that was measured."""
    what = "orthogonality loss on all attentions, N = {}: % of a step"
    lengths = [row[0] for section in found.sections if section.kind == "orthogonality" for row in section.rows]
    return [Promise(what.format(n), 3.0, False, found.cell("orthogonality", n, "share")) for n in lengths]


# For the page.


def answers(sections: Sequence[Any]) -> list[tuple[str, str, str, str]]:
    """Question, kind of section, and the answers on a CPU and on a GPU."""
    on = [Found(sections, device) for device in DEVICES]
    return [(question, kind, *(answer(found) or "not measured" for found in on)) for question, answer, kind in ANSWERS]


def all_promises(sections: Sequence[Any]) -> list[tuple[str, Promise]]:
    """The promises with their devices, CPU first."""
    return [(DEVICES[device], promise) for device in DEVICES for promise in promises(Found(sections, device))]


def unmeasured(sections: Sequence[Any]) -> list[str]:
    """What no section has: a device, half precision, peers."""
    found = []
    if all(section.device != "cuda" or section.kind == "recorded" for section in sections):
        found.append(
            "any number on a GPU other than recorded steps and those of [gpu](gpu/README.md) and "
            "[speed.md](../docs/speed.md#on-a-gpu)"
        )
    contenders = {row.contender for device in DEVICES for row in Found(sections, device).rows}
    peers = [peer.name for peer in PEERS if peer.name not in contenders]
    return found + ([f"the peers {', '.join(peers)}"] if peers else [])
