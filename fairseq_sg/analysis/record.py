"""Recording what goes on inside a model: one pass with hooks on its attentions and updates.

    with torch.no_grad(), record(model) as recording:
        model(**inputs)
    recording.steps("encoder")[2].weights        # third application of the encoder's self-attention

A hook runs after a module, and calls its ``forward`` once more for weights and Values. The model's own outputs are
therefore the same bit for bit with and without the recording. (An attention that returns weights takes another path,
with other rounding.) Afterwards the hooks are removed, and the model is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_sg.modules.attention import ROLES, Attention, Context
from fairseq_sg.modules.normalization import NoNormalization
from fairseq_sg.modules.update import Update
from fairseq_sg.ops.precision import accumulation_dtype

#: The stages of a Query or Key: the projection, φ of it, and its normalization.
STAGES = ("projected", "mapped", "normalized")


@dataclass
class AttentionCall:
    """One application of an attention.

    Attributes:
        module: its name in the model. kind: the attention's name.
        role: encoder, decoder or cross.
        weights: (B, H, N, M), the attention matrix of every head.
        values: (B, H, M, E), the projected Values.
        norms: the 2-norms of Queries (B, H, N) and Keys (B, H, M), under ``query.STAGE`` and ``key.STAGE``:
            ``projected`` for every kind, ``mapped`` for kinds with a feature map, and ``normalized`` for what a
            normalization follows. With one, ``key.mapped`` is of what the normalization reads: φ(K) up to a positive
            factor a Key (``FeatureMap.keys_to_normalize``).
    """

    module: str
    kind: str
    role: str
    weights: Tensor
    values: Tensor
    norms: dict[str, Tensor]


@dataclass
class GateCall:
    """One application of a copy-gated update of a ``side``, encoder or decoder: gates (B, N, C)."""

    side: str
    gates: Tensor


@dataclass
class Recording:
    """The calls of one pass or several, in the order in which they were made."""

    attentions: list[AttentionCall] = field(default_factory=list)
    updates: list[GateCall] = field(default_factory=list)

    def steps(self, role: str) -> list[AttentionCall]:
        """The applications of the attention in a role: those of all layers, or all of a shared one."""
        return [call for call in self.attentions if call.role == role]

    def gates(self, side: str) -> list[GateCall]:
        return [call for call in self.updates if call.side == side]

    @property
    def roles(self) -> list[str]:
        """The roles that have attentions, in the order encoder, decoder, cross."""
        return [role for role in ROLES if self.steps(role)]


@contextmanager
def record(model: nn.Module) -> Iterator[Recording]:
    """Records full passes of ``model`` made inside the ``with`` block, however the block ends.

    Raises:
        ValueError: for a model in training mode, whose dropout would be drawn a second time; and from a pass with an
            ``incremental_state``, in which there are no weights.
    """
    if model.training:
        raise ValueError("record a model in evaluation mode: call model.eval() first")
    recording = Recording()
    handles = []
    try:
        for name, module in model.named_modules():
            if isinstance(module, Attention):
                handles.append(module.register_forward_hook(_attention_hook(name, recording)))
            elif isinstance(module, Update) and hasattr(module, "gates"):
                handles.append(module.register_forward_hook(_update_hook(name, recording)))
        yield recording
    finally:
        for handle in handles:
            handle.remove()


def _attention_hook(name: str, recording: Recording) -> Callable:
    def hook(module: Attention, args: tuple, output: Any) -> None:
        query, source, context = (*args, *(None, Context())[len(args) - 1 :])
        if context.state is not None:
            raise ValueError("record full passes: decoding step by step forms no attention weights")
        with torch.no_grad(), _norms_of(module) as norms:
            # Not module(...): this hook would be called again.
            again = module.forward(query, source, replace(context, return_weights=True, return_values=True))
        recording.attentions.append(
            AttentionCall(name, module.registered_name, module.role, again.weights, again.values.values, norms)
        )

    return hook


@contextmanager
def _norms_of(attention: Attention) -> Iterator[dict[str, Tensor]]:
    """The norms of the Queries and Keys of a pass made inside the ``with`` block."""
    norms: dict[str, Tensor] = {}
    handles = []

    def projected(name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, output: Tensor) -> None:
            heads = output.unflatten(-1, (attention.num_heads, -1)).permute(1, 2, 0, 3)
            norms[f"{name}.projected"] = _norm(heads)

        return hook

    def normalized(name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, output: Tensor) -> None:
            if hasattr(attention, "feature_map"):
                norms[f"{name}.mapped"] = _norm(args[0])
            if not isinstance(module, (NoNormalization, nn.Identity)):
                norms[f"{name}.normalized"] = _norm(output)

        return hook

    try:
        for name, letter in (("query", "q"), ("key", "k")):
            handles.append(getattr(attention, f"{letter}_proj").register_forward_hook(projected(name)))
            norm = getattr(attention, f"{letter}_norm", None)
            if norm is not None:
                handles.append(norm.register_forward_hook(normalized(name)))
        yield norms
    finally:
        for handle in handles:
            handle.remove()


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, dtype=accumulation_dtype(x))


def _update_hook(name: str, recording: Recording) -> Callable:
    def hook(module: Any, args: tuple, output: Any) -> None:
        with torch.no_grad():
            gates = module.gates(args[0])
        recording.updates.append(GateCall(name.partition(".")[0], gates.transpose(0, 1)))

    return hook
