"""``--lr-scheduler one_cycle``: the learning rate rises once and falls once, in cosines (Smith & Topin 2018).

    update t = 0, …, T − 1         lr/s  →  lr  →  lr/(s e)                with T = --max-update
    β₁ of Adam                     0.95  →  0.85  →  0.95

The numbers are those of ``torch.optim.lr_scheduler.OneCycleLR``, update by update, β₁ included. The rise ends at
t = share · T − 1. PyTorch has s = 25; Cao 2021 has s = e = 10⁴, the defaults here, and a share of 0.2 or 0.3.
"""

import math
from dataclasses import dataclass, field

from fairseq.dataclass import FairseqDataclass
from fairseq.optim.lr_scheduler import FairseqLRScheduler, register_lr_scheduler
from omegaconf import II

from fairseq_sg.errors import UsageError
from fairseq_sg.optim.torch_adam import BETAS, betas

#: β₁ at the start and the end, and at the peak of the learning rate.
OUTER_BETA1, PEAK_BETA1 = 0.95, 0.85


@dataclass
class OneCycleConfig(FairseqDataclass):
    one_cycle_rise: float = field(
        default=0.3, metadata={"help": "share of the updates in which the learning rate rises", "above": 0, "below": 1}
    )
    one_cycle_start: float = field(
        default=1e4, metadata={"help": "s: the learning rate begins at --lr / s", "least": 1}
    )
    one_cycle_end: float = field(
        default=1e4, metadata={"help": "e: the learning rate ends at --lr / (s e)", "least": 1}
    )
    one_cycle_constant_beta1: bool = field(
        default=False, metadata={"help": "leave Adam's β₁ as it is; otherwise it goes from 0.95 to 0.85 and back"}
    )
    lr: list[float] = II("optimization.lr")
    max_update: int = II("optimization.max_update")


def cosine(start: float, end: float, share: float) -> float:
    """From ``start`` at share 0 to ``end`` at share 1."""
    return end + (start - end) / 2 * (1 + math.cos(math.pi * share))


@register_lr_scheduler("one_cycle", dataclass=OneCycleConfig)
class OneCycle(FairseqLRScheduler):
    """See the module's docstring.

    Raises:
        UsageError: an optimizer without β₁.
    """

    paper = "Smith & Topin 2018"

    def __init__(self, cfg: OneCycleConfig, optimizer):
        super().__init__(cfg, optimizer)
        self.peak = cfg.lr[0]
        self.last = cfg.max_update - 1
        #: The update of the peak; below 0 for a rise of less than one update.
        self.top = cfg.one_cycle_rise * cfg.max_update - 1
        self.cycles_beta1 = not cfg.one_cycle_constant_beta1
        if self.cycles_beta1 and not all("betas" in group for group in optimizer.param_groups):
            raise UsageError(
                "--lr-scheduler one_cycle cycles Adam's β₁, and this --optimizer has none: choose torch_adam, or give "
                "--one-cycle-constant-beta1"
            )
        self.step_update(0)

    @staticmethod
    def check_options(cfg) -> None:
        """Raises UsageError for a missing or contradictory option, before data are loaded; ``cfg`` is the whole."""
        if cfg.optimization.max_update < 1:
            raise UsageError("--lr-scheduler one_cycle needs the number of updates: give --max-update")
        if len(rates := cfg.optimization.lr) > 1:
            raise UsageError(f"--lr-scheduler one_cycle has one peak, and --lr is {list(rates)}: give one")
        if cfg.lr_scheduler.one_cycle_constant_beta1:
            return
        if hasattr(cfg.optimizer, "adam_betas") and (given := betas(cfg.optimizer)[0]) != BETAS[0]:
            raise UsageError(
                f"--lr-scheduler one_cycle cycles Adam's β₁, so {given} has no effect: give "
                "--one-cycle-constant-beta1, or leave out --adam-beta1 and --adam-betas"
            )
        if getattr(cfg.optimizer, "step_graphs", 0):
            raise UsageError(
                "--lr-scheduler one_cycle changes Adam's β₁ at each update, and --step-graphs records it once: give "
                "--one-cycle-constant-beta1, or leave --step-graphs out"
            )

    def between(self, outer: float, peak: float, end: float, update: int) -> float:
        """The value at an update of what goes from ``outer`` to ``peak`` and then to ``end``."""
        if update <= self.top:
            return cosine(outer, peak, update / self.top) if self.top > 0 else peak
        return cosine(peak, end, (min(update, self.last) - self.top) / (self.last - self.top))

    def step_update(self, num_updates: int) -> float:
        """Sets the learning rate and β₁ for the update after ``num_updates`` of them; returns the learning rate."""
        start = self.peak / self.cfg.one_cycle_start
        lr = self.between(start, self.peak, start / self.cfg.one_cycle_end, num_updates)
        self.optimizer.set_lr(lr)
        if self.cycles_beta1:
            beta1 = self.between(OUTER_BETA1, PEAK_BETA1, OUTER_BETA1, num_updates)
            for group in self.optimizer.param_groups:
                group["betas"] = (beta1, *group["betas"][1:])
        return lr
