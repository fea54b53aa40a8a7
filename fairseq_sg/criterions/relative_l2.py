"""``relative_l2``: relative errors of functions + the losses of layers (``base``), for ``--task sg_operator``.

    L = Σ_{functions} ‖û − u‖/‖u‖ + √(γ h) · e_1          a mean over functions once fairseq has divided it

    e_1 = ‖D û − u′‖ / ‖u′‖                               of functions with period 1, one dimension
    e_1 = ( mean a² |∇u − D û|² / (2 mean a |∇u|²) )^½    for −∇·(a ∇u) = f, two dimensions, over inner points

D are central differences, h is the distance of two points of the batch's own grid, γ is ``--h1-weight``. Both are the
losses of the code released with Cao 2021, where the first leaves out two points at the ends. γ is multiplied by h
before the root is taken: the same γ is another loss on another grid.

Logs, none of them in bits:

- ``loss``, all of it, and ``relative_l2``, the mean of ‖û − u‖/‖u‖;
- ``h1``, the mean of e_1, where γ is not 0 and the data have gradients;
- the model's other losses and shares of the loss, as ``base`` does.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq.criterions import register_criterion
from torch import Tensor

from fairseq_sg.criterions.base import LayerLosses, LayerLossesConfig
from fairseq_sg.errors import UsageError


@dataclass
class RelativeL2Config(LayerLossesConfig):
    h1_weight: float = field(
        default=0.0,
        metadata={
            "help": "γ of the error of derivatives, whose weight is √(γ h); 0 neither computes nor logs it",
            "least": 0,
        },
    )


def norms(f: Tensor) -> Tensor:
    """The Euclidean norm of every function, (B, …) -> (B,)."""
    return f.flatten(1).norm(dim=1)


def periodic_difference(u: Tensor, spacing: float) -> Tensor:
    """Central differences of functions with a period, (B, n) -> (B, n)."""
    return (u.roll(-1, 1) - u.roll(1, 1)) / (2 * spacing)


def inner_differences(u: Tensor, spacing: float) -> Tensor:
    """Central differences at inner points, (B, n, n) -> (B, n − 2, n − 2, 2): along rows, then along columns."""
    rows, columns = u[:, 2:, 1:-1] - u[:, :-2, 1:-1], u[:, 1:-1, 2:] - u[:, 1:-1, :-2]
    return torch.stack([rows, columns], dim=-1) / (2 * spacing)


def derivative_error(prediction: Tensor, gradient: Tensor, a: Tensor, spacing: float) -> Tensor:
    """e_1 of every function, (B,).

    Args:
        prediction: û (B, n) or (B, n, n). gradient: u′ (B, n) or ∇u (B, n, n, 2).
        a: the input, (B, n, n) where it is a coefficient. spacing: h.
    """
    if prediction.dim() == 2:
        return norms(periodic_difference(prediction, spacing) - gradient) / norms(gradient)
    gradient, a = gradient[:, 1:-1, 1:-1], a[:, 1:-1, 1:-1].to(gradient).unsqueeze(-1)
    # A norm has the gradient 0 where it is 0, and a root has none there. The numbers of points cancel.
    error = norms(a * (gradient - inner_differences(prediction, spacing)))
    return error / (2 * (a * gradient.square()).sum((1, 2, 3))).sqrt()


@register_criterion("relative_l2", dataclass=RelativeL2Config)
class RelativeL2(LayerLosses):
    """See the module's docstring. Raises UsageError for a task without functions, and for data without gradients."""

    paper = "Cao 2021"
    units = "loss and its shares (share_*), relative_l2 and h1, errors relative to the target's norm"

    def __init__(self, cfg: RelativeL2Config, task):
        super().__init__(cfg, task)
        if not hasattr(task, "fields"):
            raise UsageError("--criterion relative_l2 needs functions: choose --task sg_operator")
        self.h1_weight = cfg.h1_weight
        if cfg.h1_weight and not task.fields.gradient:
            raise UsageError("--h1-weight needs gradients of the targets, and the data folder has none: leave it out")

    def forward(self, model, sample, reduce=True):
        """Loss (summed over functions: fairseq's division by the sample size gives the mean), sample size, logs.

        The model returns predictions of the shape of ``target``, (B, m) or (B, m, m), float64.
        """
        prediction, extra = self._outputs(model, sample["net_input"])
        target, size = sample["target"], len(sample["target"])
        prediction = prediction.to(target)
        loss = error = (norms(prediction - target) / norms(target)).sum()
        logs: dict[str, Any] = {
            "relative_l2": error.detach(), "ntokens": sample["ntokens"], "nsentences": size, "sample_size": size,
        }  # fmt: skip
        if self.h1_weight:
            h = sample["spacing"]
            derivative = derivative_error(prediction, sample["gradient"], sample["net_input"]["a"], h).sum()
            loss = error + math.sqrt(self.h1_weight * h) * derivative
            logs["h1"], logs["share_h1"] = derivative.detach(), (loss - error).detach()
        return self.add_losses(loss, size, model, extra, logs), size, logs

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Logs the means over the functions of all workers and accumulated batches."""
        cls.log_means(logging_outputs, ("loss", "relative_l2", "h1"), "relative_l2")
