"""Checks of a training's options that need its task, model and trainer, before the first update."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from fairseq.dataclass.configs import CommonConfig
from fairseq.logging import metrics

from fairseq_sg.criterions.base import LayerLosses
from fairseq_sg.errors import UsageError
from fairseq_sg.tasks.causality import check_decoder

logger = logging.getLogger(__name__)
#: Metrics whose largest, and whose smallest, value is the best, by how their names begin.
LARGEST, SMALLEST = (
    ("accuracy", "token_accuracy", "bleu"),
    ("loss", "nll_loss", "ppl", "word_ppl", "bits_per_word", "bpc", "bpb", "mse", "relative_l2", "h1", "word_error",
     "mean_word_error"),
)  # fmt: skip


class TrainingChecks:
    """The part of ``SGTask`` with these checks."""

    def check_training(self, trainer) -> None:
        """Called before a checkpoint is looked for and before the first update (``resuming``).

        Raises UsageError for options that would end the training at its start or at its first validation, leave out
        losses of the model, keep the worst checkpoint, or draw other batches in a resumed training; and for a decoder
        with modules of the user's own that sees later words.
        """
        criterion = trainer.get_criterion()
        if self.emitted_losses and not isinstance(criterion, LayerLosses):
            raise UsageError(
                f"the model's layers have losses ({', '.join(sorted(self.emitted_losses))}), which this --criterion "
                "leaves out: choose --criterion cross_entropy_orthogonality"
            )
        if isinstance(criterion, LayerLosses):
            criterion.check_training(trainer.get_model())
        _check_precision(trainer)
        if self.target_dictionary is not None:
            check_decoder(trainer.get_model(), len(self.target_dictionary), trainer.device)
        self._check_batches(trainer.cfg.dataset)
        if getattr(self.cfg, "accuracy_by", None) == "types" and not self.breakdown.types:
            logger.warning("--accuracy-by types logs nothing more: the examples in %s have no types", self.cfg.data)
        if not trainer.cfg.dataset.disable_validation:
            self._check_metric(trainer)

    def _check_metric(self, trainer) -> None:
        """Raises UsageError for a ``--best-checkpoint-metric`` of which the worst is kept, or that is not measured."""
        cfg, data = trainer.cfg.checkpoint, trainer.cfg.dataset
        metric, largest = cfg.best_checkpoint_metric, cfg.maximize_best_checkpoint_metric
        if metric.startswith(SMALLEST if largest else LARGEST):
            change = (
                "leave --maximize-best-checkpoint-metric out" if largest else "add --maximize-best-checkpoint-metric"
            )
            raise UsageError(f"--best-checkpoint-metric {metric} would keep the worst checkpoint as the best: {change}")
        # fairseq reads it in the logs of every subset.
        for subset in data.valid_subset.split(",") if metric != "loss" else ():
            known = measured(trainer, subset)
            # Of the training set, types are not measured; of a part of a subset, not all.
            whole = subset != data.train_subset and data.max_valid_steps is None
            if metric not in known and metric not in (self.measured_by_type(subset, known) if whole else ()):
                raise UsageError(
                    f"--best-checkpoint-metric is {metric!r}, and a validation on {subset!r} measures "
                    f"{', '.join(known)}"
                )

    def _check_batches(self, cfg) -> None:
        """Raises UsageError for options with which a resumed training would have other batches."""
        # To fairseq's parser, the option of something that is on turns it off.
        if not getattr(self.cfg, "rebuild_batches", True):
            raise UsageError(
                "new batches each epoch are on, and --rebuild-batches would turn them off: a resumed training would "
                "have other batches. Leave the option out"
            )
        if cfg.update_ordered_indices_seed and not cfg.update_epoch_batch_itr:
            raise UsageError(
                "--update-ordered-indices-seed takes the epoch in which a training begins or is resumed: add "
                "--update-epoch-batch-itr True, or leave the option out"
            )
        if cfg.curriculum and not cfg.update_epoch_batch_itr:
            raise UsageError(
                "with --curriculum, fairseq keeps the order of the first epoch, and a resumed training has another: "
                "add --update-epoch-batch-itr True, or leave the option out"
            )

    def measured_by_type(self, subset: str, known: Sequence[str]) -> list[str]:
        """The metrics by type or group of a whole subset; the first batch, with ``known``, may lack some types."""
        breakdown = getattr(self, "breakdown", None)
        names = breakdown.names_in(subset) if breakdown is not None else []
        return [f"{metric}_{name}" for metric in ("accuracy", "word_error") if metric in known for name in names]


def measured(trainer, subset: str) -> list[str]:
    """The metrics that a validation logs, found with its first batch."""
    batch = next(trainer.get_valid_iterator(subset).next_epoch_itr(shuffle=False))
    with metrics.aggregate(new_root=True) as logged:
        trainer.valid_step(batch)
    return [name for name in logged.get_smoothed_values() if not name.startswith("_")]


def _check_precision(trainer) -> None:
    """Raises UsageError for half precision on a CPU, and for scales of the loss that fairseq gets wrong."""
    common = trainer.cfg.common
    for option in ("fp16", "amp") if not trainer.cuda else ():
        if common[option]:
            raise UsageError(
                f"fairseq trains with --{option} only on a GPU: leave it out, or choose --bf16, which is slow on a CPU"
            )
    if common.amp and (common.amp_scale_window is not None or common.amp_init_scale != CommonConfig.amp_init_scale):
        raise UsageError(
            "fairseq takes --amp-init-scale for the window, and only beside --amp-scale-window: leave both out. "
            "The first loss scale is --fp16-init-scale"
        )
    if common.fp16 and common.fp16_scale_window is None and len(trainer.cfg.optimization.update_freq) > 1:
        raise UsageError(
            "--fp16 with several values of --update-freq needs a window of its loss scale, which fairseq makes for "
            "one value: add --fp16-scale-window, such as 4096 updates"
        )
