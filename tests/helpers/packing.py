"""Training on packed batches beside training on padded ones."""

from __future__ import annotations

import torch

from fairseq_sg.models import decoder, encoder
from fairseq_sg.modules.cpu.packing import Packing
from fairseq_sg.modules.losses import Statistic
from fairseq_sg.ops import orthogonality_loss


def pack_by(monkeypatch, pack) -> None:
    """From now on, ``pack`` makes the packing of a batch from its padding mask."""
    for module in (decoder, encoder):
        monkeypatch.setattr(module, "packing_for_training", pack)


def together(model, run, real, monkeypatch):
    """Outputs at real positions, losses, gradients of a packed and of a padded pass; how many batches were packed."""
    packed = []

    def watched(mask):
        packed.append(Packing(mask))
        return packed[-1]

    found = []
    for pack in (watched, lambda mask: None):
        pack_by(monkeypatch, pack)
        model.zero_grad()
        torch.manual_seed(3)
        out, extra = run()
        out = out if real is None else out[real]
        losses = {
            name: torch.stack([x.value if isinstance(x, Statistic) else x for x in values])
            for name, values in extra["aux_losses"].items()
        }
        for role, values in extra["values"].items():
            losses[role] = torch.stack([orthogonality_loss(v, padding_mask=mask) for v, mask in values])
        trained = [losses[role].sum() for role in extra["values"]]
        trained += [
            losses[name].sum() for name, values in extra["aux_losses"].items() if not isinstance(values[0], Statistic)
        ]
        torch.manual_seed(4)
        (sum(trained) + (out * torch.randn(out.shape, dtype=out.dtype)).sum()).backward()
        found.append((out.detach(), losses, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    return *found, len(packed)


def assert_equal(packed, padded):
    torch.testing.assert_close(packed[0], padded[0])
    for ours, reference in zip(packed[1:], padded[1:]):
        assert ours.keys() == reference.keys()
        for name in reference:
            torch.testing.assert_close(ours[name], reference[name], msg=lambda text, name=name: f"{name}: {text}")
