"""``sg_regression``: functions learned from the examples in a prompt, on folders of ``python -m data_prep in_context``.

The prompts of training are drawn: prompt i of epoch e is that of ``data_prep.in_context.prompts`` for (seed, "train",
e, i), where the seed is ``--seed``. So they are the same for any number of workers and after a resume, and another
``--seed`` trains on others. An epoch has ``--epoch-size`` prompts. Those of validation and tests are files.

A batch has the points x (B, P, n), the values y (B, P − 1) of the examples, and the ``target`` (B, P), the values of
all points. The target is float64, which ``--fp16`` and ``--bf16`` leave as it is.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.tasks import register_task
from omegaconf import II

from data_prep.in_context.prompts import VERSION, Prompts
from fairseq_sg import ranges
from fairseq_sg.tasks.arrays import ArrayDataset, ArrayTask

COMMAND = "python -m data_prep in_context"


@dataclass
class SGRegressionConfig(FairseqDataclass):
    data: str = field(default="", metadata={"help": f"folder made by `{COMMAND}`"})
    epoch_size: int = field(
        default=64_000, metadata={"help": "prompts in an epoch of training; each epoch has others", "least": 1}
    )
    train_subset: str = II("dataset.train_subset")
    seed: int = II("common.seed")


class PromptDataset(ArrayDataset):
    """Prompts of ``points`` points each; a subclass returns x (P, n) and y (P,), float32, of one of ``size``."""

    def __init__(self, size: int, points: int):
        super().__init__(size, 2 * points - 1)
        self.points = points

    def prompt(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        raise NotImplementedError

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, y = self.prompt(int(index))
        return {"id": int(index), "x": torch.tensor(x), "y": torch.tensor(y)}

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        if not samples:
            return {}
        x, y = (torch.stack([sample[name] for sample in samples]) for name in "xy")
        return {
            "id": torch.tensor([sample["id"] for sample in samples]),
            "nsentences": len(samples),
            "ntokens": len(samples) * int(self.sizes[0]),
            "net_input": {"x": x, "y": y[:, :-1]},
            "target": y.double(),
        }


class DrawnPrompts(PromptDataset):
    """The prompts of training."""

    def __init__(self, prompts: Prompts, size: int, seed: int, subset: str):
        super().__init__(size, prompts.examples + 1)
        self.prompts, self.seed, self.subset = prompts, seed, subset
        #: Workers have a copy of the dataset, and live for many epochs: the epoch is in memory that they share.
        self.epoch = torch.ones((), dtype=torch.long).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        self.epoch.fill_(epoch)

    def prompt(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.prompts.draw(self.seed, self.subset, self.epoch.item(), index)


class FrozenPrompts(PromptDataset):
    """The prompts of a file: x (S, P, n) and y (S, P)."""

    def __init__(self, x: np.ndarray, y: np.ndarray):
        super().__init__(*y.shape)
        self.x, self.y = x, y

    def prompt(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.x[index], self.y[index]


@register_task("sg_regression", dataclass=SGRegressionConfig)
class SGRegressionTask(ArrayTask):
    """See the module's docstring.

    Attributes:
        prompts: the distribution of the prompts.
        unit: what squared errors are divided by.

    Raises:
        UsageError: a folder without prompts, a wrong option, another model or criterion, a command that generates.
    """

    cfg: SGRegressionConfig
    name, command, contents, sample = "sg_regression", COMMAND, "prompts", "prompt"
    generator, version = "data_prep.in_context", VERSION
    lacking, arch = "predicts no numbers", "sg_regressor"
    criterion, inputs = "regression", "prompts"
    generates_nothing = "a regressor generates no text: its error"

    def __init__(self, cfg: SGRegressionConfig, **kwargs):
        ranges.check(SGRegressionConfig, {"epoch_size": cfg.epoch_size})
        super().__init__(cfg)
        self.prompts = Prompts.of_request(self.manifests[0]["request"])
        self.unit: float = self.manifests[0]["unit"]

    # Data.

    def load_dataset(self, split: str, combine: bool = False, **kwargs) -> None:
        if split == self.cfg.train_subset:
            self.datasets[split] = DrawnPrompts(self.prompts, self.cfg.epoch_size, self.cfg.seed, split)
            return
        x, y = (self.mapped(split, name) for name in "xy")
        points = x.shape[1:2]  # tests may have more or fewer than training
        self.check_arrays(
            split, {"x": x, "y": y}, {"x": ("float32", (*points, self.prompts.function.dims)), "y": ("float32", points)}
        )
        self.datasets[split] = FrozenPrompts(x, y)
