"""Differentiable neural computers: time of a training update, beside torch's LSTM and a transcription of the equations.

    python -m benchmarks.memory                              # 16 and 64 cells, 20 and 100 words
    python -m benchmarks.memory --cells 16 --words 20 --compiled

An update is forward and backward of ``sg_dnc`` with one read head on words of bits, without optimizer. ``transcribed``
is the same model with the operators as one would first write them: the masked cosine from a (B, R, N, W) tensor, the
allocation by ``cumprod``, the sharpness by powers. ``LSTM`` is torch's, as wide as the controller, with a linear layer
on it. The models of one size take turns. Times are medians of the rounds, processor time on a CPU. Compare them as
ratios. Outputs and gradients are first compared with the naive operators in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks import report
from benchmarks.attention import stop_if_wrong
from benchmarks.measure import as_in_training
from fairseq_sg.kernels.timing import interleaved, quartiles
from fairseq_sg.modules.memory import CONTROLLER_REGISTRY, DNC
from fairseq_sg.ops import memory as ops
from fairseq_sg.ops.memory import functions as ops_functions
from fairseq_sg.ops.memory.naive import EPS
from fairseq_sg.parsers import Command, positive

CELLS, WORDS = (16, 64), (20, 100)
BITS, WIDTH, CONTROLLER = 9, 32, 64
BASE = "mds"
VARIANTS = {"plain": (False, False, False), BASE: (True, True, True)}


def content_weights(memory: Tensor, keys: Tensor, strengths: Tensor, masks: Tensor | None = None) -> Tensor:
    """The masked cosine with a (B, K, N, W) tensor."""
    m = torch.ones_like(keys) if masks is None else masks
    cells = memory[:, None] * m[:, :, None]  # (B, K, N, W)
    k = (keys * m)[:, :, None]
    norms = (k.square().sum(-1) + 1e-36).sqrt() * (cells.square().sum(-1) + 1e-36).sqrt()
    return torch.softmax((k * cells).sum(-1) / (norms + EPS) * strengths[:, :, None], 2)


def allocation(usage: Tensor) -> Tensor:
    u, order = torch.sort(usage * (1 - EPS) + EPS, dim=1, stable=True)
    before = torch.cat([torch.ones_like(u[:, :1]), u.cumprod(1)[:, :-1]], 1)
    return torch.zeros_like(u).scatter(1, order, (1 - u) * before)


def retention(read_weights: Tensor, free: Tensor) -> Tensor:
    return (1 - read_weights * free[:, :, None]).prod(1)


def follow(
    links: Tensor, read_weights: Tensor, ahead: Tensor | None = None, behind: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    def sharpened(d: Tensor, s: Tensor | None) -> Tensor:
        if s is None:
            return d
        powers = ((d + EPS) / (d + EPS).amax(2, keepdim=True)) ** s[:, :, None]
        return powers / powers.sum(2, keepdim=True)

    found = torch.einsum("bij,brj->bri", links, read_weights), torch.einsum("bij,bri->brj", links, read_weights)
    return sharpened(found[0], ahead), sharpened(found[1], behind)


def transcribed(like: Tensor) -> ops.Functions:
    """The operators as one would first write them."""
    own = {"content_weights": content_weights, "allocation": allocation, "retention": retention, "follow": follow}
    return ops_functions(like, "batched")._replace(**own)


def dnc(variant: str, cells: int) -> DNC:
    torch.manual_seed(1)
    controller = CONTROLLER_REGISTRY.find("lstm")(BITS, WIDTH, CONTROLLER, 1)
    masks, deallocate, sharpen = VARIANTS[variant]
    return DNC(controller, BITS, cells=cells, width=WIDTH, heads=1, masks=masks, deallocate=deallocate, sharpen=sharpen)


class LSTM(nn.Module):
    """As wide as the controller, with its output layer."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(BITS, CONTROLLER, batch_first=True)
        self.output = nn.Linear(CONTROLLER, BITS)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.output(self.lstm(x)[0]),)


def sample(sentences: int, words: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (2 * torch.randint(0, 2, (sentences, words, BITS), generator=generator) - 1).to(device, dtype)


def update(model: nn.Module, x: Tensor, functions: Callable[..., ops.Functions] | None = None) -> Tensor:
    """The loss of a forward and backward pass."""
    model.zero_grad()
    with mock.patch.object(ops, "functions", functions) if functions else mock.MagicMock():
        loss = model(x)[0].square().mean()
        loss.backward()
    return loss.detach()


def check(variant: str, device: str) -> None:
    """Compares loss and gradients of the batched and of the transcribed operators with the naive ones in float64."""

    def run(dtype: torch.dtype, functions: Callable[..., ops.Functions] | None) -> list[Tensor]:
        model = dnc(variant, 5).to(device, dtype)
        loss = update(model, sample(2, 6, device, dtype), functions)
        return [loss, *(parameter.grad for parameter in model.parameters())]

    exact = run(torch.float64, functools.partial(ops_functions, implementation="naive"))
    for name, functions in ((variant, None), ("transcribed", transcribed)):
        stop_if_wrong(name, run(torch.float32, functions), exact)


def sections(
    rounds: int,
    device: str,
    cells: Sequence[int] = CELLS,
    words: Sequence[int] = WORDS,
    sentences: int = 64,
    compiled: bool = False,
) -> list[report.Section]:
    """Times of the models by number of cells and words."""
    for variant in VARIANTS:
        check(variant, device)
    sizes = [(n, t) for n in cells for t in words]
    times: dict[str, list[list[float]]] = {}
    for n, t in sizes:
        x = sample(sentences, t, device)
        models: dict[str, Any] = {variant: (dnc(variant, n).to(device), None) for variant in VARIANTS}
        models["mds, transcribed"] = dnc(BASE, n).to(device), transcribed
        models["LSTM"] = LSTM().to(device), None
        if compiled:
            model = dnc(BASE, n).to(device)
            model.compile_mode = "default"
            models["mds, --compile default"] = model, None
        runs = {name: functools.partial(update, model, x, how) for name, (model, how) in models.items()}
        measured = {name: quartiles(of) for name, of in interleaved(runs, rounds, device).items()}
        base = measured[BASE][1]
        for name, (low, median, high) in measured.items():
            words_a_second = sentences * t / (median / 1e3)
            times.setdefault(name, []).append([median / base, low / base, high / base, words_a_second])
    form = "{:.2f} [{:.2f}, {:.2f}]; {:,.0f} words/s"
    columns = [("model", "{}"), *((f"{n} cells, {t} words", form) for n, t in sizes)]
    about = (
        f"Times the update of {BASE}, median [quartiles], and words a second. Batch of {sentences}, W = {WIDTH}, one "
        f"head, controller of {CONTROLLER}, float32{', one thread' * (device == 'cpu')}."
    )
    rows = report.rounded([[name, *found] for name, found in times.items()])
    title = f"Time of differentiable neural computers ({device})"
    return [report.Section("memory", title, device, columns, rows, about=about, note=f"{rounds} rounds")]


def main(argv: Sequence[str] | None = None) -> None:
    parser = Command(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--cells", type=positive, nargs="+", metavar="N", default=CELLS, help="(default: 16 64)")
    parser.add_argument("--words", type=positive, nargs="+", metavar="T", default=WORDS, help="(default: 20 100)")
    parser.add_argument("--sentences", type=positive, default=64, help="in a batch (default %(default)s)")
    parser.add_argument(
        "--compiled", action="store_true", help="also with compiled steps, after a minute for each size"
    )
    report.add_options(parser, rounds=9)
    args = report.parse(parser, argv, "benchmarks.memory")
    as_in_training()
    for section in sections(args.rounds, args.device, args.cells, args.words, args.sentences, args.compiled):
        report.publish(section, args.command, args.out)


if __name__ == "__main__":
    main()
