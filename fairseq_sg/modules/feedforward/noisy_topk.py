"""The sparsely gated mixture of Shazeer et al. 2017 (Csordás 2023, section 7.3): noisy top-K gating.

    z = W₃ x + N(0, 1) · softplus(W₄ x) in training, W₃ x otherwise, the noise drawn for each token and expert
    the K experts of the largest z, with weights that are the softmax of these K
    L = γ CV(Σ_x s(x))²,  s(x) the weights of x, 0 where not selected                  (7.13)

CV = σ/μ is the coefficient of variation over the experts. (The thesis prints μ/σ, which would reward imbalance, and no
square; both are as in the original here. The original adds the same loss of the experts' numbers of tokens, which the
thesis leaves out.) W₄ starts at 0, so that the noise starts with standard deviation log 2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fairseq_sg.errors import UsageError
from fairseq_sg.modules.feedforward.base import register_feedforward
from fairseq_sg.modules.feedforward.moe import MixtureOfExperts, batch_mean, softmax_of_top_k


@register_feedforward("noisy_topk")
class NoisyTopK(MixtureOfExperts):
    """See the module's docstring, and `MixtureOfExperts`. UsageError in training with K = 1."""

    paper = "Shazeer et al. 2017; Csordás 2023, 7.3"
    loss_name = "expert_load"
    default_regularization = 0.1

    def __init__(self, dim: int, ffn_dim: int, **kwargs):
        super().__init__(dim, ffn_dim, **kwargs)
        self.w4 = nn.Parameter(torch.zeros(self.experts, dim))

    def logits(self, x):
        logits = super().logits(x)
        if not self.training:
            return logits
        return logits + torch.randn_like(logits) * F.softplus(self._float_linear(x, self.w4))

    def plain_logits(self, x, logits):
        return super().logits(x)

    def select(self, logits, real):
        if self.training and self.k == 1:
            raise UsageError(
                "--moe-k 1 leaves the selection of noisy_topk without a gradient, as the softmax of one logit is 1: "
                "choose 2 or more"
            )
        return softmax_of_top_k(logits, self.k, self.kept(logits))

    def balance(self, logits, chosen, routing, real):
        importance = batch_mean(torch.zeros_like(logits).scatter(1, chosen.experts, chosen.weights), real)
        # The ε of the original keeps a batch without a token from dividing 0 by 0.
        return importance.var(correction=0) / (importance.mean().square() + 1e-10)
