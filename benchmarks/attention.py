"""A training step of every attention in the same model, and decoding token by token up to 4,096 positions.

    python -m benchmarks.attention step        # milliseconds and kept activations, on SCAN's model and batches
    python -m benchmarks.attention decoding    # milliseconds per token and size of the state, by position

Times are medians of interleaved rounds, processor time on a CPU (``measure.py``). Compare them as ratios.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks.measure import as_in_training, kept_activations, medians
from benchmarks.report import publish, table, where

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
from attentions import MODELS, build  # noqa: E402
from fairseq.data import Dictionary  # noqa: E402

import fairseq_sg.plugin  # noqa: E402, F401
from fairseq_sg.models.sg_transformer import (
    SGTransformer,  # noqa: E402
    resolve,  # noqa: E402
)
from fairseq_sg.modules.attention import Context, build_attention  # noqa: E402

SENTENCES, SOURCE, TARGET = 64, 9, 26  # of a batch of SCAN, without padding
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


def dictionary(words: int) -> Dictionary:
    found = Dictionary()
    for word in range(words):
        found.add_symbol(f"w{word}")
    return found


def model_of(arguments: list[str]) -> SGTransformer:
    """SCAN's universal transformer with the arguments of a ``fairseq-train`` command."""
    task = SimpleNamespace(
        source_dictionary=dictionary(13),
        target_dictionary=dictionary(6),
        cfg=SimpleNamespace(left_pad_target=False),
    )
    torch.manual_seed(1)
    return build(arguments, task)


def step_rows(rounds: int, device: str) -> list[tuple[str, ...]]:
    """Milliseconds of forward and backward, kept activations and parameters, for every model
    of scripts/attentions.py.
    """
    torch.manual_seed(0)
    source = torch.randint(4, 17, (SENTENCES, SOURCE + 2), device=device)
    target = torch.randint(4, 10, (SENTENCES, TARGET + 1), device=device)
    steps, memory, size = {}, {}, {}
    for name, arguments in MODELS.items():
        model = model_of(arguments).to(device)

        def loss(model=model) -> torch.Tensor:
            logits = model(source, None, target)[0]
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())

        def step(model=model, loss=loss) -> None:
            model.zero_grad()
            loss().backward()

        memory[name] = kept_activations(model, loss)
        size[name] = sum(p.numel() for p in model.parameters())
        steps[name] = step
    times = medians(steps, rounds, device)
    base = times["softmax"]
    return [
        (name, f"{times[name]:.1f}", f"{times[name] / base:.2f}", f"{memory[name] / 1e6:.1f}", f"{size[name]:,}")
        for name in MODELS
    ]


def decoding_rows(rounds: int, device: str) -> list[tuple[str, ...]]:
    """Milliseconds of one step of one decoder self-attention (batch 8, width 128, 8 heads) at several positions."""
    batch, dim = 8, 128
    steps: dict[str, Callable[[], None]] = {}
    sizes: dict[tuple[str, int], int] = {}
    for name, values in DECODED.items():
        widths = dict(
            encoder_embed_dim=dim, decoder_embed_dim=dim, encoder_attention_heads=8, decoder_attention_heads=8
        )
        attention = build_attention(
            values.get("decoder_attention", "softmax"), resolve(SimpleNamespace(**widths, **values)), "decoder"
        )
        attention = attention.to(device).eval()
        state: dict = {}
        x = torch.randn(1, batch, dim, device=device)
        reached = 0
        with torch.no_grad():
            for position in POSITIONS:
                # Chunks fill the state quickly; only the step of one token is timed.
                while reached < position - 1:
                    size = min(256, position - 1 - reached)
                    attention(torch.randn(size, batch, dim, device=device), None, Context(state=state))
                    reached += size
                kept = {key: dict(value) for key, value in state.items()}
                tensors = [v for s in kept.values() for v in s.values() if isinstance(v, torch.Tensor)]
                storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
                sizes[name, position] = sum(storages.values())

                def step(attention=attention, kept=kept, x=x) -> None:
                    with torch.no_grad():
                        attention(x, None, Context(state={key: dict(value) for key, value in kept.items()}))

                steps[f"{name} {position}"] = step
    times = medians(steps, rounds, device)
    return [
        (
            name,
            *(f"{times[f'{name} {position}']:.3f}" for position in POSITIONS),
            *(f"{sizes[name, position] / 1e3 / batch:.1f}" for position in (POSITIONS[0], POSITIONS[-1])),
        )
        for name in DECODED
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["step", "decoding"])
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds (default 20)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--results", type=Path, metavar="FILE", help="also put the table into this file (RESULTS.md)")
    args = parser.parse_args(argv)
    as_in_training()
    machine = where(gpu=args.device == "cuda")
    if args.what == "step":
        text = (
            "Forward and backward of the universal transformer of SCAN (3 + 3 steps, width 128, 8 heads), "
            f"{SENTENCES} sentences of {SOURCE} and {TARGET} words, float32, one thread; median of {args.rounds} "
            "interleaved rounds. Memory is that of tensors that autograd keeps for the backward pass. "
        )
        header = ("attention", "ms", "times softmax", "MB kept", "parameters")
        rows = step_rows(args.rounds, args.device)
    else:
        text = (
            "One new token in one causal self-attention (8 sentences, width 128, 8 heads, float32, one thread) after "
            f"the given number of others; median of {args.rounds} interleaved rounds. The state is per sentence; "
            "softmax kinds double theirs when it is full. "
        )
        header = (
            "attention",
            *(f"ms at {p:,}" for p in POSITIONS),
            *(f"kB at {p:,}" for p in (POSITIONS[0], POSITIONS[-1])),
        )
        rows = decoding_rows(args.rounds, args.device)
    title = {"step": "A training step by attention", "decoding": "Decoding token by token"}[args.what]
    command = f"`python -m benchmarks.attention {args.what} --rounds {args.rounds}`"
    publish(f"{title} ({args.device})", f"{text}{command}; {machine}.\n\n{table(header, rows)}", args.results)


if __name__ == "__main__":
    main()
