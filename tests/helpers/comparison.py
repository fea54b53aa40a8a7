"""Comparing tensors by name, results in low precision with those in float64, and what operations a call is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Results = dict[str, Tensor]


def assert_all_close(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], rtol: float, atol: float) -> None:
    """`torch.testing.assert_close` on every entry, with its name in the message."""
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        torch.testing.assert_close(tensor, expected[name], rtol=rtol, atol=atol, msg=lambda text: f"{name}: {text}")


def with_gradients(function: Callable[..., Mapping[str, Tensor]], inputs: Mapping[str, Tensor]) -> Results:
    """The outputs of function(**inputs), and the gradient of every input under a fixed random weighting of them all."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in inputs.items()}
    outputs = dict(function(**leaves))
    generator = torch.Generator().manual_seed(1)
    total = sum(
        (out.double() * torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.device)).sum()
        for out in outputs.values()
    )
    gradients = torch.autograd.grad(total, list(leaves.values()))
    detached = {name: out.detach() for name, out in outputs.items()}
    return detached | {f"gradient of {name}": grad for name, grad in zip(leaves, gradients, strict=True)}


def assert_as_exact_as(fast: Mapping[str, Tensor], naive: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> None:
    """The largest error of `fast` is at most 3 times that of `naive`, plus 8 float32 roundings of the largest number.

    The second part is for matrix products, which add up a long sum term by term where `Tensor.sum` adds up halves.
    `exact` are the float64 results for the same inputs (for the rounded numbers, if the inputs are in half precision).
    """
    assert fast.keys() == naive.keys() == exact.keys()
    for name, truth in exact.items():
        assert fast[name].dtype == naive[name].dtype, name
        error, allowed = (float((out[name].double() - truth).abs().max()) for out in (fast, naive))
        slack = 8 * torch.finfo(torch.float32).eps * float(truth.abs().max())
        assert error <= 3 * allowed + slack, f"{name}: error {error:.3g}, naive {allowed:.3g}, slack {slack:.3g}"


class Operations(TorchDispatchMode):
    """Records what runs within the block: names of the operations that compute or copy, and the largest tensor made."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        returns = function._schema.returns
        is_view = returns and returns[0].alias_info is not None and not returns[0].alias_info.is_write
        if not is_view and function.overloadpacket.__name__ != "_unsafe_view":
            self.names.append(function.overloadpacket.__name__)
            made = out if isinstance(out, (tuple, list)) else [out]
            self.largest = max([self.largest, *(x.numel() for x in made if isinstance(x, Tensor))])
        return out


def make_mask(padding: str, batch: int, length: int, device) -> Tensor | None:
    """Row b has b + 1 positions of padding (as many as leave one real), or row 0 nothing but padding."""
    if padding == "none":
        return None
    mask = torch.zeros(batch, length, dtype=torch.bool, device=device)
    for row in range(batch):
        count = min(row + 1, length - 1)
        if padding == "left":
            mask[row, :count] = True
        elif padding == "right":
            mask[row, length - count :] = True
    if padding == "one-row-full":
        mask[0] = True
    return mask
