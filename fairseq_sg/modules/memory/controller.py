"""The base class of controllers: the network that sees the input and the last reads, and steers the memory."""

from __future__ import annotations

from torch import Tensor, nn

from fairseq_sg.registry import Mechanism, Registry

CONTROLLER_REGISTRY = Registry("controller", "--controller")
register_controller = CONTROLLER_REGISTRY.register
#: What a controller remembers from step to step.
ControllerState = tuple[Tensor, ...]


class Controller(Mechanism, nn.Module):
    """h_t from the input x_t and the reads r_{t−1}.

    The part of a layer that sees x_t alone is computed for all steps at once (``project``), the rest step by step.

    Args:
        inputs: I, numbers of x_t.
        reads: numbers of all read vectors together, R W.
        dim: S, width of a layer.
        layers: number of layers.
    """

    #: Numbers of h_t.
    outputs: int

    def __init__(self, inputs: int, reads: int, dim: int, layers: int):
        super().__init__()
        self.dim, self.layers = dim, layers

    def initial(self, x: Tensor) -> ControllerState:
        """The state before the first step; x (B, T, I) has the size, device and dtype."""
        raise NotImplementedError

    def project(self, x: Tensor) -> Tensor:
        """The part of all steps that depends on the input alone, (B, T, I) -> (B, T, …)."""
        raise NotImplementedError

    def forward(self, projected: Tensor, reads: Tensor, state: ControllerState) -> tuple[Tensor, ControllerState]:
        """One step: a column of ``project`` (B, …), r_{t−1} (B, R W) and a state -> h_t (B, outputs) and the next
        state.
        """
        raise NotImplementedError
