"""``--optimizer torch_adam``: torch's own fused AdamW behind fairseq's interface.

fairseq's ``adam`` updates one parameter after the other, a dozen kernels each: for a small model on a GPU that is a large part of a
step. The update is that of Algorithm 1 of Kingma & Ba 2015, with decoupled weight decay (0 by default: Adam). fairseq has the form
of the end of their section 2, which scales ε by √(1 − β₂ᵗ); the two differ where gradients are as small as ε.
"""

from dataclasses import dataclass, field
from typing import List

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer, register_optimizer
from omegaconf import II

from fairseq_sg.errors import UsageError


@dataclass
class TorchAdamConfig(FairseqDataclass):
    adam_beta1: float = field(default=0.9, metadata={"help": "decay of the mean of gradients"})
    adam_beta2: float = field(default=0.999, metadata={"help": "decay of the mean of squared gradients"})
    adam_eps: float = field(default=1e-8, metadata={"help": "epsilon of Adam"})
    weight_decay: float = field(default=0.0, metadata={"help": "decoupled weight decay"})
    lr: List[float] = II("optimization.lr")


@register_optimizer("torch_adam", dataclass=TorchAdamConfig)
class TorchAdam(FairseqOptimizer):
    """torch.optim.AdamW(fused=True), with the norm of all gradients taken at once."""

    def __init__(self, cfg: TorchAdamConfig, params):
        super().__init__(cfg)
        self._optimizer = torch.optim.AdamW(list(params), fused=True, **self.optimizer_config)

    @property
    def optimizer_config(self):
        lr = self.cfg.lr
        return {
            "lr": float(lr if isinstance(lr, (int, float)) else lr[0]),
            "betas": (self.cfg.adam_beta1, self.cfg.adam_beta2),
            "eps": self.cfg.adam_eps,
            "weight_decay": self.cfg.weight_decay,
        }

    @property
    def supports_memory_efficient_fp16(self) -> bool:
        # fairseq would end with the optimizer's name alone.
        raise UsageError(
            "torch_adam keeps its means in the precision of the parameters: with --memory-efficient-fp16 or "
            "--memory-efficient-bf16 choose --optimizer adam"
        )

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
