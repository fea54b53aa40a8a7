"""Models of each forward pass learn SCAN: a hundred steps, and the loss has fallen.

They are models that the recipe own_attentions compares, smaller.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import pytest

pytest.importorskip("fairseq")

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.data.data_utils import collate_tokens
from numpy.random import RandomState

from data_prep.scan.grammar import generate
from fairseq_sg.modules.attention import ATTENTION_REGISTRY
from fairseq_sg.modules.feature_maps import FEATURE_MAP_REGISTRY
from fairseq_sg.modules.position import POSITION_REGISTRY
from helpers.own_attentions import MODELS, build

#: Of other attentions, maps and positions, the tests of their parts hold that every parameter gets a gradient.
NAMES = [
    "softmax", "relative", "linear elu", "linear cosformer", "geometric", "compositional", "galerkin", "ndr + relative",
]  # fmt: skip

SMALL = "--encoder-embed-dim 32 --decoder-embed-dim 32 --encoder-ffn-embed-dim 64 --decoder-ffn-embed-dim 64".split()
SMALL += "--encoder-attention-heads 4 --decoder-attention-heads 4 --encoder-layers 1 --decoder-layers 1".split()
STEPS, BATCH = 100, 32


class Scan:
    """Commands of at most 6 actions, in batches with the end symbols and beginnings that the task gives them."""

    def __init__(self) -> None:
        pairs = [pair for pair in generate() if pair.target.count(" ") < 6]
        self.pairs = [pairs[i] for i in RandomState(0).permutation(len(pairs))]
        self.source_dictionary, self.target_dictionary = Dictionary(), Dictionary()
        for pair in self.pairs:
            self.source_dictionary.encode_line(pair.source)
            self.target_dictionary.encode_line(pair.target)
        self.cfg = SimpleNamespace(left_pad_target=False)

    @cache  # all models see the same batches
    def batch(self, step: int):
        pairs = [self.pairs[(step * BATCH + i) % len(self.pairs)] for i in range(BATCH)]
        sources = [self.source_dictionary.encode_line(p.source, add_if_not_exist=False).long() for p in pairs]
        targets = [self.target_dictionary.encode_line(p.target, add_if_not_exist=False).long() for p in pairs]
        collated = [collate_tokens(side, pad_idx=1, eos_idx=2) for side in (sources, targets)]
        return *collated, collate_tokens(targets, pad_idx=1, eos_idx=2, move_eos_to_beginning=True)


@pytest.fixture(scope="module")
def scan() -> Scan:
    return Scan()


@pytest.mark.parametrize("name", NAMES)
def test_learns(name, scan):
    torch.manual_seed(1)
    model, losses = build([*SMALL, *MODELS[name]], scan), []
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        source, target, previous = scan.batch(step)
        model.set_num_updates(step)
        logits = model(source, None, previous)[0]
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=1)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        losses.append(loss.item())
    begin, end = sum(losses[:5]) / 5, sum(losses[-20:]) / 20
    # Who knows of the source nothing, and of the target the word before, has at best 1.62; after so few steps, most
    # have 1.1.
    assert end < 1.55 and end < 0.7 * begin, f"from {begin:.2f} to {end:.2f}"


def test_the_recipe_compares_every_attention_feature_map_and_position():
    """But the defaults, maps without a denominator, and positions of constructions."""
    words = {word for arguments in MODELS.values() for word in arguments}
    words |= {"softmax", "sinusoidal", "mlp", "identity", "fraction", "indicator"}
    for registry in (ATTENTION_REGISTRY, FEATURE_MAP_REGISTRY, POSITION_REGISTRY):
        assert set(registry) <= words, registry.kind
