"""Packing: real positions and back, and their derivatives."""

from __future__ import annotations

import pytest
import torch

from fairseq_sg.modules.cpu.packing import WORTHWHILE, Packing, packing_for_training

MASKS = {
    "right": [[0, 0, 0], [0, 1, 1]],
    "left": [[0, 0, 0], [1, 1, 0]],
    "inside": [[0, 1, 0], [0, 0, 1]],
    "row": [[1, 1, 1], [0, 0, 1]],
    "none": [[0, 0, 0], [0, 0, 0]],
    "one": [[0]],
}
masks = pytest.mark.parametrize("mask", [torch.tensor(m).bool() for m in MASKS.values()], ids=MASKS)


@masks
def test_real_positions_in_their_order_and_zeros_at_padding(mask):
    packing = Packing(mask)
    x = torch.randn(mask.size(1), mask.size(0), 4)
    real = ~mask.t()
    packed = packing.pack(x)
    assert packed.shape == (int(real.sum()), 1, 4)
    assert torch.equal(packed[:, 0], x[real])
    assert torch.equal(packing.unpack(packed), torch.where(real.unsqueeze(-1), x, 0))
    assert torch.equal(packing.unpack_batch_first(packed), torch.where(real.unsqueeze(-1), x, 0).transpose(0, 1))


@masks
def test_derivatives(mask):
    packing = Packing(mask)
    x = torch.randn(mask.size(1), mask.size(0), 2, dtype=torch.float64, requires_grad=True)
    packed = packing.pack(x).detach().requires_grad_()
    assert torch.autograd.gradcheck(packing.pack, x)
    assert torch.autograd.gradgradcheck(packing.pack, x)
    for unpack in (packing.unpack, packing.unpack_batch_first):
        assert torch.autograd.gradcheck(unpack, packed)


@masks
@pytest.mark.parametrize("batch_first", [False, True])
def test_a_packed_nan_stays_in_its_place(mask, batch_first):
    """Padding reads a row of a real position and must not keep anything of it."""
    packing = Packing(mask)
    unpack = packing.unpack_batch_first if batch_first else packing.unpack
    unpacked = unpack(torch.full((packing.index.numel(), 1, 2), torch.nan))
    real = ~mask if batch_first else ~mask.t()
    assert torch.equal(unpacked.isnan().all(-1), real)


def test_a_batch_without_the_padding_stays_whole():
    length = 20
    for padded, packs in ((0, False), (1, False), (round(WORTHWHILE * length) + 1, True), (length, False)):
        mask = torch.zeros(1, length, dtype=torch.bool)
        mask[0, :padded] = True
        assert (packing_for_training(mask) is not None) == packs, padded


def test_other_devices_stay_whole():
    assert packing_for_training(torch.ones(2, 3, dtype=torch.bool, device="meta")) is None
