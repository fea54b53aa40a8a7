"""cosFormer (Qin et al. 2022): ReLU features, with weights that fall with the distance of the positions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fairseq_sg.errors import UsageError
from fairseq_sg.modules.feature_maps.base import FeatureMap, register_feature_map
from fairseq_sg.ops.precision import accurate


@dataclass
class CosformerOptions:
    cosformer_horizon: int | None = field(
        default=None,
        metadata={
            "help": "M of the cosformer feature map, which must be given: weights fall with the distance as "
            "cos(π(i−j)/2M), so it must be above every position of a source or a target, generated ones too; the "
            "smaller, the more local the attention",
            "least": 1,
        },
    )


@register_feature_map("cosformer")
class CosformerFeatureMap(FeatureMap):
    """φ(x, i) = [ReLU(x) sin(πi/2M), ReLU(x) cos(πi/2M)], F = 2D (Qin et al. 2022).

    So φ(q, i)·φ(k, j) = ReLU(q)·ReLU(k) cos(π(i − j)/2M), which is not negative for positions below M. In
    cross-attention i counts the target and j the source. The paper's M is the length of the batch; a weight that
    changes with a batch's padding cannot be decoded step by step, so M is fixed here.

    Args:
        cosformer_horizon: M.

    Raises:
        UsageError: no M, one below 1, or later a position that reaches it.
    """

    paper = "Qin et al. 2022"
    options = CosformerOptions
    needs_positions = True
    may_vanish = True

    def __init__(self, head_dim: int, *, cosformer_horizon: int | None = None):
        super().__init__(head_dim)
        if cosformer_horizon is None or cosformer_horizon < 1:
            raise UsageError(
                f"--cosformer-horizon is {cosformer_horizon}: "
                "--feature-map cosformer needs a number above every position"
            )
        self.features = 2 * head_dim
        self.horizon = self.longest = cosformer_horizon

    def queries(self, q: Tensor, positions: Tensor) -> Tensor:
        return self(q, positions)

    def keys(self, k: Tensor, positions: Tensor) -> Tensor:
        return self(k, positions)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = accurate(x).relu()
        angle = positions.to(x.dtype).mul(math.pi / (2 * self.horizon)).unsqueeze(-1)
        return torch.cat([x * angle.sin(), x * angle.cos()], dim=-1)

    def check_positions(self, positions: Tensor, below: int) -> None:
        # The positions are on the device: the host reads them only where the length alone does not decide.
        if below > self.horizon and int(positions.max()) >= self.horizon:
            raise UsageError(
                f"a position reaches --cosformer-horizon {self.horizon} in a sequence of {below}: train with a larger "
                "one, or leave longer sequences out (in generation: --max-len-b)"
            )
