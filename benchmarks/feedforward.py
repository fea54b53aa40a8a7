"""Time and memory of σ-MoE by number of experts, beside dense layers with as many parameters or FLOPs.

    python -m benchmarks.feedforward                       # 16 to 128 experts, on the GPU if there is one
    python -m benchmarks.feedforward --device cpu --tokens 2048 --rounds 5

The size of an expert and the number of experts per token are fixed, so the work per token is too. Times are medians of
interleaved rounds, forward and backward. Compare them as ratios.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

from benchmarks.measure import as_in_training, kept_activations, medians, peak_memory
from benchmarks.report import publish, table, where
from fairseq_sg.modules.feedforward import DenseFeedForward, SigmaMoE

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def layers_of(experts: int, size: int, k: int, dim: int) -> dict[str, nn.Module]:
    """The mixture, and dense layers with its parameters and with its FLOPs (without the selection)."""
    return {
        "sigma_moe": SigmaMoE(dim, experts * size, moe_experts=experts, moe_k=k, moe_expert_dropout=0.0),
        "dense, same parameters": DenseFeedForward(dim, experts * size),
        "dense, same FLOPs": DenseFeedForward(dim, k * size),
    }


def rows(args: argparse.Namespace) -> list[tuple[str, ...]]:
    """One row per layer: microseconds and bytes per token, and both as multiples of the dense
    layer with as many FLOPs.
    """
    torch.manual_seed(0)
    dtype = DTYPES[args.dtype]
    x = torch.randn(args.tokens, args.dim, device=args.device, dtype=dtype, requires_grad=True)
    grad = torch.randn_like(x)
    steps, kept, peaks, sizes = {}, {}, {}, {}
    for experts in args.experts:
        for name, layer in layers_of(experts, args.size, args.k, args.dim).items():
            if name == "dense, same FLOPs" and experts != args.experts[0]:
                continue
            layer = layer.to(args.device, dtype).train()

            def run(layer=layer) -> torch.Tensor:
                y, emitted = layer(x, return_losses=True)
                losses = [value for value in emitted.values() if torch.is_tensor(value)]
                return torch.stack([(y.float() * grad).sum(), *losses]).sum()

            def step(layer=layer, run=run) -> None:
                layer.zero_grad()
                run().backward()

            key = name if name == "dense, same FLOPs" else f"{name}, N_E = {experts}"
            kept[key] = kept_activations(layer, run)
            step()  # allocates the gradients
            peaks[key] = peak_memory(step, args.device) if args.device == "cuda" else None
            sizes[key] = sum(p.numel() for p in layer.parameters())
            steps[key] = step
    times = medians(steps, args.rounds, args.device)
    base = "dense, same FLOPs"
    found = []
    for key in sorted(steps, key=lambda key: (key != base, key.split(",")[0] != "sigma_moe")):
        memory = (f"{kept[key] / args.tokens:,.0f}", f"{kept[key] / kept[base]:.2f}")
        if peaks[key] is not None:
            memory += (f"{peaks[key] / 1e6:,.0f}",)
        time = (f"{1000 * times[key] / args.tokens:.2f}", f"{times[key] / times[base]:.2f}")
        found.append((key, f"{sizes[key]:,}", *time, *memory))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, nargs="+", default=[16, 32, 64, 128], help="numbers of experts")
    parser.add_argument("--size", type=int, default=128, help="hidden units per expert, G (default 128)")
    parser.add_argument("--k", type=int, default=4, help="experts per token, K (default 4)")
    parser.add_argument("--dim", type=int, default=512, help="d_model (default 512)")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens per batch (default 8192)")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32", help="of weights and activations")
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds (default 10)")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU (default 1)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--results", type=Path, metavar="FILE", help="also put the table into this file (RESULTS.md)")
    args = parser.parse_args()
    as_in_training(args.threads)
    header = ("layer", "parameters", "µs/token", "times", "bytes kept/token", "times")
    if args.device == "cuda":
        header += ("peak MB",)
    text = (
        f"Forward and backward of one feedforward layer, {args.tokens:,} tokens of width {args.dim}, experts of "
        f"{args.size} units, {args.k} per token, {args.dtype}, {args.threads} thread(s) of the CPU; median of "
        f"{args.rounds} interleaved rounds. 'Kept' is memory that autograd keeps for the backward pass, without "
        "weights; 'times' are multiples of the dense layer with as many FLOPs. "
    )
    experts = " ".join(map(str, args.experts))
    command = (
        f"`python -m benchmarks.feedforward --device {args.device} --experts {experts} --size {args.size} "
        f"--k {args.k} --dim {args.dim} --tokens {args.tokens} --dtype {args.dtype} --rounds {args.rounds}`"
    )
    machine = where(gpu=args.device == "cuda")
    title = f"Feedforward layers by experts, width {args.dim:,} ({args.device}, {args.dtype})"
    publish(title, f"{text}{command}; {machine}.\n\n{table(header, rows(args))}", args.results)


if __name__ == "__main__":
    main()
