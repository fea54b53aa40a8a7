"""Time and memory of every operator by length or number of experts: its implementations, and peers beside them.

    python -m benchmarks.operators                                 # all operators; minutes on a CPU
    python -m benchmarks.operators cvmm sigma_moe --peers          # some, and installed peers
    python -m benchmarks.operators --quick                         # in seconds; the numbers mean nothing
    python -m benchmarks.operators relative_attention causal_relative_attention --implementation triton shift \\
        --device cuda --dtype bfloat16 --dim 64 --positions 8192 --sizes 32 64 256 1024 2048
    python -m benchmarks.operators sigma_moe --sizes 16 32 64 --model-dim 1024 --expert-dim 256 --tokens 4096

Value and gradients of an implementation are first compared with the naive form in float64. The command fails if one of
this project is wrong or raises, or if one that ``--implementation`` asks for cannot run.

FLOPs are those of matrix products in forward and backward, the known minimum, for B sequences and H heads, N positions,
F features of queries and keys, E of values, K experts per token:

    linear attention     12 N F E: the state, reading it, and both again in four gradients; or, where that is less,
                         6 (F + E) of every visible pair
    orthogonality        3 m² n of the smaller, m, and the larger, n, of N and E: the Gram matrix is symmetric
    geometric attention  none
    relative logits      6 N M D
    relative attention   6 (3 D) of every visible pair: content, position and values
    cvmm, sigma_moe      12 K d_model G of every token: two products, and two gradients of each
"""

from __future__ import annotations

import copy
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import report
from benchmarks.measure import DTYPES, Case, Contender, Function, Row, as_in_training, measure, measure_machine
from benchmarks.peers import Peer, contenders, find
from fairseq_sg.modules.cpu.softmax import closed_form_softmax
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
from fairseq_sg.ops.dispatch import AUTO, ENVIRONMENT_VARIABLE
from fairseq_sg.ops.operators import OPERATORS as DECLARED
from fairseq_sg.parsers import Command, positive
from fairseq_sg.ranges import flag

CVMM, GEOMETRIC, LINEAR = (
    tuple(DECLARED[name].implementations) for name in ("cvmm", "geometric_attention", "linear_attention")
)
ORTHOGONALITY, RELATIVE, LOGITS = (
    tuple(DECLARED[name].implementations) for name in ("orthogonality_loss", "relative_attention", "relative_logits")
)
#: Without a mask, Triton's is `chunked`.
LINEAR_OF_ALL = tuple(name for name in LINEAR if name != "triton")


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
        implementations: the names of those to measure; empty for all.
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
    implementations: tuple[str, ...] = ()
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
    """The part of (B, H, …) to compute in float64, if one sequence and head takes that many bytes."""
    return partial(corners, most=int(limit // max(sequence_bytes, 1)))


def linear_attention_case(length: int, setting: Setting, causal: bool) -> Case:
    """Queries and keys from elu + 1, no padding."""
    name = "causal_linear_attention" if causal else "linear_attention"
    batch, heads, width = setting.batch(length), setting.heads, setting.dim
    shape = (batch, heads, length, width)
    q, k = (F.elu(setting.normal(*shape).float()).add(1).to(setting.dtype) for _ in range(2))
    operator = partial(linear_attention, causal=causal)
    names = LINEAR if causal else LINEAR_OF_ALL
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
        implementations(operator, names, state, setting.limit) + contenders(name, setting.peers, causal=causal),
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
        implementations(relative_logits, LOGITS, 4 * 3 * heads * length**2 * width, setting.limit),
        6.0 * batch * heads * length**2 * width,
    )


def attend(q: Tensor, k: Tensor, v: Tensor, p: Tensor, causal: bool, implementation: str = AUTO) -> Tensor:
    """Relative attention without biases of content and position."""
    return relative_attention(q, q, k, v, p, causal=causal, implementation=implementation)


def attend_in_closed_form(q: Tensor, k: Tensor, v: Tensor, p: Tensor, causal: bool) -> Tensor:
    """The same without the operator, as models train on a CPU."""
    length, width = q.shape[2:]
    scale = width**-0.5
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1) if causal else None
    return closed_form_softmax(q, k, v, scale * relative_logits(q, p), hidden, 0.0, scale)


def relative_attention_case(length: int, setting: Setting, causal: bool) -> Case:
    """Attention with relative logits."""
    name = "causal_relative_attention" if causal else "relative_attention"
    batch, heads, width = setting.batch(length), setting.heads, setting.dim
    shape = (batch, heads, length, width)
    operator = partial(attend, causal=causal)
    naive_bytes = 4 * 3 * heads * length**2 * width
    found = implementations(operator, RELATIVE, naive_bytes, setting.limit)
    if setting.device == "cpu" and setting.dtype == torch.float32:
        found.append(Contender("closed form, in models", partial(attend_in_closed_form, causal=causal)))
    # The gradient of p sums over the batch, so no part of it can be checked by itself.
    exact = "naive" if 2 * naive_bytes <= setting.limit else "shift"
    pairs = length * (length + 1) // 2 if causal else length**2
    return Case(
        name,
        length,
        (*(setting.normal(*shape) for _ in range(3)), setting.normal(heads, 2 * length - 1, width)),
        shape,
        partial(operator, implementation=exact),
        found + contenders(name, setting.peers, causal=causal),
        6.0 * 3 * batch * heads * pairs * width,
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
        activations={0, 3},
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
    mixture = SigmaMoE(width, experts * hidden, moe_experts=experts, moe_k=chosen, moe_expert_dropout=0.0)
    mixture = mixture.to(setting.device, setting.dtype).train()
    mixture.w1.data = setting.steps(*mixture.w1.shape) / 16
    exact = layer_function(copy.deepcopy(mixture).double(), "naive")
    inputs = (x, *(p.detach() for p in mixture.parameters()))
    found = [
        Contender(sigma_moe_name(name), layer_function(mixture, name), exact=exact, inputs=inputs)
        for name in setting.implementations or (AUTO,)
    ]
    for name, size in (("dense, same parameters", experts * hidden), ("dense, same FLOPs", chosen * hidden)):
        dense = DenseFeedForward(width, size).to(setting.device, setting.dtype).train()
        dense.fc1.weight.data = setting.steps(*dense.fc1.weight.shape) / 16
        dense.fc1.bias.data.zero_()
        its_exact = layer_function(copy.deepcopy(dense).double(), "naive")
        its_inputs = (x, *(p.detach() for p in dense.parameters()))
        found.append(Contender(name, layer_function(dense), ours=False, exact=its_exact, inputs=its_inputs))
    flops = 12.0 * setting.tokens * chosen * width * hidden
    return Case("sigma_moe", experts, inputs, x.shape, exact, found, flops, activations={0})


def sigma_moe_name(implementation: str) -> str:
    return "sigma_moe" if implementation == AUTO else f"sigma_moe, {implementation}"


@dataclass(frozen=True)
class Operator:
    """An operator's cases.

    Attributes:
        name: in tables.
        case: makes the case of a size.
        implementations: their names.
        size_name: the meaning of the size.
        setting: the format of what titles say of a `Setting`.
        cpu, cuda, quick: the sizes on a CPU, on a GPU, and for a quick check.
    """

    name: str
    case: Callable[[int, Setting], Case]
    implementations: Collection[str]
    size_name: str
    setting: str
    cpu: tuple[int, ...]
    cuda: tuple[int, ...]
    quick: tuple[int, ...]

    def title(self, setting: Setting) -> str:
        dtype = str(setting.dtype).removeprefix("torch.")
        return f"{self.name} ({setting.device}, {dtype}, {self.setting.format(**vars(setting))})"

    def sizes(self, device: str, quick: bool) -> tuple[int, ...]:
        return self.quick if quick else self.cuda if device == "cuda" else self.cpu


LENGTHS, SHORT = (16, 64, 256, 1024, 4096), (16, 64, 256, 512)
EXPERTS = (4, 16, 32, 64)
HEADS = "{positions:,} positions, {heads} heads of {dim}"
MIXTURE = "{tokens:,} tokens of width {model_dim}, {chosen} experts of {expert_dim}"
CAUSAL_LINEAR, FULL_LINEAR = (partial(linear_attention_case, causal=causal) for causal in (True, False))
CAUSAL_RELATIVE, FULL_RELATIVE = (partial(relative_attention_case, causal=causal) for causal in (True, False))
LISTED = (
    Operator("causal_linear_attention", CAUSAL_LINEAR, LINEAR, "length", HEADS, LENGTHS, LENGTHS, (5, 33)),
    Operator("linear_attention", FULL_LINEAR, LINEAR_OF_ALL, "length", HEADS, LENGTHS, LENGTHS, (5, 33)),
    Operator("sigma_moe", sigma_moe_case, CVMM, "experts", MIXTURE, EXPERTS, (*EXPERTS, 128), (2, 5)),
    Operator("cvmm", cvmm_case, CVMM, "experts", MIXTURE, EXPERTS, (*EXPERTS, 128), (2, 5)),
    Operator("relative_attention", FULL_RELATIVE, RELATIVE, "length", HEADS, SHORT, SHORT, (5, 17)),
    Operator("causal_relative_attention", CAUSAL_RELATIVE, RELATIVE, "length", HEADS, SHORT, SHORT, (5, 17)),
    Operator("relative_logits", relative_logits_case, LOGITS, "length", HEADS, SHORT, SHORT, (5, 17)),
    Operator(
        "geometric_attention",
        geometric_case,
        GEOMETRIC,
        "length",
        "{maps:,} logits",
        cpu=(16, 50, 100, 200),
        cuda=(16, 50, 200, 1000),
        quick=(5, 17),
    ),
    Operator(
        "orthogonality_loss",
        orthogonality_case,
        ORTHOGONALITY,
        "length",
        HEADS,
        cpu=(10, 32, 128, 512, 2048),
        cuda=LENGTHS,
        quick=(5, 33),
    ),
)
OPERATORS = {operator.name: operator for operator in LISTED}
#: Changes of a `Setting` on a GPU, and in a quick run.
ON_CUDA = {"positions": 65536, "maps": 10_000_000, "tokens": 16384, "limit": 24 << 30}
QUICK = {"heads": 2, "dim": 4, "positions": 64, "maps": 500, "tokens": 24, "model_dim": 8, "expert_dim": 4, "chosen": 2}


def measured(
    operators: Iterable[Operator], setting: Setting, rounds: int, sizes: Sequence[int] = (), quick: bool = False
) -> Iterator[tuple[report.Section, list[Row]]]:
    """Measures operators one after the other: the section and the rows of each.

    Args:
        operators: an operator without any of the implementations in `setting` is left out.
        setting: of all of them.
        rounds: timed.
        sizes: empty for those of each operator.
        quick: whether the machine's limits are measured with small tensors, and sizes are small.
    """
    machine = measure_machine(setting.device, setting.dtype, quick)
    for operator in operators:
        if setting.implementations and not set(setting.implementations) & {AUTO, *operator.implementations}:
            continue
        torch.manual_seed(0)
        rows: list[Row] = []
        for size in sizes or operator.sizes(setting.device, quick):
            print(f"{operator.name}, {operator.size_name} {size} …", file=sys.stderr)
            if setting.device == "cuda":
                torch.compiler.reset()  # so that flex_attention is compiled for this size alone
            rows += measure(
                only(operator.case(size, setting), setting.implementations), rounds, setting.device, machine
            )
        note = f"{rounds} rounds; floor from {machine}"
        yield report.operator_section(rows, operator.title(setting), setting.device, operator.size_name, note), rows


def only(case: Case, implementations: Collection[str]) -> Case:
    """The case with these implementations of ours; with all if there are none."""
    wanted = {name for one in implementations for name in (one, sigma_moe_name(one))}
    kept = [one for one in case.contenders if not wanted or not one.ours or one.name in wanted]
    return replace(case, contenders=kept)


def problems(rows: Iterable[Row], implementations: Collection[str]) -> list[str]:
    """What is wrong with our rows: wrong or failed ones, and those asked for by name that cannot run."""
    bad = {"wrong", "failed"} | ({"skipped"} if implementations else set())
    return [
        f"{row.status}: {row.operator} {row.contender} at {row.size}: {row.reason}"
        for row in rows
        if row.ours and row.status in bad
    ]


def setting_on(
    device: str, dtype: str = "float32", peers: bool = False, quick: bool = False, **changes: Any
) -> Setting:
    """The setting of a device.

    Args:
        device: ``cpu`` or ``cuda``.
        dtype: of ``measure.DTYPES``.
        peers: whether installed peers are measured too; those in torch always are.
        quick: whether sizes are small.
        changes: other attributes of the setting.
    """
    found, remarks = find(device, peers)
    for name, remark in remarks.items():
        print(f"peer {name}: {remark}", file=sys.stderr)
    changes = (ON_CUDA if device == "cuda" else {}) | (QUICK if quick else {}) | changes
    return replace(Setting(device, DTYPES[dtype], peers=tuple(found)), **changes)


def run(
    operators: Iterable[Operator],
    setting: Setting,
    rounds: int,
    command: str,
    out: Path | None = None,
    figures: bool = False,
    **options: Any,
) -> list[str]:
    """Measures and publishes operators (``measured``, ``report.publish``), and returns their ``problems``."""
    found = []
    for section, rows in measured(operators, setting, rounds, **options):
        report.publish(section, command, out, figures)
        found += problems(rows, setting.implementations)
    for problem in found:
        print(problem, file=sys.stderr)
    return found


SETTINGS = {
    "heads": "H",
    "dim": "width of a head",
    "positions": "of a batch",
    "tokens": "of mixtures",
    "model_dim": "width of mixtures",
    "expert_dim": "hidden units of an expert",
    "chosen": "experts of a token",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if an implementation of ours is wrong or fails, or cannot run where it is asked for; else 0."""
    parser = Command(prog="python -m benchmarks.operators", description=__doc__)
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help=f"of {', '.join(OPERATORS)}; all by default")
    parser.add_argument(
        "--implementation", nargs="+", default=[], metavar="NAME", help="only these of ours; peers stay"
    )
    parser.add_argument("--peers", action="store_true", help="also measure installed peers; those in torch always are")
    parser.add_argument(
        "--sizes", type=positive, nargs="+", default=[], metavar="N", help="lengths or numbers of experts"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of inputs (default float32)")
    for name, what in SETTINGS.items():
        parser.add_argument(flag(name), type=positive, metavar="N", help=what)
    parser.add_argument("--quick", action="store_true", help="small sizes, as a smoke test; do not quote the numbers")
    parser.add_argument("--figures", action="store_true", help="draw time and memory of each operator; with --out")
    report.add_options(parser, rounds=9)
    args = report.parse(parser, argv, "benchmarks.operators")
    if unknown := set(args.operators) - set(OPERATORS):
        parser.error(f"no operator {', '.join(sorted(unknown))}: choose from {', '.join(OPERATORS)}")
    operators = [OPERATORS[name] for name in args.operators or OPERATORS]
    known = {AUTO, *(name for operator in operators for name in operator.implementations)}
    if unknown := set(args.implementation) - known:
        parser.error(f"--implementation {' '.join(sorted(unknown))}: choose from {', '.join(sorted(known))}")
    if args.figures and args.out is None:
        parser.error("--figures needs --out FOLDER")
    if args.figures and importlib.util.find_spec("matplotlib") is None:
        parser.error("--figures needs matplotlib: pip install matplotlib")
    as_in_training()
    changes = {name: getattr(args, name) for name in SETTINGS if getattr(args, name) is not None}
    changes["implementations"] = tuple(args.implementation)
    setting = setting_on(args.device, args.dtype, args.peers, args.quick, **changes)
    options = {"sizes": args.sizes, "quick": args.quick}
    return 1 if run(operators, setting, args.rounds, args.command, args.out, args.figures, **options) else 0


if __name__ == "__main__":
    sys.exit(main())
