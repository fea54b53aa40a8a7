"""Models with hand-set weights (Chiang & Cholak 2022), as checkpoints and figures.

    fairseq-sg construct parity data-bin/parity --out checkpoints/parity_exact.pt --layer-norm-eps 0
    fairseq-sg construct first data-bin/first --out checkpoints/first_exact.pt --log-length
    fairseq-sg construct figures docs/figures/constructions

A checkpoint is like one of fairseq-train: fairseq-validate, fairseq-sg evaluate and fairseq-sg analysis take it. The
data folder is one of `python -m data_prep parity` or `first`. See docs/constructions.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils, options, tasks, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf
from torch import Tensor

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg import ranges
from fairseq_sg.errors import UsageError, exit_code, finish
from fairseq_sg.experiments.figures import COLOURS, grid, pyplot
from fairseq_sg.experiments.figures import save as save_figure
from fairseq_sg.files import check_writable, read_manifest, write_json
from fairseq_sg.models import constructions
from fairseq_sg.models.sg_encoder import SGEncoder
from fairseq_sg.parsers import Command, Parser, from_0

#: The ε of Figure 2; None is the construction without a norm.
EPSILONS = (None, 1e-3, 1e-5, 1e-7, 1e-9, 0.0)
LENGTHS = (1, 3, 10, 30, 100, 300, 1000)
CONSTRUCTIONS = {"parity": constructions.PARITY, "first": constructions.FIRST}
#: Random strings of a length in a sampled mean.
SAMPLES = 100


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="fairseq-sg construct", description=__doc__)
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", title="commands", parser_class=Command
    )
    for name in CONSTRUCTIONS:
        one = commands.add_parser(name, help=f"write the model of {name.upper()} as a checkpoint")
        one.add_argument("data", metavar="DIR", help=f"a folder of `python -m data_prep {name}`")
        one.add_argument("--out", type=Path, required=True, metavar="FILE", help="the checkpoint to write")
        one.add_argument(
            "--layer-norm-eps", type=from_0, metavar="EPS", help="ε of the layer norms, 0 or more (default: no norm)"
        )
        one.add_argument(
            "--bits",
            type=from_0,
            metavar="X",
            help="one more layer, for a cross-entropy of X; needs --layer-norm-eps 0",
        )
        if name == "first":
            one.add_argument("--log-length", action="store_true", help="attention logits times ln N (section 5.3)")
            one.add_argument("--sharpness", type=from_0, default=1.0, metavar="C", help="the paper's c (default: 1)")
    one = commands.add_parser("figures", help="cross-entropy by length, and around one weight")
    one.add_argument("prefix", type=Path, metavar="PREFIX", help="PREFIX.json and PREFIX.png are written")
    one.add_argument("--longest", type=int, default=LENGTHS[-1], metavar="N", help="the maximum length (default: 1000)")
    return parser


# Checkpoints.


def write_checkpoint(args: argparse.Namespace) -> None:
    """Writes the checkpoint of one construction. Raises UsageError for a folder of another language."""
    if args.bits is not None and args.layer_norm_eps != 0:
        raise UsageError("--bits needs --layer-norm-eps 0: give it, or leave --bits out")
    check_writable(f"--out {args.out}", args.out)
    if args.out.suffix != ".pt":
        raise UsageError(f"--out {args.out} is a checkpoint: name a file that ends in .pt")
    task = tasks.setup_task(_configuration(args.data, {}).task)
    made_by = read_manifest(args.data).get("request", {}).get("dataset", args.command)
    if made_by != args.command:
        raise UsageError(f"{args.data} has {made_by}, not {args.command}: give a folder of data_prep {args.command}")
    task.load_dataset("valid")
    source = task.source_dictionary
    symbols = [source[token] for token in task.dataset("valid")[0]["source"].tolist()]
    target = task.target_dictionary
    model = constructions.build(
        CONSTRUCTIONS[args.command],
        args.layer_norm_eps,
        log_length=getattr(args, "log_length", False),
        sharpness=getattr(args, "sharpness", None),
        dictionary=source,
        classes=[target[index] for index in range(target.nspecial, len(target))],
        sentences=constructions.sentences_around(symbols, CONSTRUCTIONS[args.command].readout),
        dtype=torch.float32,
    )
    if args.bits is not None:
        model = constructions.sharpen(model, args.bits)
    save(model, args.data, args.out)
    sentence = " ".join(model.sentences.of("…"))
    print(f"{args.out}: {args.command.upper()} of sentences {sentence}, read from {model.sentences.read}")


def save(model: SGEncoder, data: str, path: Path) -> None:
    """Writes a classifier as a checkpoint of fairseq-train that was trained on the folder ``data``.

    Raises UsageError for a folder that the model's sizes do not go with.
    """
    cfg = _configuration(data, options_of(model))
    task = tasks.setup_task(cfg.task)
    if task.source_dictionary != model.encoder.dictionary:
        raise UsageError(f"the model's dictionary is not that of {data}")
    state = {
        "args": None,
        "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
        "model": {name: value.float() for name, value in model.state_dict().items()},
        "criterion": None,
        "optimizer_history": [{"num_updates": 0, "optimizer_name": "", "criterion_name": "", "lr_scheduler_state": {}}],
        "task_state": task.state_dict(),
        "extra_state": {"train_iterator": {"epoch": 1}},
    }
    checkpoint_utils.torch_persistent_save(state, str(path))


def options_of(model: SGEncoder) -> dict[str, Any]:
    """The options of a model's configuration that are not their default."""
    declared = type(model.config).declared
    found = {field.name: getattr(model.config, field.name) for field in dataclasses.fields(model.config)}
    return {name: value for name, value in found.items() if name in declared and value != declared[name]}


def _configuration(data: str, model: dict[str, Any]) -> Any:
    """fairseq's configuration of a training of ``sg_encoder`` with these options."""
    folder = utils.split_paths(data)[0]
    line = [data, "--task", "sg_classification", "--criterion", "classification", "--arch", "sg_encoder"]
    line += ["--optimizer", "torch_adam", "--max-source-positions", "1000000"]
    if not Path(folder).is_dir():
        raise UsageError(f"there is no folder {folder}: prepare it with `python -m data_prep parity` or `first`")
    for name, value in model.items():
        line += [ranges.flag(name)] if value is True else [ranges.flag(name), str(value)]
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), line))


# Figures.


def cross_entropy(logit: Tensor, accept: Tensor) -> Tensor:
    """−log₂ σ(±s) of logits s, whose strings are in the language where ``accept``."""
    return -torch.nn.functional.logsigmoid(torch.where(accept, logit, -logit)) / math.log(2)


def kinds(name: str, length: int) -> tuple[list[str], Tensor]:
    """A string of every kind that the model tells apart, and the probability of the kind among random strings.

    PARITY's logit depends on the length and the number of ones alone, FIRST's on the length and the first symbol.
    """
    if name == "first":
        return ["0" * length, "1" + "0" * (length - 1)], torch.tensor([0.5, 0.5], dtype=torch.float64)
    ones = torch.arange(length + 1, dtype=torch.float64)
    size = torch.tensor(float(length), dtype=torch.float64)
    ways = (size + 1).lgamma() - (ones + 1).lgamma() - (size - ones + 1).lgamma()
    return ["1" * int(k) + "0" * (length - int(k)) for k in ones], (ways - length * math.log(2)).exp()


def in_language(name: str, string: str) -> bool:
    return string[0] == "1" if name == "first" else string.count("1") % 2 == 1


@torch.no_grad()
def score(model: SGEncoder, name: str, strings: Sequence[str], batch: int = 16) -> tuple[Tensor, Tensor]:
    """Cross-entropy in bits and whether the answer is right, of every string (B,)."""
    logits = torch.cat([constructions.logits(model, strings[at : at + batch]) for at in range(0, len(strings), batch)])
    accept = torch.tensor([in_language(name, string) for string in strings])
    return cross_entropy(logits, accept), (logits > 0) == accept


def expected(model: SGEncoder, name: str, length: int) -> dict[str, float]:
    """The mean cross-entropy and accuracy (%) over all strings of a length."""
    strings, probability = kinds(name, length)
    entropy, right = score(model, name, strings)
    return {"bits": (probability @ entropy).item(), "accuracy": 100 * (probability @ right.double()).item()}


def sampled(model: SGEncoder, name: str, length: int, seed: int) -> float:
    """The mean cross-entropy over random strings of a length."""
    draw = random.Random(seed)
    strings = ["".join(draw.choices("01", k=length)) for _ in range(SAMPLES)]
    return score(model, name, strings)[0].mean().item()


def by_length(lengths: Sequence[int]) -> dict[str, Any]:
    """Figure 2: the cross-entropy by length for every ε, exact and sampled."""
    found: dict[str, Any] = {}
    for name, construction in CONSTRUCTIONS.items():
        for eps in EPSILONS:
            model, label = constructions.build(construction, eps), "no layer norm" if eps is None else f"ε = {eps:g}"
            found.setdefault(name, {})[label] = [
                {"length": n, **expected(model, name, n), "sampled": sampled(model, name, n, seed=n)} for n in lengths
            ]
    return found


def around_one_weight(length: int) -> list[dict[str, float]]:
    """Figure 3: the PARITY model with layer norm (ε = 1e-5) while the weight that counts the ones is moved from 1."""
    model = constructions.parity(1e-5)
    weight = model.encoder.stack.layers[0].self_attn.v_proj.weight
    index = 0, constructions.PARITY.features.index("1")
    found = []
    for value in torch.linspace(0, 2, 81, dtype=torch.float64).tolist():
        weight.data[index] = value
        found.append({"weight": value, **expected(model, "parity", length)})
    return found


def write_figures(args: argparse.Namespace) -> None:
    """Writes PREFIX.json and PREFIX.png."""
    lengths = [length for length in LENGTHS if length <= args.longest]
    if args.longest < 10:
        raise UsageError(f"--longest is {args.longest}: choose 10 or more, which all panels have")
    pyplot()  # before minutes of computing, not after them
    check_writable(f"{args.prefix}.json", f"{args.prefix}.json")
    found = {
        "by_length": by_length(lengths),
        "around_one_weight": {n: around_one_weight(n) for n in (10, 30, 100) if n <= args.longest},
    }
    # Not with_suffix, which cuts at a dot in PREFIX.
    write_json(f"{args.prefix}.json", found, indent=None)
    draw(found, Path(f"{args.prefix}.png"))
    print(f"{args.prefix}.json and {args.prefix}.png: the cross-entropies of strings of up to {lengths[-1]}")


def draw(found: dict[str, Any], path: Path) -> None:
    """Draws both figures into one file."""
    figure, panels = grid(2, 2, 2.6)
    for axes, (name, curves) in zip(panels[0], found["by_length"].items(), strict=True):
        for colour, (label, points) in zip(COLOURS, curves.items(), strict=False):
            lengths = [point["length"] for point in points]
            axes.plot(lengths, [point["bits"] for point in points], color=colour, label=label)
            axes.plot(lengths, [point["sampled"] for point in points], "o", color=colour, markersize=2.5)
        axes.set(xscale="log", ylim=(0, 1.05), title=name.upper(), xlabel="length", ylabel="cross-entropy, bits")
    panels[0][0].legend()
    for axes, (key, label) in zip(
        panels[1], (("bits", "cross-entropy, bits"), ("accuracy", "accuracy, %")), strict=True
    ):
        for colour, (length, points) in zip(COLOURS, found["around_one_weight"].items(), strict=False):
            axes.plot(
                [point["weight"] for point in points],
                [point[key] for point in points],
                color=colour,
                label=f"length {length}",
            )
        axes.set(title="PARITY, ε = 1e-5: one weight", xlabel="weight that counts the ones", ylabel=label)
    panels[1][0].set_yscale("log")
    panels[1][0].legend()
    save_figure(figure, path)


def main(line: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code: 0, 1 for what the user can fix, 2 for a wrong command line."""
    args = make_parser().parse_args(line)
    return finish(write_figures if args.command == "figures" else write_checkpoint, args)


if __name__ == "__main__":
    logging.getLogger().setLevel(logging.WARNING)
    sys.exit(exit_code(main))
