"""Times of the verified implementations of every operator, by its sizes, forward and backward.

They are taken in interleaved rounds (`fairseq_sg.kernels.timing`), each operator and dtype in a process of its own.
What is chosen of them is up to `fairseq_sg.ops.tuning`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from fairseq_sg.errors import out_of_memory
from fairseq_sg.kernels.cases import TIMED, Make
from fairseq_sg.kernels.timing import differentiated, interleaved, quartiles
from fairseq_sg.modules.cpu.memory import keep_freed_memory
from fairseq_sg.ops.operators import OPERATORS
from fairseq_sg.ops.tuning import Point, dtype_name

#: float16 takes bfloat16's measurements. In half precision on a CPU the operators' own rules decide.
DTYPES = {"cpu": (torch.float32,), "cuda": (torch.float32, torch.bfloat16)}
ROUNDS = 7
#: Minimum milliseconds of a sample.
SHORTEST = 10.0
#: Seconds for one point, which on a GPU includes the compilation of kernels.
LIMIT = 120.0


def sizes_of(operator: str, device: str) -> tuple[tuple[int, ...], ...]:
    """The points of an operator; none where it has no choice."""
    return getattr(TIMED[operator], device) if operator in TIMED else ()


def measure(
    operator: str,
    names: Sequence[str],
    device: str,
    dtype: torch.dtype,
    most: int | None,
    rounds: int,
    shortest: float,
) -> Iterator[Point]:
    """The points of an operator, so many at most, with the implementations among these that ``"auto"`` may run."""
    if device == "cpu":
        keep_freed_memory()  # as a training does
    among = [name for name in OPERATORS[operator].candidates(device, dtype) if name in names]
    for sizes in sizes_of(operator, device)[:most] if len(among) > 1 else ():
        try:
            case = TIMED[operator].case(Make(device), *sizes)
            inputs = case.inputs_in(dtype)

            def function(name, *tensors, case=case, inputs=inputs):
                return case.function(name, **dict(zip(inputs, tensors, strict=True)))["out"]

            tensors = list(inputs.values())
            with torch.no_grad():
                weighting = torch.randn_like(function(among[0], *tensors))
            runs = {name: differentiated(partial(function, name), tensors, weighting) for name in among}
            times = interleaved(runs, rounds, device, shortest)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            continue  # the nearest smaller sizes decide
        ms = {name: [float(f"{t:.4g}") for t in quartiles(of)] for name, of in times.items()}
        yield Point(operator, dtype_name(dtype), sizes, ms)
