"""Every attention in the same model: a training step, the orthogonality loss in it, and decoding token by token.

    python -m benchmarks.attention step             # time and kept activations of every attention, map and position
    python -m benchmarks.attention orthogonality    # the share of the orthogonality loss in a step, by length
    python -m benchmarks.attention decoding         # time of a token and size of the state, by position
    python -m benchmarks.attention windows          # a decoder's self-attention with and without a window, by length

The model is SCAN's universal transformer (3 + 3 steps, width 128, 8 heads). A step is forward and backward without
optimizer. Loss and gradients, or the token decoded from a state, are first compared with the same model in float64.
Times are medians of interleaved rounds, processor time on a CPU (``measure.py``). Compare them as ratios.
"""

from __future__ import annotations

import argparse
import copy
import functools
import os
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY, BaseFairseqModel
from torch import Tensor, nn

import fairseq_sg.plugin  # noqa: F401
from benchmarks import report
from benchmarks.measure import as_in_training, error, kept_activations
from fairseq_sg.kernels.timing import interleaved, medians, quartiles
from fairseq_sg.models.sg_transformer import SGTransformer, resolve
from fairseq_sg.modules.attention import ATTENTION_REGISTRY, ROLES, Attention, Context, build_attention
from fairseq_sg.modules.feature_maps import FEATURE_MAP_REGISTRY
from fairseq_sg.modules.position import POSITION_REGISTRY
from fairseq_sg.ops import orthogonality_loss
from fairseq_sg.ops.dispatch import ENVIRONMENT_VARIABLE
from fairseq_sg.parsers import Command, positive

ARCHITECTURE = "sg_transformer_scan"
SENTENCES, SOURCE, TARGET = 64, 9, 26  # of a batch of SCAN, without padding
#: Maximum error of a whole model in float32. A ReLU near 0 may take the other side, so it is not that of an operator.
ALLOWED = 1e-2
#: What a feature map or position needs besides its name.
NEEDS = {
    "cosformer": ["--cosformer-horizon", "64"],
    "taylor": ["--feature-dim", "sqrt"],
    "rebased": ["--feature-dim", "sqrt"],
    # Without a denominator, whose similarities may have either sign.
    "identity": ["--linear-attention-denominator", "none"],
    "mlp": ["--linear-attention-denominator", "none"],
    "randomized": ["--randomized-range", "512", "--randomized-eval-length", "64"],
    "fraction": ["--decoder-attention", "relative"],
}
POSITIONS = (64, 256, 1024, 4096)
DECODED = {
    "softmax": {},
    "relative": {"decoder_attention": "relative"},
    "linear elu": {"decoder_attention": "linear"},
    "linear taylor": {"decoder_attention": "linear", "feature_map": "taylor", "feature_dim": "sqrt"},
    "linear performer": {"decoder_attention": "linear", "feature_map": "performer"},
    "linear rotary": {"decoder_attention": "linear", "position": "rotary"},
    "galerkin": {"decoder_attention": "galerkin"},
}
#: Lengths of the orthogonality loss, and positions per batch on each side for all of them.
LENGTHS, LOSS_POSITIONS = (10, 32, 128, 512, 2048), 2048
WINDOWED = {
    "softmax": {},
    "softmax, window 64": {"attention_window": 64},
    "relative": {"decoder_attention": "relative"},
    "relative, window 64": {"decoder_attention": "relative", "attention_window": 64},
    "linear elu": {"decoder_attention": "linear"},
}
WINDOW_LENGTHS = (64, 256, 1024, 2048)


def everywhere(kind: str) -> list[str]:
    """Options for an attention in every role it can serve; cross-attention stays softmax otherwise."""
    return [word for role in ROLES if role in ATTENTION_REGISTRY[kind].roles for word in (f"--{role}-attention", kind)]


def models() -> dict[str, list[str]]:
    """Options of every attention, feature map and position, and of some combinations."""
    found = {}
    for kind in ATTENTION_REGISTRY:
        if kind == "linear":
            for name in FEATURE_MAP_REGISTRY:
                found[f"linear {name}"] = [*everywhere(kind), "--feature-map", name, *NEEDS.get(name, [])]
        else:
            found[kind] = everywhere(kind)
    for name in POSITION_REGISTRY:
        if name != "sinusoidal":
            found[f"softmax {name}"] = ["--position", name, *NEEDS.get(name, [])]
    randomized = ["--position", "randomized", *NEEDS["randomized"], "--randomized-base", "relative"]
    mixed = ["--encoder-attention", "relative", "--decoder-attention", "linear", "--cross-attention", "linear"]
    gated = ["--encoder-attention", "geometric", "--encoder-update", "copy_gate", "--decoder-attention", "relative"]
    return found | {
        "log-length": ["--logit-scale", "log_length"],
        "relative randomized": [*everywhere("relative"), *randomized],
        "linear rotary": [*everywhere("linear"), "--position", "rotary"],
        "relative + linear": mixed,
        "ndr + relative": gated,
    }


def dictionary(words: int) -> Dictionary:
    found = Dictionary()
    for word in range(words):
        found.add_symbol(f"w{word}")
    return found


def built(architecture: str, arguments: Sequence[str], task: object) -> BaseFairseqModel:
    """A model with arguments of a ``fairseq-train`` command, in training mode."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    ARCH_MODEL_REGISTRY[architecture].add_args(parser)
    args = parser.parse_args(arguments)
    ARCH_CONFIG_REGISTRY[architecture](args)
    torch.manual_seed(1)
    return ARCH_MODEL_REGISTRY[architecture].build_model(args, task).train()


def model_of(arguments: Sequence[str]) -> SGTransformer:
    """SCAN's universal transformer with arguments of a ``fairseq-train`` command, in training mode."""
    cfg = SimpleNamespace(left_pad_target=False)
    task = SimpleNamespace(source_dictionary=dictionary(13), target_dictionary=dictionary(6), cfg=cfg)
    return built(ARCHITECTURE, ["--depth", "shared", *arguments], task)


def batch(sentences: int, source: int, target: int, device: str) -> tuple[Tensor, Tensor]:
    """Random words of SCAN's vocabularies, without padding: (sentences, source) and (sentences, target)."""
    torch.manual_seed(0)
    words = torch.randint(4, 17, (sentences, source)), torch.randint(4, 10, (sentences, target))
    return words[0].to(device), words[1].to(device)


def loss_of(model: SGTransformer, source: Tensor, target: Tensor) -> Tensor:
    logits = model(source, None, target)[0]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def stop_if_wrong(name: str, found: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
    """Ends the program before anything is timed if numbers are far from those of float64."""
    worst, place = error(found, exact)
    if not worst <= ALLOWED:
        sys.exit(
            f"error: {name}: {place} is off by {worst:.1e}, more than the allowed {ALLOWED:.0e}; nothing was timed"
        )


def section_of(
    kind: str, title: str, device: str, columns: list[tuple[str, str]], rows: list[list], about: str, rounds: int
) -> report.Section:
    """A section of numbers that took ``rounds``."""
    rows, note = report.rounded(rows), f"{rounds} rounds"
    return report.Section(kind, f"{title} ({device})", device, columns, rows, about=about, note=note)


def check_in_float64(name: str, make: Callable[[torch.dtype], tuple[nn.Module, Callable[[], Tensor]]]) -> None:
    """Compares loss and gradients with the equations (``naive``) in float64.

    Args:
        name: of the model, for errors.
        make: dtype -> the model, and a function that gives its loss.
    """
    found = []
    for dtype, implementation in ((torch.float32, "auto"), (torch.float64, "naive")):
        model, loss_of_model = make(dtype)
        torch.manual_seed(2)  # of what is drawn in a step, such as positions
        with mock.patch.dict(os.environ, {ENVIRONMENT_VARIABLE: implementation}):
            loss = loss_of_model()
            loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    stop_if_wrong(name, found[0], [x.double() for x in found[1]])


def step_section(rounds: int, device: str, names: Sequence[str] = ()) -> report.Section:
    """Milliseconds of forward and backward, kept activations and parameters of the models; of all without names."""
    source, target = batch(SENTENCES, SOURCE + 2, TARGET + 1, device)
    chosen = {name: arguments for name, arguments in models().items() if not names or name in ("softmax", *names)}
    steps, kept, size = {}, {}, {}
    for name, arguments in chosen.items():

        def without_dropout(dtype: torch.dtype, arguments=arguments) -> tuple[nn.Module, Callable[[], Tensor]]:
            model = model_of([*arguments, "--dropout", "0"]).to(device, dtype)
            return model, functools.partial(loss_of, model, *batch(4, SOURCE, TARGET, device))

        check_in_float64(name, without_dropout)
        model = model_of(arguments).to(device)

        def step(model=model) -> None:
            model.zero_grad()
            loss_of(model, source, target).backward()

        kept[name] = kept_activations(model.parameters(), functools.partial(loss_of, model, source, target))
        size[name] = sum(p.numel() for p in model.parameters())
        steps[name] = step
    times = medians(steps, rounds, device)
    rows = [[name, times[name], times[name] / times["softmax"], kept[name] / 1e6, size[name]] for name in chosen]
    columns = [("attention", "{}"), ("ms", "{:.1f}"), ("times softmax", "{:.2f}"), ("MB kept", "{:.1f}")]
    columns.append(("parameters", "{:,}"))
    about = f"{SENTENCES} sentences of {SOURCE} and {TARGET} words, float32, one thread."
    return section_of("attentions", "SCAN", device, columns, rows, about, rounds)


def orthogonality_times(length: int, rounds: int, device: str) -> dict[str, list[float]]:
    """Milliseconds per round of a step ``with`` and ``without`` the loss, and of the loss ``alone``.

    ``with`` and ``alone`` have it on the Values of all nine attentions; the three cross-attentions share theirs, and so
    one computation. ``encoder`` is the loss alone on the encoder's three. It is timed alone because the difference of a
    step with and without it is a small number between two large ones.
    """
    size = max(1, LOSS_POSITIONS // length)
    model = model_of([]).to(device)
    source, target = batch(size, length, length, device)

    def step(roles: Sequence[str]) -> int:
        model.zero_grad()
        logits, extra = model(source, None, target, value_roles=roles)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())
        found = [values for role in roles for values, _ in extra["values"][role]]
        # As the criterion has it: equal Values of a shared layer's steps have one loss.
        losses = {id(values): orthogonality_loss(values) for values in found}
        (loss + torch.stack([losses[id(values)] for values in found]).sum() if found else loss).backward()
        return len(losses)

    # As in attentions: heads are split off the width.
    projected = torch.randn(size, length, 8, 16, device=device, requires_grad=True)

    def alone(times: int) -> list[Tensor]:
        return [
            torch.autograd.grad(orthogonality_loss(projected.transpose(1, 2)), [projected])[0] for _ in range(times)
        ]

    exact = projected.detach().double().requires_grad_()
    loss = orthogonality_loss(exact.transpose(1, 2), implementation="naive")
    stop_if_wrong(f"orthogonality loss at {length}", alone(1), torch.autograd.grad(loss, [exact]))
    kinds = {"with": lambda: step(ROLES), "without": lambda: step([])}
    kinds |= {name: functools.partial(alone, step(roles)) for name, roles in (("alone", ROLES), ("encoder", ROLES[:1]))}
    return interleaved(kinds, rounds, device)


def orthogonality_section(rounds: int, device: str, lengths: Sequence[int] = LENGTHS) -> report.Section:
    """The share of the orthogonality loss in a step, by length."""
    rows = []
    for length in lengths:
        times = orthogonality_times(length, rounds, device)
        # Median first, as the format of the column has it.
        spread = {name: [quartiles(of)[place] for place in (1, 0, 2)] for name, of in times.items()}
        without, alone, encoder = (spread[name][0] for name in ("without", "alone", "encoder"))
        shares = (alone / (without + alone), encoder / (without + encoder), 1 - without / spread["with"][0])
        cells = [spread[name] for name in ("without", "with", "alone")]
        rows.append([f"{length:,}", *cells, *(100 * share for share in shares)])
    time, share = "{:.2f} [{:.2f}, {:.2f}]", "{:.1f} %"
    columns = [("length", "{}"), ("step without", time), ("step with", time), ("loss alone", time)]
    columns += [("share", share), ("encoder alone", share), ("share by difference", share)]
    about = f"{LOSS_POSITIONS:,} positions per side of a batch, float32, one thread."
    return section_of("orthogonality", "SCAN", device, columns, rows, about, rounds)


def decoder_attention(options: dict[str, Any], width: int) -> Attention:
    sizes = dict(encoder_embed_dim=width, decoder_embed_dim=width, encoder_attention_heads=8, decoder_attention_heads=8)
    config = resolve(SimpleNamespace(**sizes, **options))
    torch.manual_seed(1)
    return build_attention(options.get("decoder_attention", "softmax"), config, "decoder").eval()


def decoding_section(rounds: int, device: str, positions: Sequence[int] = POSITIONS) -> report.Section:
    """Milliseconds of one token in one decoder self-attention, and kilobytes of its state."""
    sentences, width, positions = 8, 128, sorted(positions)  # a state only grows
    steps: dict[str, Callable[[], Tensor]] = {}
    sizes: dict[tuple[str, int], int] = {}
    for name, options in DECODED.items():
        attention = decoder_attention(options, width).to(device)
        x = torch.randn(max(positions), sentences, width, device=device)
        state: dict = {}
        reached = 0
        with torch.no_grad():
            for position in positions:
                # Chunks fill the state quickly; only the step of one token is timed.
                while reached < position - 1:
                    end = min(reached + 256, position - 1)
                    attention(x[reached:end], None, Context(state=state))
                    reached = end
                kept = {key: dict(value) for key, value in state.items()}
                tensors = [v for s in kept.values() for v in s.values() if isinstance(v, Tensor)]
                storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
                sizes[name, position] = sum(storages.values())
                token = x[position - 1 : position]

                def step(attention=attention, kept=kept, token=token) -> Tensor:
                    with torch.no_grad():
                        context = Context(state={key: dict(value) for key, value in kept.items()})
                        return attention(token, None, context).output

                if position == positions[0]:
                    whole = copy.deepcopy(attention).double()(x[:position].double(), None, Context()).output
                    stop_if_wrong(name, [step()], [whole[-1:]])
                steps[f"{name} {position}"] = step
    times = medians(steps, rounds, device)
    ends = (positions[0], positions[-1])
    rows = [
        [
            name,
            *(times[f"{name} {position}"] for position in positions),
            *(sizes[name, position] / 1e3 / sentences for position in ends),
        ]
        for name in DECODED
    ]
    columns = [("attention", "{}"), *((f"ms at {position:,}", "{:.3f}") for position in positions)]
    columns += [(f"kB at {position:,}", "{:,.1f}") for position in ends]
    about = f"{sentences} sentences, width {width}, 8 heads, float32, one thread."
    return section_of("decoding", f"Width {width}", device, columns, rows, about, rounds)


def check_window(name: str, attention: Attention, x: Tensor) -> None:
    """Compares output and gradients with one matrix of weights in float64."""
    found = []
    for dtype in (torch.float32, torch.float64):
        module = copy.deepcopy(attention).to(dtype)
        given = x.detach().to(dtype).requires_grad_()
        out = module(given, None, Context(return_weights=dtype == torch.float64)).output
        found.append([out.detach(), *torch.autograd.grad(out.square().mean(), [given, *module.parameters()])])
    stop_if_wrong(name, found[0], found[1])


def windows_section(rounds: int, device: str, lengths: Sequence[int] = WINDOW_LENGTHS) -> report.Section:
    """Milliseconds of forward and backward of one decoder self-attention, by length, and megabytes kept."""
    sentences, width = 2, 128
    steps: dict[str, Callable[[], None]] = {}
    kept: dict[tuple[str, int], float] = {}
    for name, options in WINDOWED.items():
        attention = decoder_attention(options, width).to(device)
        for length in lengths:
            x = torch.randn(length, sentences, width, device=device, requires_grad=True)
            check_window(f"{name} at {length}", attention, x)

            def loss(attention=attention, x=x) -> Tensor:
                return attention(x).output.square().mean()

            kept[name, length] = kept_activations(attention.parameters(), loss) / 1e6
            steps[f"{name} {length}"] = lambda loss=loss: loss().backward()
    times = medians(steps, rounds, device)
    rows = [[name, *(times[f"{name} {length}"] for length in lengths), kept[name, lengths[-1]]] for name in WINDOWED]
    columns = [("attention", "{}"), *((f"ms at {length:,}", "{:.1f}") for length in lengths)]
    columns.append((f"MB kept at {lengths[-1]:,}", "{:,.1f}"))
    about = f"{sentences} sentences, width {width}, 8 heads, float32, one thread."
    return section_of("windows", f"Width {width}", device, columns, rows, about, rounds)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Command(prog="python -m benchmarks.attention", description=__doc__)
    parser.add_argument("what", choices=["step", "orthogonality", "decoding", "windows"])
    parser.add_argument(
        "--models", nargs="+", metavar="NAME", help='of step: "linear elu" …; softmax is always measured'
    )
    parser.add_argument(
        "--at",
        type=positive,
        nargs="+",
        metavar="N",
        help="lengths of orthogonality and windows, positions of decoding",
    )
    report.add_options(parser, rounds=10)
    args = report.parse(parser, argv, "benchmarks.attention")
    if args.models and args.what != "step":
        parser.error("--models is for step")
    if args.at and args.what == "step":
        parser.error("--at is for orthogonality, decoding and windows")
    if unknown := set(args.models or ()) - set(models()):
        parser.error(f"--models {', '.join(sorted(unknown))}: choose from {', '.join(models())}")
    as_in_training()
    if args.what == "step":
        section = step_section(args.rounds, args.device, args.models or ())
    elif args.what == "orthogonality":
        section = orthogonality_section(args.rounds, args.device, args.at or LENGTHS)
    elif args.what == "decoding":
        section = decoding_section(args.rounds, args.device, args.at or POSITIONS)
    else:
        section = windows_section(args.rounds, args.device, args.at or WINDOW_LENGTHS)
    report.publish(section, args.command, args.out)


if __name__ == "__main__":
    main()
