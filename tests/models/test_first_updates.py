"""The first losses of trainings with every mechanism, pinned.

Results are repeated with today's code only while a seed gives the same start, the same draws and the same outputs. If
you mean to change one, write the new losses here, and train again what ``results/`` has of the mechanism.
"""

from __future__ import annotations

import pytest

pytest.importorskip("fairseq")

import torch
import torch.nn.functional as F

from fairseq_sg.models.sg_dnc import SGDNC
from fairseq_sg.models.sg_encoder import SGEncoder
from fairseq_sg.models.sg_lstm import SGLSTM
from fairseq_sg.models.sg_transformer import SGTransformer
from fairseq_sg.models.sg_transformer_lm import SGTransformerLM
from fairseq_sg.modules.feedforward import FEEDFORWARD_REGISTRY
from helpers.models import FFN_OPTIONS, MODELS, MORE, PAD, build, pair

LANGUAGE = {"pre_norm": True, "linear_init": "depth"}
MEMORY = {"memory_cells": 4, "memory_width": 3, "read_heads": 2, "controller_dim": 5, "embed_dim": 4}

#: name -> the model and its options
TRAININGS = {
    **{name: (SGTransformer, options | MORE.get(name, {})) for name, options in MODELS.items()},
    **{
        f"language model {name}": (SGTransformerLM, LANGUAGE | {"decoder_ffn": name} | FFN_OPTIONS.get(name, {}))
        for name in sorted(FEEDFORWARD_REGISTRY)
    },
    "classifier": (SGEncoder, {}),
    "classifier lstm": (SGLSTM, {"embed_dim": 6, "hidden_dim": 8}),
    "classifier dnc": (SGDNC, MEMORY | {"memory_variant": "dnc"}),
    "classifier mds": (SGDNC, MEMORY | {"memory_variant": "mds"}),
}

#: name -> the losses before the first and the third update
LOSSES = {
    "attention abs_rel": (2.70802, 1.66157),
    "attention compositional": (2.35051, 1.48153),
    "attention fourier": (3.28289, 1.96609),
    "attention galerkin": (3.27694, 2.02273),
    "attention geometric": (2.51533, 1.64153),
    "attention linear": (2.90971, 1.91701),
    "attention relative": (2.56611, 1.80802),
    "attention softmax": (2.89866, 1.84221),
    "feature map cosformer": (3.05882, 1.82226),
    "feature map dpfp": (2.63729, 2.31124),
    "feature map elu": (2.90971, 1.91701),
    "feature map exp": (2.96438, 1.90296),
    "feature map hedgehog": (2.99068, 1.89951),
    "feature map identity": (3.49939, 2.74434),
    "feature map mlp": (2.37868, 1.92295),
    "feature map performer": (3.19730, 1.95883),
    "feature map rebased": (2.71107, 1.95319),
    "feature map relu": (3.05981, 1.82119),
    "feature map squared": (2.93210, 1.72650),
    "feature map t2r": (2.80856, 2.00470),
    "feature map taylor": (2.90502, 1.78269),
    "norm l1": (2.83732, 1.78208),
    "norm l2": (2.82456, 1.79222),
    "norm rms": (2.82456, 1.79233),
    "position alibi": (3.19094, 2.01424),
    "position fraction": (2.12784, 1.61787),
    "position indicator": (2.89789, 1.84777),
    "position learned": (2.26790, 2.00101),
    "position none": (3.20282, 2.02212),
    "position randomized": (3.25402, 1.82959),
    "position rotary": (3.12143, 2.04190),
    "position sinusoidal": (2.89866, 1.84221),
    "position t5": (2.46044, 1.58638),
    "feedforward dense": (2.89866, 1.84221),
    "feedforward noisy_topk": (3.38636, 1.77640),
    "feedforward pkm": (3.53734, 2.06408),
    "feedforward s_base": (3.14927, 1.80530),
    "feedforward sigma_moe": (3.32019, 1.61328),
    "feedforward switch": (3.39115, 1.73298),
    "feedforward topk": (2.96718, 1.70064),
    "update copy_gate": (1.93827, 1.88034),
    "update feedforward_only": (3.14224, 2.26451),
    "update residual": (2.89866, 1.84221),
    "depth looped": (2.48919, 1.94525),
    "depth separate": (2.89866, 1.84221),
    "depth shared": (2.53007, 1.85041),
    "depth shared_act": (2.07830, 1.62918),
    "pre-norm": (2.85172, 1.84622),
    "router": (2.53747, 1.79071),
    "language model dense": (2.23100, 1.73834),
    "language model noisy_topk": (2.48182, 2.04605),
    "language model pkm": (2.38028, 1.99615),
    "language model s_base": (2.47270, 2.06021),
    "language model sigma_moe": (2.44374, 2.01384),
    "language model switch": (2.47568, 2.05471),
    "language model topk": (2.21535, 1.79467),
    "classifier": (1.21226, 0.55878),
    "classifier lstm": (1.08699, 1.08243),
    "classifier dnc": (1.21608, 1.19518),
    "classifier mds": (0.99500, 0.98077),
}


def losses(name: str) -> list[float]:
    kind, options = TRAININGS[name]
    model = build(kind, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    source, target = pair()
    found = []
    for _ in range(3):
        if kind is SGTransformer:
            logits = model(source, None, target)[0]
        else:
            logits = model(target if kind is SGTransformerLM else source)[0]
        if kind in (SGTransformer, SGTransformerLM):
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD)
        else:
            loss = F.cross_entropy(logits, torch.arange(3))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return [found[0], found[2]]


@pytest.mark.parametrize("name", TRAININGS)
def test_first_losses(name):
    found = losses(name)
    assert name in LOSSES, f"the losses of a new training: {found}"
    assert found == pytest.approx(LOSSES[name], rel=1e-4)


def test_every_pinned_training_is_repeated():
    assert LOSSES.keys() <= TRAININGS.keys()
