"""Decoding step by step, as beam search does it."""

from __future__ import annotations

import torch
from torch import Tensor

from helpers.models import PAD

#: Step -> the rows that survive before it: repeated, dropped and exchanged.
ORDERS = {1: torch.tensor([1, 0, 0]), 3: torch.tensor([2, 2, 1, 0]), 4: torch.tensor([3, 1])}


def assert_steps_equal_full_passes(model, source: Tensor, prefix: Tensor, words: int, steps: int, **tolerances) -> None:
    """Decodes random words after ``prefix``, and compares each step with a full pass over all words so far.

    Encoder output and decoding state are reordered between the steps, by ``ORDERS``.

    Args:
        source: (2, S) words.
        prefix: (2, 1), begin symbols; padding where a sentence begins later (--left-pad-target).
        words: the number of words of the target's dictionary, without its special ones.
    """
    encoder_out, state = model.encoder(source, None), {}
    torch.manual_seed(1)
    with torch.no_grad():
        for step in range(steps):
            if step in ORDERS:
                order = ORDERS[step]
                prefix, source = prefix[order], source[order]
                encoder_out = model.encoder.reorder_encoder_out(encoder_out, order)
                model.decoder.reorder_incremental_state_scripting(state, order)
            logits = model.decoder(prefix, encoder_out, incremental_state=state)[0]
            full = model(source, None, prefix)[0][:, -1:]
            real = prefix[:, -1].ne(PAD)
            torch.testing.assert_close(
                logits[real], full[real], **tolerances, msg=lambda text, step=step: f"step {step}: {text}"
            )
            prefix = torch.cat([prefix, torch.randint(4, 4 + words, (len(prefix), 1))], dim=1)
