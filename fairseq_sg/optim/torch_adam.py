"""``--optimizer torch_adam``: torch's own fused AdamW behind fairseq's interface.

fairseq's ``adam`` updates one parameter after the other, with a dozen kernels each. For a small model on a GPU that is
a large part of a step. The update is Algorithm 1 of Kingma & Ba 2015, with decoupled weight decay (0 by default: Adam).
fairseq has the form at the end of their section 2, in which ε counts as ε / √(1 − β₂ᵗ) here. The two differ where
gradients are as small as ε.
"""

import ast
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer, register_optimizer
from omegaconf import II

from fairseq_sg.errors import UsageError

#: The defaults of β₁ and β₂.
BETAS = (0.9, 0.999)
#: Of ``--autocast``: products in the dtype of the weights.
NONE = "none"


@dataclass
class TorchAdamConfig(FairseqDataclass):
    adam_betas: Any = field(
        default=None,
        metadata={
            "help": "decay of the means of gradients and of squared gradients, as fairseq's adam takes them: "
            "'(0.9, 0.98)' (default: --adam-beta1 and --adam-beta2)",
            "least": 0,
            "below": 1,
        },
    )
    adam_beta1: float = field(
        default=BETAS[0], metadata={"help": "decay of the mean of gradients", "least": 0, "below": 1}
    )
    adam_beta2: float = field(
        default=BETAS[1], metadata={"help": "decay of the mean of squared gradients", "least": 0, "below": 1}
    )
    adam_eps: float = field(default=1e-8, metadata={"help": "epsilon of Adam", "above": 0})
    weight_decay: float = field(default=0.0, metadata={"help": "decoupled weight decay", "least": 0})
    step_graphs: int = field(
        default=0,
        metadata={
            "help": "most CUDA graphs of whole training steps, one per shape of batch (0: none); needs one GPU and "
            "float32",
            "least": 0,
        },
    )
    autocast: str = field(
        default=NONE,
        metadata={
            "help": "dtype of products in training, by torch.autocast. Weights and their gradients keep theirs",
            "choices": (NONE, "bfloat16"),
        },
    )
    lr: list[float] = II("optimization.lr")


def betas(cfg) -> tuple[float, float]:
    """β₁ and β₂ of a configuration. Raises UsageError for text that is no pair, and for options that contradict."""
    named = getattr(cfg, "adam_beta1", BETAS[0]), getattr(cfg, "adam_beta2", BETAS[1])  # fairseq's adam has the pair
    given = getattr(cfg, "adam_betas", None)  # older checkpoints have none
    if given is None:
        return named
    try:
        beta1, beta2 = map(float, ast.literal_eval(given) if isinstance(given, str) else given)
    except (ValueError, SyntaxError, TypeError):
        raise UsageError(f"--adam-betas is {given!r}: choose two numbers, such as '(0.9, 0.98)'") from None
    for name, beta, default, pair in zip(("--adam-beta1", "--adam-beta2"), named, BETAS, (beta1, beta2), strict=True):
        if beta not in (default, pair):
            raise UsageError(f"{name} is {beta}, and --adam-betas is {given}: leave one of the two out")
    return beta1, beta2


@register_optimizer("torch_adam", dataclass=TorchAdamConfig)
class TorchAdam(FairseqOptimizer):
    """torch.optim.AdamW(fused=True), with the norm of all gradients taken at once."""

    paper = "Kingma & Ba 2015, Algorithm 1; decoupled weight decay: Loshchilov & Hutter 2019"

    @staticmethod
    def check_options(cfg) -> None:
        """Raises UsageError for options that contradict each other, before data are loaded; ``cfg`` is the whole."""
        betas(cfg.optimizer)
        for other in ("fp16", "bf16", "amp") if getattr(cfg.optimizer, "autocast", NONE) != NONE else ():
            if cfg.common[other]:
                raise UsageError(f"--autocast and --{other} are two precisions: leave one of them out")
        if cfg.common.memory_efficient_fp16 or cfg.common.memory_efficient_bf16:
            raise UsageError(
                "torch_adam keeps its means in the precision of the parameters: with --memory-efficient-fp16 or "
                "--memory-efficient-bf16 choose --optimizer adam"
            )
        graphs = getattr(cfg.optimizer, "step_graphs", 0)
        if graphs and cfg.lr_scheduler._name == "reduce_lr_on_plateau":
            raise UsageError(
                "--step-graphs keeps the learning rate on the device, where --lr-scheduler reduce_lr_on_plateau does "
                "not find it: leave one of them out"
            )

    def __init__(self, cfg: TorchAdamConfig, params):
        super().__init__(cfg)
        self._optimizer = torch.optim.AdamW(list(params), fused=True, **self.optimizer_config)
        #: The learning rate on the device, () float32, where steps are recorded.
        self._rate: torch.Tensor | None = None

    @property
    def optimizer_config(self):
        lr = self.cfg.lr
        return {
            "lr": float(lr if isinstance(lr, (int, float)) else lr[0]),
            "betas": betas(self.cfg),
            "eps": self.cfg.adam_eps,
            "weight_decay": self.cfg.weight_decay,
        }

    def autocasting(self, criterion: Callable) -> Callable:
        """The criterion whose model multiplies in the dtype of ``--autocast``; a backward pass is not within it."""
        name = getattr(self.cfg, "autocast", NONE)  # older checkpoints lack it
        if name == NONE:
            return criterion

        def autocast(model, sample):
            # One copy of a weight for all its uses would add up their gradients in bfloat16.
            options = {"dtype": getattr(torch, name), "cache_enabled": False}
            with torch.autocast(next(model.parameters()).device.type, **options):
                return criterion(model, sample)

        return autocast

    # Steps that the host does not wait for.

    def skip_unless_finite(self, norm: torch.Tensor) -> None:
        """Makes the next ``step`` leave out its update if the norm of the gradients, (), is not finite."""
        self._optimizer.found_inf = torch.isfinite(norm).logical_not().float()

    def keep_rate_on(self, device: torch.device) -> None:
        """Keeps the learning rate in a tensor, so that a recorded step has that of each update."""
        if self._rate is None:
            self._known_rate = self.get_lr()
            self._rate = torch.full((), self._known_rate, device=device)
            for group in self.param_groups:
                group.update(lr=self._rate, capturable=True)
            # The first steps are not recorded, which torch would warn of.
            self._optimizer._warned_capturable_if_run_uncaptured = True

    def set_lr(self, lr: float) -> None:
        if self._rate is None:
            super().set_lr(lr)
        else:
            self._known_rate = lr
            self._rate.fill_(lr)

    def get_lr(self) -> float:
        return super().get_lr() if self._rate is None else self._known_rate

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self._rate is not None:
            for group in state["param_groups"]:
                group.update(lr=self._known_rate, capturable=False)
        return state

    @property
    def supports_flat_params(self) -> bool:
        """``--fp16`` hands over all parameters as one: Adam works on each number by itself."""
        return True

    def clip_grad_norm(self, max_norm, aggregate_norm_fn=None):
        if aggregate_norm_fn is not None:  # sharded parameters: fairseq knows how
            return super().clip_grad_norm(max_norm, aggregate_norm_fn)
        gradients = [p.grad for p in self.params if p.grad is not None]
        if not gradients:
            return torch.tensor(0.0)
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        if max_norm > 0:
            torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm
