"""``sg_operator``: functions from functions on grids, on folders of ``data_prep burgers``, ``darcy`` and ``fields``.

Every subset has a grid of its own, so one run validates several resolutions: ``--valid-subset valid,test_512``. A batch
has

    a            (B, n) or (B, n, n), the inputs
    axis         (n,), the coordinates along a side;  target_axis (m,), those of the targets
    target       (B, m) or (B, m, m);  gradient (B, m) or (B, m, m, 2), where the data have gradients
    spacing      h, the distance of two points of the target's grid

Targets, gradients and coordinates are float64, which ``--fp16`` and ``--bf16`` leave as they are.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.tasks import register_task
from omegaconf import II

from data_prep.fields import ARRAYS, GENERATOR, VERSION
from fairseq_sg.tasks.arrays import ArrayDataset, ArrayTask

COMMAND = "python -m data_prep burgers`, `python -m data_prep darcy` or `python -m data_prep fields"


@dataclass
class SGOperatorTaskConfig(FairseqDataclass):
    data: str = field(default="", metadata={"help": f"folder made by `{COMMAND}`"})
    train_subset: str = II("dataset.train_subset")


class FieldFacts(NamedTuple):
    """What a folder says of its functions.

    Attributes:
        dims: 1 or 2.
        periodic: whether x_i = i/n; otherwise x_i = i/(n − 1).
        gradient: whether the subsets have gradients of the targets.
        statistics: "input" and "target" -> their "mean" and "std" in train.
    """

    dims: int
    periodic: bool
    gradient: bool
    statistics: dict[str, dict[str, float]]

    def axis(self, points: int) -> torch.Tensor:
        """The coordinates along a side, (n,), float64."""
        return torch.arange(points, dtype=torch.float64) / (points if self.periodic else points - 1)


class FieldDataset(ArrayDataset):
    """The functions of one subset.

    Args:
        facts: of the folder.
        arrays: "input", "target" and perhaps "gradient" -> (S, …).
    """

    def __init__(self, facts: FieldFacts, arrays: dict[str, np.ndarray]):
        self.arrays = arrays
        self.axis, self.target_axis = (facts.axis(arrays[name].shape[1]) for name in ("input", "target"))
        super().__init__(len(arrays["input"]), len(self.axis) ** facts.dims)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": int(index)} | {name: torch.tensor(values[index]) for name, values in self.arrays.items()}

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        if not samples:
            return {}
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in self.arrays}
        a = batch.pop("input")
        return {
            "id": torch.tensor([sample["id"] for sample in samples]),
            "nsentences": len(samples),
            "ntokens": len(samples) * int(self.sizes[0]),
            "net_input": {"a": a, "axis": self.axis, "target_axis": self.target_axis},
            "spacing": (self.target_axis[1] - self.target_axis[0]).item(),
            **{name: values.double() for name, values in batch.items()},
        }


@register_task("sg_operator", dataclass=SGOperatorTaskConfig)
class SGOperatorTask(ArrayTask):
    """See the module's docstring.

    Attributes:
        fields: what the folder says of its functions.

    Raises:
        UsageError: a folder without functions, another model or criterion, a command that generates.
    """

    cfg: SGOperatorTaskConfig
    name, command, contents, sample = "sg_operator", COMMAND, "functions on grids", "function"
    generator, version = GENERATOR, VERSION
    lacking, arch = "predicts no functions", "sg_operator"
    criterion, inputs = "relative_l2", "fields"
    generates_nothing = "an operator model generates no text: its error"

    def __init__(self, cfg: SGOperatorTaskConfig, **kwargs):
        super().__init__(cfg)
        self.fields = FieldFacts(*(self.manifests[0][name] for name in FieldFacts._fields))

    def load_dataset(self, split: str, combine: bool = False, **kwargs) -> None:
        names, dims = ARRAYS if self.fields.gradient else ARRAYS[:2], self.fields.dims
        arrays = {name: self.mapped(split, name) for name in names}
        sides = {name: array.shape[1:2] * dims for name, array in arrays.items()}
        sides["gradient"] = sides["target"] + (dims,) * (dims > 1)
        self.check_arrays(split, arrays, {name: ("float32", sides[name]) for name in names})
        self.datasets[split] = FieldDataset(self.fields, arrays)
