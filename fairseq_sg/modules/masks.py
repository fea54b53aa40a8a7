"""Masks on the weights of a trained network: which weights does a function need? (Csordás et al. 2021, section 2)

The weights w are frozen, and every masked weight has a logit l. Training samples masks (`fairseq_sg.ops.masking`) and
minimizes

    L(w · b) + α Σ l

(`MaskTraining`). L is the network's loss on data that need the function alone. α Σ l pulls down logits that L does not
hold up. The final mask is 1(l > 0).

Names of parameters are those of ``named_parameters``: a shared layer or a tied table has one name, one mask, and all
its uses. Any ``nn.Module`` can be masked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fairseq_sg.ops.masking import logistic_noise, masked_weight
from fairseq_sg.ops.precision import accumulation_dtype

#: name of a parameter -> bool, True where a weight is kept
Masks = Mapping[str, Tensor]
#: Choices of parameters (`select`) beside regular expressions.
CHOICES = ("weights", "reference", "all")


class WeightMasks(nn.Module):
    """The logits of the masks on some parameters of a network.

    All logits are one vector, so that a step has one draw and one update, whatever the number of tensors.

    Args:
        parameters: by name; they are copied and not changed.
        initial: the logit that all weights start with: 2 (P(b = 1) = 0.88) as in the released code, or 2.197 (0.9) as
            in the paper.

    Raises:
        ValueError: there are no parameters, or they differ in dtype or device.
    """

    weights: Tensor

    def __init__(self, parameters: Mapping[str, Tensor], initial: float = 2.0):
        super().__init__()
        if len({(p.dtype, p.device) for p in parameters.values()}) != 1:
            raise ValueError("masks need one parameter or more, all of one dtype and on one device")
        self.shapes = {name: p.shape for name, p in parameters.items()}
        flat = torch.cat([p.detach().flatten() for p in parameters.values()])  # (n,)
        self.register_buffer("weights", flat, persistent=False)
        self.logits = nn.Parameter(torch.full_like(flat, initial, dtype=accumulation_dtype(flat)))  # (n,)

    def draw(self, generator: torch.Generator | None = None) -> Tensor:
        """The noise of one sample, (n,)."""
        logits = self.logits
        return logistic_noise(logits.shape, generator=generator, dtype=logits.dtype, device=logits.device)

    def sample(self, noise: Tensor) -> dict[str, Tensor]:
        """The masked weights w · b of one sample, by name; their gradient goes to the logits alone."""
        return self.named(masked_weight(self.weights, self.logits, noise))

    def penalty(self) -> Tensor:
        """Σ l. It is a sum of logits, not of probabilities: logits of weights that are not needed sink all the time."""
        return self.logits.sum()

    def threshold(self) -> dict[str, Tensor]:
        """The final masks."""
        return final_masks(self.named(self.logits.detach()))

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Cuts a vector (n,) into tensors of the parameters' shapes."""
        parts = flat.split([shape.numel() for shape in self.shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}


class MaskTraining:
    """Adam on the logits, from samples of the masks (Csordás 2023, section 3.1 and appendix B.3.2).

    The model is frozen and in evaluation mode, without dropout, from here on.

    Args:
        model: the network.
        masks: their weights are those of ``model``.
        alpha: α of the penalty.
        lr: learning rate.
        clip: maximum norm of the gradient of all logits, 0 for none.
        seed: of the samples.
    """

    def __init__(
        self,
        model: nn.Module,
        masks: WeightMasks,
        *,
        alpha: float,
        lr: float = 1e-2,
        clip: float = 1.0,
        seed: int = 1,
    ):
        self.model = model.eval().requires_grad_(False)
        self.masks = masks
        self.alpha, self.clip = alpha, clip
        self.optimizer = torch.optim.Adam([masks.logits], lr=lr, fused=True)
        self.generator = torch.Generator(masks.logits.device).manual_seed(seed)
        self.steps = 0

    def step(self, losses: Iterable[Callable[[], Tensor]]) -> float:
        """One update; returns the task's loss.

        Every one of ``losses`` runs the model with a sample of its own. Their sum is L: each is the share of one part
        of the batch.
        """
        self.optimizer.zero_grad()
        (self.alpha * self.masks.penalty()).backward()
        found = 0.0
        for loss in losses:
            weights = self.masks.sample(self.masks.draw(self.generator))
            with replaced(self.model, weights), _differentiable(self.model):
                share = loss()
                share.backward()
            found += float(share.detach())
        if self.clip:
            nn.utils.clip_grad_norm_([self.masks.logits], self.clip)
        self.optimizer.step()
        self.steps += 1
        return found

    def state_dict(self) -> dict[str, Any]:
        """What an interrupted training resumes from, bit for bit."""
        return {
            "logits": self.masks.logits.detach(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "steps": self.steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with torch.no_grad():
            self.masks.logits.copy_(state["logits"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.steps = state["steps"]


def _differentiable(model: nn.Module) -> AbstractContextManager:
    """cuDNN has no gradient of recurrent layers in evaluation mode; torch has."""
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    return torch.backends.cudnn.flags(enabled=False) if recurrent else nullcontext()


def _role(module: nn.Module) -> str:
    """ "table" or "norm" for a module whose parameters are no weights, else "". Those that are not torch's have an
    attribute ``mask_as``.
    """
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "table"
    if isinstance(module, (nn.LayerNorm, nn.GroupNorm)):
        return "norm"
    return getattr(module, "mask_as", "")


def select(model: nn.Module, which: str = "weights") -> list[str]:
    """The names of the parameters to mask.

    ``weights``     those of two dimensions or more, without biases, norms, and tables of words and positions
    ``reference``   these, and gains and biases of layer norms: what the released code masks in transformers
    ``all``         all but tables
    other           a regular expression that is searched for in the names of all parameters

    Raises ValueError for a wrong regular expression, and where no parameter is found.
    """
    found: dict[str, set[int]] = {"table": set(), "norm": set(), "": set()}
    for module in model.modules():
        found[_role(module)].update(map(id, module.parameters(recurse=False)))
    tables, norms = found["table"], found["norm"]

    def chosen(name: str, parameter: Tensor) -> bool:
        if which not in CHOICES:
            return re.search(which, name) is not None
        if id(parameter) in tables:
            return False
        if id(parameter) in norms:
            return which in ("reference", "all")
        return which == "all" or (parameter.dim() > 1 and "bias" not in name.rpartition(".")[2])

    try:
        names = [name for name, parameter in model.named_parameters() if chosen(name, parameter)]
    except re.error as error:
        raise ValueError(f"{which!r} is no regular expression: {error}") from None
    if not names:
        raise ValueError(f"no parameter matches {which!r}: choose {', '.join(CHOICES)}, or a part of a name")
    return names


@contextmanager
def replaced(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Runs the model with other tensors instead of its parameters, inside the ``with`` block.

    A parameter is replaced wherever the model uses it. Gradients reach the tensors.

    Raises KeyError for a name that the model does not have.
    """
    parameters = dict(model.named_parameters())
    new = {id(parameters[name]): tensor for name, tensor in weights.items()}
    before = []
    try:
        for module in model.modules():
            for attribute, parameter in module._parameters.items():
                if id(parameter) in new:
                    before.append((module, attribute, parameter))
                    _set(module, attribute, new[id(parameter)])
        yield
    finally:
        for module, attribute, parameter in before:
            _set(module, attribute, parameter)


def _set(module: nn.Module, attribute: str, tensor: Tensor) -> None:
    module._parameters[attribute] = tensor  # type: ignore[assignment]
    if isinstance(module, nn.RNNBase):
        # torch's recurrent layers compute with this list of their parameters.
        module._flat_weights[module._flat_weights_names.index(attribute)] = tensor


def masked(model: nn.Module, masks: Masks) -> dict[str, Tensor]:
    """The weights of a model, by name, with 0 where a mask is False; the masks may be on another device."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {name: weights[name].masked_fill(~mask.to(weights[name].device), 0.0) for name, mask in masks.items()}


def final_masks(logits: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """1(l > 0) of logits by name."""
    return {name: values > 0 for name, values in logits.items()}


def inverted(masks: Masks) -> dict[str, Tensor]:
    """Keeps what the masks remove, and removes what they keep."""
    return {name: ~mask for name, mask in masks.items()}


def random_like(masks: Masks, generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """Random masks that keep as many weights of each tensor; the generator is on the CPU."""
    found = {}
    for name, mask in masks.items():
        order = torch.randperm(mask.numel(), generator=generator).to(mask.device)
        found[name] = mask.flatten()[order].view(mask.shape)
    return found


class Overlap(NamedTuple):
    """Two masks A and B on n weights.

    Attributes:
        first, second: |A|, |B|.
        common: |A ∩ B|.
        chance: E|A ∩ B| = |A| |B| / n for random masks of the same sizes, summed over tensors.
    """

    first: int
    second: int
    common: int
    chance: float

    @property
    def iou(self) -> float:
        """|A ∩ B| / |A ∪ B|; 0 for two empty masks."""
        return _ratio(self.common, self.first + self.second - self.common)

    @property
    def iomin(self) -> float:
        """|A ∩ B| / min(|A|, |B|); 0 if one is empty."""
        return _ratio(self.common, min(self.first, self.second))

    @property
    def chance_iou(self) -> float:
        """The intersection over union at the intersection of random masks."""
        return _ratio(self.chance, self.first + self.second - self.chance)

    @property
    def chance_iomin(self) -> float:
        return _ratio(self.chance, min(self.first, self.second))


def overlap(one: Tensor, other: Tensor) -> Overlap:
    """Compares two masks of one tensor. Raises ValueError for masks of different shapes."""
    if one.shape != other.shape:
        raise ValueError(f"masks of different shapes: {tuple(one.shape)} and {tuple(other.shape)}")
    first, second, common = (int(mask.sum()) for mask in (one, other, one & other))
    return Overlap(first, second, common, _ratio(first * second, one.numel()))


def total(parts: Mapping[str, Overlap]) -> Overlap:
    """The overlap over several tensors."""
    first, second, common, chance = zip(*parts.values(), strict=True)
    return Overlap(sum(first), sum(second), sum(common), sum(chance))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
