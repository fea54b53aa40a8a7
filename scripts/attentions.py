"""SCAN by length: all kinds of attention, feature map and position in one universal transformer with one budget.

    python scripts/attentions.py                                   # at the size and length of the papers: for a GPU
    python -m data_prep scan --split length --cutoff 8 --out data-bin/scan8
    python scripts/attentions.py --small --data data-bin/scan8 --steps 1000 --no-generation
    python scripts/attentions.py --models "softmax alibi,softmax rotary" --seeds 1,2,3

Options, files and commands are those of ``scripts/quickstart.py``; only the models differ. ``--results PREFIX`` also
writes the table to PREFIX.md. ``benchmarks/attention.py`` measures speed and memory of a step.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import quickstart  # noqa: E402
from runs import end  # noqa: E402


def everywhere(kind: str, *options: str) -> list[str]:
    """Options for an attention in every role."""
    return [*self_attention(kind), "--cross-attention", kind, *options]


def self_attention(kind: str, *options: str) -> list[str]:
    """Options for an attention within a sequence; cross-attention stays softmax."""
    return ["--encoder-attention", kind, "--decoder-attention", kind, *options]


#: Compared feature maps. Quadratic ones have the narrower Queries and Keys that their authors recommend.
MAPS: dict[str, list[str]] = {
    **{name: [] for name in ("elu", "relu", "squared", "exp", "performer", "hedgehog", "t2r", "dpfp")},
    "cosformer": ["--cosformer-horizon", "64"],
    "taylor": ["--feature-dim", "sqrt"],
    "rebased": ["--feature-dim", "sqrt"],
}
POSITIONS = ("learned", "none", "rotary", "alibi", "t5")
#: The longest sentence has 49 tokens. Positions are drawn from eight times as many, with equal spacing in evaluation.
RANDOMIZED = ["--position", "randomized", "--randomized-range", "512", "--randomized-eval-length", "64"]

MODELS: dict[str, list[str]] = {
    "softmax": [],
    "log-length": ["--logit-scale", "log_length"],
    **{f"softmax {name}": ["--position", name] for name in POSITIONS},
    "relative": self_attention("relative"),
    "softmax randomized": RANDOMIZED,
    "relative randomized": self_attention("relative", *RANDOMIZED, "--randomized-base", "relative"),
    "abs_rel": self_attention("abs_rel"),
    "geometric": self_attention("geometric"),
    "compositional": everywhere("compositional"),
    "galerkin": everywhere("galerkin"),
    "fourier": everywhere("fourier"),
    **{f"linear {name}": everywhere("linear", "--feature-map", name, *more) for name, more in MAPS.items()},
    "linear rotary": everywhere("linear", "--position", "rotary"),
    "relative + linear": [
        *("--encoder-attention", "relative", "--decoder-attention", "linear", "--cross-attention", "linear"),
    ],
    "ndr + relative": [
        *("--encoder-attention", "geometric", "--encoder-update", "copy_gate", "--decoder-attention", "relative"),
    ],
}


#: ``--small``: half the width and twice the learning rate, for a first comparison on a CPU.
SMALL = [
    *("--encoder-embed-dim", "64", "--encoder-ffn-embed-dim", "128", "--encoder-attention-heads", "4"),
    *("--decoder-embed-dim", "64", "--decoder-ffn-embed-dim", "128", "--decoder-attention-heads", "4"),
    *("--lr", "2e-3"),
]


def build(arguments: list[str], task: Any) -> Any:
    """Builds SCAN's universal transformer from ``arguments`` of a ``fairseq-train`` command, in training mode.

    ``task`` has a ``source_dictionary``, a ``target_dictionary``, and a ``cfg`` with ``left_pad_target``.
    """
    from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

    import fairseq_sg.plugin  # noqa: F401

    parser = argparse.ArgumentParser(allow_abbrev=False)
    ARCH_MODEL_REGISTRY["sg_transformer_scan"].add_args(parser)
    cfg = parser.parse_args(["--depth", "shared", *arguments])
    ARCH_CONFIG_REGISTRY["sg_transformer_scan"](cfg)
    return ARCH_MODEL_REGISTRY["sg_transformer_scan"].build_model(cfg, task).train()


COMPARISON = quickstart.Comparison(MODELS, __doc__, "runs/attentions", small=SMALL)

if __name__ == "__main__":
    end(quickstart.main, COMPARISON)
