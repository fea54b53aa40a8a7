"""The cost of the orthogonality loss in a training step, by length.

    python -m benchmarks.orthogonality_share --rounds 5

The step is forward and backward of SCAN's universal transformer (3 + 3 steps of softmax attention). It has no
optimizer, so the share is an upper estimate. Source and target have the same length and no padding. The loss is on the
Values of all nine attentions; the three cross-attentions share their Values, and so one computation. The loss is also
timed alone, because the difference of a step with and without it is a small number between two large ones.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.attention import model_of
from benchmarks.measure import as_in_training, interleaved, quartiles
from benchmarks.report import publish, table, where
from fairseq_sg.ops import orthogonality_loss

LENGTHS = (10, 32, 128, 512, 2048)
#: Positions per batch on each side, for all lengths.
POSITIONS = 2048
ROLES = ("encoder", "decoder", "cross")


def measure_share(length: int, rounds: int, device: str) -> dict[str, list[float]]:
    """Milliseconds per round: step ``with`` the loss and ``without`` it, and the loss
    ``alone`` and on the ``encoder``.
    """
    batch = max(1, POSITIONS // length)
    model = model_of([]).to(device)
    torch.manual_seed(0)
    source = torch.randint(4, 17, (batch, length), device=device)
    target = torch.randint(4, 10, (batch, length), device=device)

    def step(roles: Sequence[str]) -> int:
        model.zero_grad()
        logits, extra = model(source, None, target, value_roles=roles)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())
        found = [values for role in roles for values, _ in extra["values"][role]]
        # As the criterion has it: equal Values of a shared layer's steps have one loss.
        losses = {id(values): orthogonality_loss(values) for values in found}
        (loss + torch.stack([losses[id(values)] for values in found]).sum() if found else loss).backward()
        return len(losses)

    computed = {"alone": step(ROLES), "encoder": step(["encoder"])}
    # As in attentions: heads are split off the width.
    projected = torch.randn(batch, length, 8, 16, device=device, requires_grad=True)

    def alone(times: int) -> list[Tensor]:
        return [
            torch.autograd.grad(orthogonality_loss(projected.transpose(1, 2)), [projected])[0] for _ in range(times)
        ]

    kinds = {"with": lambda: step(ROLES), "without": lambda: step([])}
    kinds |= {name: functools.partial(alone, times) for name, times in computed.items()}
    return interleaved(kinds, rounds, device)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default 5)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers into this file")
    parser.add_argument("--results", type=Path, metavar="FILE", help="also put the table into this file (RESULTS.md)")
    args = parser.parse_args(argv)
    as_in_training()
    rows, found = [], []
    for length in args.lengths:
        times = measure_share(length, args.rounds, args.device)
        medians = {name: quartiles(values)[1] for name, values in times.items()}
        share = medians["alone"] / (medians["without"] + medians["alone"])
        found.append({"length": length, "share": share, "medians": medians, "times": times})
        rows.append(
            (
                f"{length:,}",
                *(
                    "{1:.2f} [{0:.2f}, {2:.2f}]".format(*quartiles(times[name]))
                    for name in ("without", "with", "alone")
                ),
                f"{100 * share:.1f} %",
                f"{100 * medians['encoder'] / (medians['without'] + medians['encoder']):.1f} %",
                f"{100 * (1 - medians['without'] / medians['with']):.1f} %",
            )
        )
    text = (
        f"Forward and backward of SCAN's universal transformer (softmax attention, {POSITIONS:,} positions per side "
        f"of a batch, float32, one thread), milliseconds, median [quartiles] of {args.rounds} interleaved rounds. "
        "The share is the loss's own time in a step with it, on all nine attentions, or on the encoder's three "
        f"(the default). `python -m benchmarks.orthogonality_share --rounds {args.rounds}`; "
        f"{where(gpu=args.device == 'cuda')}."
    )
    header = ("length", "step without", "step with", "loss alone", "share", "encoder alone", "share by difference")
    publish(f"The orthogonality loss in a step ({args.device})", f"{text}\n\n{table(header, rows)}", args.results)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
