"""``regression``: squared errors of numbers + the losses of layers (``base``), for ``--task sg_regression``.

    L = Σ_{prompts} mean_{loops, points} (ŷ − y)² / unit          a mean over prompts once fairseq has divided it

The unit is that of the class of functions (``dataset.json``), n for linear ones. A looped model predicts after every
loop. ``--loop-loss all`` trains every prediction with the same weight, ``last`` that of the last loop alone.

Logs, none of them in bits:

- ``loss``, all of it, and ``mse``, L;
- ``mse_last``, the error of the query's prediction after the last loop;
- ``mse_last_mean``, that error as the mean over the loops;
- the model's other losses and shares of the loss, as ``base`` does; ``share_mse`` is that of L.
"""

from dataclasses import dataclass, field
from typing import Any

from fairseq.criterions import register_criterion

from fairseq_sg import ranges
from fairseq_sg.criterions.base import LayerLosses, LayerLossesConfig
from fairseq_sg.errors import UsageError
from fairseq_sg.modules.depth import DEPTH_REGISTRY


@dataclass
class RegressionConfig(LayerLossesConfig):
    loop_loss: str = field(
        default="all",
        metadata={
            "help": "predictions of a looped model that the loss is on: those of 'all' loops, or of the 'last'",
            "choices": ("all", "last"),
        },
    )


@register_criterion("regression", dataclass=RegressionConfig)
class Regression(LayerLosses):
    """See the module's docstring. Raises UsageError for a task without numbers, and for an unknown choice."""

    def __init__(self, cfg: RegressionConfig, task):
        super().__init__(cfg, task)
        if not hasattr(task, "unit"):
            raise UsageError("--criterion regression needs numbers: choose --task sg_regression")
        ranges.check(RegressionConfig, {"loop_loss": cfg.loop_loss})
        self.unit, self.loop_loss = task.unit, cfg.loop_loss

    def check_training(self, model) -> None:
        """Also raises UsageError for --loop-loss last without loops."""
        super().check_training(model)
        if self.loop_loss == "last" and model.config.depth not in DEPTH_REGISTRY.with_option("loops"):
            raise UsageError("--loop-loss last is for a model with loops: add --depth looped, or leave it out")

    @property
    def units(self) -> str:
        return f"loss, its shares (share_*) and mse*, squared error divided by {self.unit:g}"

    def forward(self, model, sample, reduce=True):
        """Loss (summed over prompts, so that fairseq's division by the sample size gives the mean), sample size, logs.

        The model returns predictions (loops, B, P) for the ``target`` (B, P).
        """
        predictions, extra = self._outputs(model, sample["net_input"])
        errors = (predictions - sample["target"]).square() / self.unit  # (loops, B, P), float64 as the target is
        loss = (errors if self.loop_loss == "all" else errors[-1:]).mean((0, 2)).sum()
        size = errors.size(1)
        logs: dict[str, Any] = {
            "mse": loss.detach(),
            "mse_last": errors[-1, :, -1].detach().sum(),
            "mse_last_mean": errors[:, :, -1].detach().mean(0).sum(),
            "ntokens": sample["ntokens"],
            "nsentences": size,
            "sample_size": size,
        }
        return self.add_losses(loss, size, model, extra, logs), size, logs

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Logs the means over the prompts of all workers and accumulated batches."""
        cls.log_means(logging_outputs, ("loss", "mse", "mse_last", "mse_last_mean"), "mse")
