"""Park & Kim 2024, Table 4: the models of the recipe beside a transcription of the paper, which shares no code with it.

The transcription takes sentences one by one, without padding, and writes attention as the sums of section 2.1. Layers,
embeddings and the output layer are those of Csordás et al. 2021, which the paper says it follows. Both train from the
same parameters on the same batches, without dropout, with Adam and clipped gradients.
"""

from __future__ import annotations

import math

import pytest

pytest.importorskip("fairseq")

import torch
import torch.nn.functional as F
from torch import Tensor

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg.experiments import recipe
from fairseq_sg.trainer import SGTrainer
from helpers.small_folders import random_pairs, write_folder
from helpers.trainers import build, groups

HEADS, STEPS, EPSILON, PADDING = 4, 3, 1e-6, 1
TABLE = recipe.read(recipe.find("park_kim_table_4"))


def normalized(x: Tensor, norm: str, gamma: Tensor | None) -> Tensor:
    """Section 4.1: x is the feature vector of one head."""
    if norm == "l1":
        return x / (x.abs().sum() + EPSILON)
    if norm == "l2":
        return x / ((x * x).sum().sqrt() + EPSILON)
    if norm == "rms":
        return x / ((x * x).mean().sqrt() + EPSILON) * gamma
    return x


def attention(p: dict[str, Tensor], name: str, norm: str, x: Tensor, source: Tensor, causal: bool):
    """Queries of x (N, C), Keys and Values of the source (M, C) -> outputs (N, C), and the Values of each head."""
    q, k, v = (of @ p[f"{name}.{part}_proj.weight"].T for of, part in ((x, "q"), (source, "k"), (source, "v")))
    outputs, values = [], []
    for head in range(HEADS):
        width = q.shape[1] // HEADS
        own = slice(head * width, (head + 1) * width)

        def features(row: Tensor, side: str, own: slice = own) -> Tensor:
            return normalized(F.elu(row[own]) + 1, norm, p.get(f"{name}.{side}_norm.weight"))

        queries, keys = [features(row, "q") for row in q], [features(row, "k") for row in k]
        rows = []
        for n, query in enumerate(queries):
            seen = range(n + 1 if causal else len(keys))
            weights = [query @ keys[i] for i in seen]
            rows.append(sum(w * v[i, own] for w, i in zip(weights, seen, strict=True)) / (sum(weights) + EPSILON))
        outputs.append(torch.stack(rows))
        values.append(v[:, own])
    return torch.cat(outputs, 1) @ p[f"{name}.out_proj.weight"].T, values


def not_orthogonal(values: Tensor) -> Tensor:
    """Section 4.2, of the Values (M, d) of a sentence."""
    unit = torch.stack([value / (value.norm() + EPSILON) for value in values])
    return (unit @ unit.T - torch.eye(len(unit))).square().sum()


def embedded(p: dict[str, Tensor], side: str, words: Tensor) -> Tensor:
    """Positions are scaled down by √C ("PED")."""
    width = p[f"{side}.embedding.tokens.weight"].shape[1]
    rows = []
    for position, word in enumerate(words):
        angle = [position / 10000 ** (2 * (j // 2) / width) for j in range(width)]
        wave = torch.tensor([math.cos(a) if j % 2 else math.sin(a) for j, a in enumerate(angle)])
        rows.append(p[f"{side}.embedding.tokens.weight"][word] + wave / math.sqrt(width))
    return torch.stack(rows)


def added(p: dict[str, Tensor], name: str, x: Tensor, y: Tensor) -> Tensor:
    return F.layer_norm(x + y, x.shape[1:], p[f"{name}.norm.weight"], p[f"{name}.norm.bias"])


def feedforward(p: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    hidden = F.relu(x @ p[f"{name}.ffn.fc1.weight"].T + p[f"{name}.ffn.fc1.bias"])
    return added(p, f"{name}.residual", x, hidden @ p[f"{name}.ffn.fc2.weight"].T + p[f"{name}.ffn.fc2.bias"])


def sentence(p: dict[str, Tensor], norm: str, source: Tensor, before: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits after each word of ``before``; the Values of each head in each of the encoder's steps."""
    encoder, decoder, found = "encoder.stack.layer", "decoder.stack.layer", []
    x = embedded(p, "encoder", source)
    for _ in range(STEPS):
        y, values = attention(p, f"{encoder}.self_attn", norm, x, x, causal=False)
        found += values
        x = feedforward(p, f"{encoder}.update", added(p, f"{encoder}.self_attn_residual", x, y))
    y = embedded(p, "decoder", before)
    for _ in range(STEPS):
        y = added(p, f"{decoder}.self_attn_residual", y, attention(p, f"{decoder}.self_attn", norm, y, y, True)[0])
        y = added(p, f"{decoder}.cross_attn_residual", y, attention(p, f"{decoder}.cross_attn", norm, y, x, False)[0])
        y = feedforward(p, f"{decoder}.update", y)
    return y @ p["decoder.embedding.tokens.weight"].T + p["decoder.output_bias"], found


def loss_of(p: dict[str, Tensor], norm: str, weight: float, batch: dict) -> Tensor:
    """The mean cross entropy of the words + λ · the sum over steps of the mean over sentences and heads."""
    words, orthogonality, inputs = [], [], batch["net_input"]
    for source, before, target in zip(inputs["src_tokens"], inputs["prev_output_tokens"], batch["target"], strict=True):
        real = target != PADDING
        logits, values = sentence(p, norm, source[source != PADDING], before[real])
        words.append(F.cross_entropy(logits, target[real], reduction="none"))
        orthogonality.append(sum(map(not_orthogonal, values)) / HEADS)
    return torch.cat(words).mean() + weight * sum(orthogonality) / len(orthogonality)


@pytest.mark.parametrize("row", [row for row in TABLE.trained if row.startswith("linear")])
def test_the_recipe_trains_what_the_paper_writes(row, tmp_path):
    folder = write_folder(tmp_path, {"train": random_pairs(12, 1), "valid": random_pairs(4, 2)})
    more = ["--dropout", "0", "--encoder-layers", str(STEPS), "--decoder-layers", str(STEPS), "--batch-size", "4"]
    # So that each part of the loss is seen in the gradients, and that they are clipped.
    weight = 0.03 if row.endswith("orthogonality") else 0.0
    more += ["--orthogonality-weight", str(weight), "--clip-norm", "1"]
    # With its own 1e-8, Adam makes updates of gradients that are nothing but rounding.
    more += ["--adam-eps", "1e-4"]
    trainer = build(SGTrainer, folder, *TABLE.arguments_of(row, "scan26"), *more)
    norm = row.removeprefix("linear").removesuffix("-orthogonality").removeprefix("-")
    named = dict(trainer.get_model().named_parameters())
    gammas = [parameter for name, parameter in named.items() if name.endswith(("q_norm.weight", "k_norm.weight"))]
    assert len(gammas) == (6 if norm == "rms" else 0)
    for gamma in gammas:
        torch.nn.init.uniform_(gamma, 0.5, 1.5)
    p = {name: parameter.detach().clone().requires_grad_() for name, parameter in named.items()}
    adam = torch.optim.Adam(p.values(), lr=1e-3, eps=1e-4)
    for batch in groups(trainer):
        logged = trainer.train_step(batch)
        loss = loss_of(p, norm, weight, batch[0])
        # The log has four digits, in bits.
        assert logged["loss"] == pytest.approx(loss.item() / math.log(2), abs=1e-4)
        adam.zero_grad()
        loss.backward()
        assert torch.nn.utils.clip_grad_norm_(p.values(), 1.0) > 1
        adam.step()
    for name, parameter in named.items():
        torch.testing.assert_close(parameter, p[name], rtol=0, atol=5e-6)
