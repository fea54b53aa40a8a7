"""The base class of the criteria: task loss + λ · orthogonality of the Values + other losses the model emits.

    L = L_task + λ Σ_{role, application} mean_{sentence, head} ‖V̄V̄ᵀ − I‖²_F          (Park & Kim 2024, section 4.2)

V̄ are the Values with unit rows. As in the paper (sections 5.2 to 5.4) the loss is on the encoder's self-attention;
``--orthogonality-roles`` has others. The paper leaves the rest open. Here it is on each head by itself, without
padding, as the mean over sentences and heads and the sum over the applications of the (shared) layer.

Logs:

- ``loss``, all of it, and ``nll_loss``, in bits as fairseq does;
- ``orthogonality_encoder`` and the like, before λ; every other loss by its name, as the sum over the applications,
  before ``--aux-loss-weights``; statistics by theirs, as the mean over the applications;
- ``accuracy``, the percentage of sentences that are right; ``token_accuracy``, that of tokens, where a sentence has
  several; the accuracy of groups of types, where sentences have types (``--accuracy-by`` of the task);
- shares of ``loss``, where it has several parts, in its unit and with their weights, so that they add up to it:
  ``share_nll``, ``share_label_smoothing`` (the difference to the cross entropy, perhaps negative),
  ``share_orthogonality_encoder`` and the like.
"""

import json
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from fairseq.criterions import FairseqCriterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from omegaconf import II
from torch import Tensor

from fairseq_sg.errors import UsageError
from fairseq_sg.modules.attention import ROLES
from fairseq_sg.modules.losses import AuxLosses, Statistic
from fairseq_sg.ops import orthogonality_loss
from fairseq_sg.registry import emitted_losses
from fairseq_sg.tasks.breakdown import log_breakdown, sums_of_logs

logger = logging.getLogger(__name__)

#: Names of numbers that criteria, tasks and fairseq log: a layer's loss or statistic has another.
LOGGED = frozenset(
    "loss nll_loss nll accuracy token_accuracy word_error mean_word_error ppl word_ppl bits_per_word bpc bpb bleu "
    "label_smoothing mse mse_last mse_last_mean relative_l2 h1 lr gnorm clip loss_scale wps ups wpb bsz num_updates "
    "wall train_wall gb_free".split()
) | {f"orthogonality_{role}" for role in ROLES}


@dataclass
class LayerLossesConfig(FairseqDataclass):
    orthogonality_weight: float = field(
        default=0.0,
        metadata={
            "help": "λ of the orthogonality loss on attention Values; 0 neither computes nor logs it",
            "least": 0,
        },
    )
    orthogonality_roles: str = field(
        default="encoder",
        metadata={"help": "attentions whose Values the loss is on: encoder, decoder, cross, comma separated"},
    )
    aux_loss_weights: str = field(
        default="{}",
        metadata={
            "help": "weights of other losses the model emits, by name, as JSON ('{\"name\": 0.01}'); where not named "
            "0.03 for ponder and 1 for others",
            "least": 0,
        },
    )


@dataclass
class SGCriterionConfig(LayerLossesConfig):
    label_smoothing: float = field(default=0.0, metadata={"help": "epsilon of label smoothing", "least": 0, "below": 1})
    sentence_avg: bool = II("optimization.sentence_avg")


class Score(NamedTuple):
    """The task's scores of a batch.

    Attributes:
        loss, nll: the loss and the cross entropy, both summed, in nats.
        right: (B,) bool, the sentences that are right.
        predictions: number of predictions, also () int64.
        tokens_right: () int64, number of right predictions where a sentence has several.
        of_each: the predictions and the right ones of every sentence, both (B,) int64, where accuracy by type counts
            them too.
    """

    loss: Tensor
    nll: Tensor
    right: Tensor
    predictions: int | Tensor
    tokens_right: Tensor | None = None
    of_each: tuple[Tensor, Tensor] | None = None


class LayerLosses(FairseqCriterion):
    """The losses that layers emit and the orthogonality loss of their Values, which a subclass adds to the task's loss.

    Raises UsageError for an option outside its choices.
    """

    paper = "orthogonality loss: Park & Kim 2024, 4.2"
    #: What is logged, and its units.
    units: str

    def __init__(self, cfg: LayerLossesConfig, task):
        super().__init__(task)
        self.orthogonality_weight = cfg.orthogonality_weight
        self.orthogonality_roles = cfg.orthogonality_roles
        roles = [role.strip() for role in cfg.orthogonality_roles.split(",")]
        for role in roles:
            if role not in ROLES:
                raise UsageError(f"--orthogonality-roles has {role!r}: choose from {', '.join(ROLES)}")
        #: The roles whose Values the orthogonality loss is on.
        self.value_roles = tuple(roles) if cfg.orthogonality_weight else ()
        self.aux_loss_weights = _json_weights(cfg.aux_loss_weights)
        #: Losses that the model declares, with their default weights; None for a model that declares none.
        self.declared: dict[str, float] | None = None
        #: Whether the model was seen: the tasks of this plugin show it, others do not until the first batch.
        self.knows_model = False
        if getattr(task, "emitted_losses", None) is not None:
            self._learn_losses(task.emitted_losses)

    @classmethod
    def build_criterion(cls, cfg, task) -> "LayerLosses":
        """Tells the user once a command what is logged."""
        criterion = cls(cfg, task)
        logger.info("units: %s", criterion.units)
        return criterion

    def _learn_losses(self, declared: dict[str, float] | None) -> None:
        """Checks ``--aux-loss-weights`` against the losses that a model declares, and logs the weights, once."""
        self.declared, self.knows_model = declared, True
        if declared is not None:
            self._check_names(declared)
        if declared:
            weights = ", ".join(f"{name} {self._weight(name):g}" for name in sorted(declared))
            logger.info("weights of the model's own losses (--aux-loss-weights): %s", weights)

    def _weight(self, name: str) -> float:
        """The weight of a loss of the model's: the user's, its mechanism's default, or 1."""
        return self.aux_loss_weights.get(name, (self.declared or {}).get(name, 1.0))

    def _check_names(self, emitted: Iterable[str]) -> None:
        """Raises UsageError for a weight of a loss that is not among those that the model emits."""
        unknown = sorted(set(self.aux_loss_weights) - set(emitted))
        if unknown:
            raise UsageError(
                f"--aux-loss-weights names {', '.join(unknown)}, which is none of the other losses that the model "
                f"emits ({', '.join(sorted(emitted)) or 'it emits none'}); orthogonality has --orthogonality-weight"
            )

    def add_losses(self, loss: Tensor, size: int, model, extra: dict[str, Any], logs: dict[str, Any]) -> Tensor:
        """A loss that is summed over ``size`` predictions, with the other losses of the model's output; completes
        ``logs``.
        """
        losses, statistics = split(extra.get("aux_losses") or {})
        if getattr(model, "training", True):
            self._check_emitted(losses, statistics)
        parts = self._orthogonality(extra) | self._auxiliary(losses)
        for name, (weight, value) in parts.items():
            share = weight * size * value
            loss = loss + share
            logs[f"aux_{name}"], logs[f"share_{name}"] = value.detach() * size, share.detach()
        for name, value in statistics.items():
            logs[f"stat_{name}"] = value.detach() * size
        logs["loss"] = loss.detach()
        return loss

    def check_training(self, model) -> None:
        """Raises UsageError for roles without a weight, and for roles that the model lacks."""
        if not self.value_roles and self.orthogonality_roles != LayerLossesConfig.orthogonality_roles:
            raise UsageError(
                "--orthogonality-roles has no effect without --orthogonality-weight: add the weight, or leave the "
                "roles out"
            )
        self._check_roles(model)

    def _check_roles(self, model) -> None:
        shown = getattr(model, "attention_roles", ())
        missing = [role for role in self.value_roles if role not in shown]
        if missing and not shown:
            raise UsageError(
                "--orthogonality-weight needs a model that shows its attentions' Values, such as --arch "
                "sg_transformer; with another model leave it out"
            )
        if missing:
            raise UsageError(
                f"--orthogonality-roles has {', '.join(missing)}: the model has {', '.join(shown)} alone; give "
                f"--orthogonality-roles {','.join(shown)}"
            )

    def _outputs(self, model, inputs):
        """The model's outputs, with Values where the orthogonality loss needs them."""
        if not self.knows_model:
            self._learn_losses(emitted_losses(model))
        if self.value_roles:
            self._check_roles(model)
            return model(**inputs, value_roles=self.value_roles)
        output, extra = model(**inputs)
        # Some of fairseq's models return None, or a tensor of attention.
        return output, extra if isinstance(extra, dict) else {}

    def _orthogonality(self, extra: dict[str, Any]) -> dict[str, tuple[float, Tensor]]:
        """name -> (λ, Σ over applications of mean_{sentence, head} ‖V̄V̄ᵀ − I‖²_F)."""
        known: dict[int, Tensor] = {}  # the steps of a shared cross-attention have the same Values
        result = {}
        for role in self.value_roles:
            applications = []
            for values, padding_mask in extra["values"][role]:
                if id(values) not in known:
                    known[id(values)] = orthogonality_loss(values, padding_mask=padding_mask)
                applications.append(known[id(values)])
            result[f"orthogonality_{role}"] = self.orthogonality_weight, torch.stack(applications).sum()
        return result

    def _check_emitted(self, losses: Iterable[str], statistics: Iterable[str]) -> None:
        """Checks the names of what a model emits in training. In evaluation some losses, such as those of mixtures of
        experts, are not computed.

        Raises:
            UsageError: a name that other numbers have in the logs, a loss that the model does not declare, or a weight
                of a loss that a model without declared losses does not emit.
        """
        if taken := sorted(LOGGED & {*losses, *statistics}):
            raise UsageError(
                f"a layer returns the loss or statistic {taken[0]}, which is the name of another number in the logs: "
                "rename it"
            )
        if self.declared is None:
            self._check_names(losses)
        elif undeclared := sorted(set(losses) - set(self.declared)):
            raise UsageError(
                f"a layer returns the loss {undeclared[0]}, which none declares: add it to emitted_losses of its "
                "class, with its weight"
            )

    def _auxiliary(self, emitted: AuxLosses) -> dict[str, tuple[float, Tensor]]:
        """name -> (weight, sum over the applications) of the losses that the model emits."""
        return {name: (self._weight(name), torch.stack(values).sum()) for name, values in emitted.items()}

    @staticmethod
    def log_losses(sums: dict[str, float], name: str, own: float, unit: float = 1.0) -> None:
        """Logs the other losses and statistics, and the shares of the loss, divided by ``unit``.

        ``own`` is the task's own part of the loss, whose share is ``share_NAME``.
        """
        size = sums["sample_size"]
        for prefix in ("aux_", "stat_"):
            for key in sorted(key for key in sums if key.startswith(prefix)):
                metrics.log_scalar(key[len(prefix) :], sums[key] / size, size, round=4)
        shares = {key: value for key, value in sorted(sums.items()) if key.startswith("share_")}
        for key, value in ({f"share_{name}": own} | shares if shares else {}).items():
            metrics.log_scalar(key, value / size / unit, size, round=4)

    @classmethod
    def log_means(cls, logging_outputs: list[dict[str, Any]], names: Sequence[str], own: str) -> None:
        """Logs the means of ``names`` over the samples of all workers and accumulated batches, and ``log_losses``.

        ``own`` is the name of the task's own part of the loss.
        """
        sums = sums_of_logs(logging_outputs)
        size = sums["sample_size"]
        if not size:
            return
        for name in names:
            if name in sums:
                metrics.log_scalar(name, sums[name] / size, size, round=6)
        cls.log_losses(sums, own, sums[own])

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """All logs are sums over sentences or predictions, so workers' logs may be added up."""
        return True


class SGCriterion(LayerLosses):
    """See the module's docstring; a subclass computes the task's loss (``score``).

    Raises UsageError for an option outside its choices.
    """

    #: The unit of a prediction, and the unit of each percentage that is logged.
    predicted = "token"
    percentages = "accuracy, % of sentences; token_accuracy, % of tokens"

    def __init__(self, cfg: SGCriterionConfig, task):
        super().__init__(cfg, task)
        self.sentence_avg = cfg.sentence_avg
        self.label_smoothing = cfg.label_smoothing

    @property
    def units(self) -> str:
        averaged = "sentence" if self.sentence_avg else self.predicted
        # No "accuracy" with a space behind it: that is what lines of accuracies are searched for by.
        return (
            f"loss and its shares (share_*), bits per {averaged}; nll_loss, bits per {self.predicted}; "
            f"{self.percentages}"
        )

    def score(self, logits: Tensor, sample: dict[str, Any]) -> Score:
        """The task's loss on a batch, label smoothing included."""
        raise NotImplementedError

    def forward(self, model, sample, reduce=True):
        """Loss (summed over predictions, so that fairseq's division by the sample size gives the mean), sample size,
        logs.
        """
        logits, extra = self._outputs(model, sample["net_input"])
        loss, nll, right, predictions, tokens_right, of_each = self.score(logits, sample)
        sentences = sample.get("nsentences", right.size(0))
        sample_size = sentences if self.sentence_avg else predictions
        logs: dict[str, Any] = {
            "nll_loss": nll.detach(),
            "ntokens": predictions,
            "nsentences": sentences,
            "sample_size": sample_size,
            "n_exact": right.sum(),
        }
        if tokens_right is not None:
            logs["n_tokens_right"] = tokens_right
        if self.label_smoothing > 0:
            logs["share_label_smoothing"] = (loss - nll).detach()
        # In training, a batch with types is one of a validation that fills a gap (see ``no_contribution``), and the
        # other workers' batches have none.
        if "type" in sample and not self.training:
            logs.update(self.task.breakdown.logs(sample["type"], right, of_each))
        return self.add_losses(loss, sample_size, model, extra, logs), sample_size, logs

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> dict[str, float]:
        """Logs the sums over all workers and accumulated batches, each by its own count; returns the sums."""
        sums = sums_of_logs(logging_outputs)
        sample_size, predictions, sentences = sums["sample_size"], sums["ntokens"], sums["nsentences"]
        if not sample_size or not predictions:
            return sums
        metrics.log_scalar("loss", sums["loss"] / sample_size / math.log(2), sample_size, round=4)
        metrics.log_scalar("nll_loss", sums["nll_loss"] / predictions / math.log(2), predictions, round=4)
        metrics.log_scalar("accuracy", 100.0 * sums["n_exact"] / sentences, sentences, round=4)
        if "n_tokens_right" in sums:
            metrics.log_scalar("token_accuracy", 100.0 * sums["n_tokens_right"] / predictions, predictions, round=4)
        log_breakdown(sums)
        cls.log_losses(sums, "nll", sums["nll_loss"], math.log(2))
        return sums


def split(emitted: AuxLosses) -> tuple[AuxLosses, dict[str, Tensor]]:
    """Losses as they are, and the mean of each statistic over the applications of layers."""
    watched = {name for name, values in emitted.items() if isinstance(values[0], Statistic)}
    losses = {name: values for name, values in emitted.items() if name not in watched}
    return losses, {name: torch.stack([s.value for s in emitted[name]]).float().mean() for name in sorted(watched)}


def _json_weights(text: str) -> dict[str, float]:
    try:
        weights = json.loads(text)
        return {str(name): float(weight) for name, weight in weights.items()}
    except (ValueError, TypeError, AttributeError):
        raise UsageError(f"--aux-loss-weights is {text!r}: it must be JSON like '{{\"name\": 0.01}}'") from None
