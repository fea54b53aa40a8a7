"""What masks, de-allocation and sharpness do to a memory, without any training (Csordás 2023, section 2.2).

    python scripts/dnc_mechanics.py
    python scripts/dnc_mechanics.py --draws 1000

Three tables in seconds, from the operators of a differentiable neural computer alone (``fairseq_sg.ops.memory``):

    sharpness       links that were blurred by writes which are not one-hot, followed from the first cell to the last
    de-allocation   one key that was written twice: what a look-up finds and reads after the first cell was freed
    masks           a look-up by half of a word, whose other half is unknown
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fairseq_sg.ops import memory as ops

CELLS = 16
STRENGTH = 10.0  # β of a look-up
SHARPNESS = 5.0


def signs(*shape: int) -> Tensor:
    """Random bits as ±1."""
    return torch.randint(0, 2, shape).double() * 2 - 1


def blur(noise: float, length: int, sharpened: bool, draws: int) -> tuple[list[float], list[float]]:
    """Cells 0, 1, … are written with weights (1 − η) · one-hot + η · noise, then links are followed from cell 0.

    Returns the weight on the right cell after every step, and its share of all weights, which sum to less than 1
    without sharpness; both as means over draws.
    """
    uniform = torch.distributions.Dirichlet(torch.ones(CELLS, dtype=torch.float64))
    links, precedence = torch.zeros(draws, CELLS, CELLS).double(), torch.zeros(draws, CELLS).double()
    for cell in range(length):
        one = torch.nn.functional.one_hot(torch.tensor(cell), CELLS).double()
        links, precedence = ops.links(links, precedence, (1 - noise) * one + noise * uniform.sample((draws,)))
    at = torch.zeros(draws, 1, CELLS).double()
    at[:, :, 0] = 1.0
    power = torch.full((draws, 1), SHARPNESS, dtype=torch.float64)
    weights, shares = [], []
    for cell in range(1, length):
        at, _ = ops.follow(links, at, *((power, power) if sharpened else ()))
        weights.append(at[:, 0, cell].mean().item())
        shares.append((at[:, 0, cell] / at[:, 0].sum(1)).mean().item())
    return weights, shares


def alias(kept: float | None, draws: int, bits: int = 8) -> tuple[float, float, float]:
    """Cells 0 and 1 have the same key and other values; cell 0 is freed: with a retention of ``kept``, or, for None, as
    in a plain DNC, which keeps its content.

    Returns the weights of a look-up by the key on the stale and on the fresh cell, and the number of wrong bits in the
    value that is read.
    """
    memory = signs(draws, CELLS, 2 * bits)
    memory[:, 0, :bits] = memory[:, 1, :bits]
    if kept is not None:
        psi = torch.ones(draws, CELLS, dtype=torch.float64)
        psi[:, 0] = kept
        nothing = torch.zeros(draws, CELLS).double()
        memory = ops.write(memory, nothing, memory[:, 0] * 0, memory[:, 0] * 0, psi)
    key = torch.cat([memory[:, 1, :bits], torch.zeros(draws, bits).double()], 1)[:, None]
    weights = ops.content_weights(memory, key, torch.full((draws, 1), STRENGTH, dtype=torch.float64))
    value = ops.read(memory, weights)[:, 0, bits:]
    wrong = (value.sign() != memory[:, 1, bits:]).sum(1).double().mean()
    return weights[:, 0, 0].mean().item(), weights[:, 0, 1].mean().item(), wrong.item()


def look_up(key_bits: int, value_bits: int, masked: bool, silent: bool, draws: int) -> tuple[float, float]:
    """A look-up by the key of a word; the value half of the query is random, or, if ``silent``, 0.

    Returns the weight on the right cell, and the share of queries whose value is read without a wrong bit.
    """
    memory = signs(draws, CELLS, key_bits + value_bits)
    unknown = torch.zeros(draws, value_bits).double() if silent else signs(draws, value_bits)
    query = torch.cat([memory[:, 0, :key_bits], unknown], 1)[:, None]
    mask = torch.cat([torch.ones(draws, 1, key_bits), torch.zeros(draws, 1, value_bits)], 2).double()
    strength = torch.full((draws, 1), STRENGTH, dtype=torch.float64)
    weights = ops.content_weights(memory, query, strength, mask if masked else None)
    read = ops.read(memory, weights)[:, 0, key_bits:]
    right = (read.sign() == memory[:, 0, key_bits:]).all(1).double().mean()
    return weights[:, 0, 0].mean().item(), right.item()


def tables(draws: int) -> Iterator[str]:
    """The lines of all three tables."""
    yield f"sharpness: weight on the right cell of {CELLS}, after the first step and after the last one"
    yield f"{'noise':>7}{'cells written':>15}{'plain':>15}{'its share':>15}{f'S, s = {SHARPNESS:g}':>15}"
    for noise in (0.05, 0.1):
        for length in (8, 14):
            (plain, share), (sharp, _) = (blur(noise, length, how, draws) for how in (False, True))
            cells = "".join(f"{f'{x[0]:.2f} … {x[-1]:.2f}':>15}" for x in (plain, share, sharp))
            yield f"{noise:7}{length:15}{cells}"
    yield ""
    yield "de-allocation: one key with two values, of which the first was freed"
    yield f"{'':>16}{'weight, stale':>15}{'weight, fresh':>15}{'wrong bits of 8':>17}"
    for name, kept in (("plain", None), ("D, ψ = 0.1", 0.1), ("D, ψ = 1e-6", 1e-6), ("D, ψ = 1e-8", 1e-8)):
        stale, fresh, wrong = alias(kept, draws)
        yield f"{name:>16}{stale:15.2f}{fresh:15.2f}{wrong:17.2f}"
    yield ""
    yield f"masks: a look-up by the key among {CELLS} words; weight on the right cell, and values without a wrong bit"
    yield f"{'key + value bits':>18}{'rest of the query':>20}{'plain':>14}{'M':>14}"
    for key_bits, value_bits in ((8, 8), (4, 28)):
        for silent in (False, True):
            cells = ""
            for masked in (False, True):
                weight, right = look_up(key_bits, value_bits, masked, silent, draws)
                cells += f"{f'{weight:.2f}, {100 * right:.0f} %':>14}"
            yield f"{f'{key_bits} + {value_bits}':>18}{'0' if silent else 'random':>20}{cells}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1000, metavar="N", help="random memories a number (default: 1000)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of the draws (default: 1)")
    args = parser.parse_args(arguments)
    if args.draws < 1:
        parser.error(f"--draws is {args.draws}: choose 1 or more")
    torch.manual_seed(args.seed)
    print(*tables(args.draws), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
