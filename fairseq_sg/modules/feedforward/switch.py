"""The Switch Transformer's mixture (Fedus et al. 2022; Csordás 2023, section 7.3), without a limit to experts' loads.

    s = softmax(W₃ x),  the K experts of the largest s with weights s[e]; K = 1 in the original
    L = γ N_E f · p,  f the share of tokens that an expert gets, p the mean of s over the batch    (7.14 – 7.16)

The thesis's table 7.4 has it with and without standard dropout (``--moe-dropout``).
"""

from __future__ import annotations

import torch

from fairseq_sg.modules.feedforward.base import register_feedforward
from fairseq_sg.modules.feedforward.moe import MixtureOfExperts, sum_of_real, top_k
from fairseq_sg.modules.feedforward.workers import sum_over_workers


@register_feedforward("switch")
class Switch(MixtureOfExperts):
    """See the module's docstring, and `MixtureOfExperts`."""

    paper = "Fedus et al. 2022; Csordás 2023, 7.3"
    loss_name = "expert_balance"
    default_k = 1
    default_init = "switch"
    default_regularization = 0.01

    def select(self, logits, real):
        return top_k(logits.softmax(-1), self.k, self.kept(logits))

    def balance(self, logits, chosen, routing, real):
        selections = routing.counts.to(logits.dtype)
        sums = sum_over_workers(torch.cat([sum_of_real(logits.softmax(-1), real), selections]))
        p, f = sums.view(2, -1)
        # Every token selects K experts, so that there are Σ f / K tokens.
        tokens = (f.sum() / self.k).clamp_min(1.0)
        return self.experts * (f / tokens * (p / tokens)).sum()  # `@` would be in half precision under autocast
