"""``sg_visual_qa``: questions on images with one class as answer, on folders of ``python -m data_prep sort_of_clevr``.

Sample 30 s + q is question q on scene s. A batch has the images, uint8 (B, 75, 75, 3), the questions, uint8 (B, 18),
and the ``target`` (B,), a class of ``num_classes``. Models make numbers from 0 to 1 of the images on their device:
bytes are a quarter of the traffic.

In training, a batch has questions of one group (unary, binary or ternary), as in the released code of Mittal et al.
2022; ``--question-batches mixed`` cuts batches from all questions. Every epoch has other batches, drawn from the seed
and the epoch, so that a resumed run is bit-equal to an uninterrupted one. Two points differ from the released code: its
groups take turns, where here the order of all batches is random; it leaves out the rest of a group that does not fill
a batch, and in evaluation too, where here every question counts.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.tasks import register_task
from omegaconf import II
from torch import Tensor

from data_prep.sort_of_clevr import VERSION
from data_prep.sort_of_clevr.questions import ANSWERS, BITS, QUESTIONS, SUBTYPES, types_of
from data_prep.sort_of_clevr.scenes import PATCH, PIXELS
from fairseq_sg import ranges
from fairseq_sg.tasks.arrays import ArrayDataset, ArrayTask
from fairseq_sg.tasks.breakdown import CHOICES, Breakdown

COMMAND = "python -m data_prep sort_of_clevr"
IMAGE_SHAPE = (PIXELS, PIXELS, 3)
TOKENS = 1 + (PIXELS // PATCH) ** 2  # of a sample: CLS and patches
#: Array -> its type and its shape without the number of scenes.
ARRAYS = {
    "images": ("uint8", IMAGE_SHAPE),
    "questions": ("uint8", (QUESTIONS, BITS)),
    "answers": ("uint8", (QUESTIONS,)),
}


@dataclass
class SGVisualQAConfig(FairseqDataclass):
    data: str = field(default="", metadata={"help": f"folder made by `{COMMAND}`"})
    question_batches: str = field(
        default="separate",
        metadata={
            "help": "batches of training: 'separate', each of unary, binary or ternary questions alone, as the "
            "released code; or 'mixed'",
            "choices": ("separate", "mixed"),
        },
    )
    rebuild_batches: bool = field(
        default=True,
        metadata={"help": "new batches each epoch: always on, because a resumed training would have others without it"},
    )
    accuracy_by: str = field(
        default="groups",
        metadata={
            "help": "also log the accuracy of unary, binary and ternary questions ('groups'), of these and of the nine "
            "types ('types'), or 'none'",
            "choices": CHOICES,
        },
    )
    train_subset: str = II("dataset.train_subset")


class Questions(ArrayDataset):
    """Samples over arrays that are mapped into memory; a batch copies its own images alone.

    Args:
        images: uint8 (S, H, W, C).
        questions: uint8 (S, Q, bits).
        answers: uint8 (S, Q).
        types: int64 (S · Q,), the number of each sample's type, for the batches of evaluation; or None.
        groups: int64 (S · Q,), of training: a batch has samples of one group; or None.
        shuffles: whether batches are cut from a random order, drawn from numpy's generator, which fairseq seeds with
            seed + epoch.
    """

    def __init__(
        self,
        images: np.ndarray,
        questions: np.ndarray,
        answers: np.ndarray,
        *,
        types: Tensor | None = None,
        groups: np.ndarray | None = None,
        shuffles: bool = False,
    ):
        self.images, self.questions, self.answers = images, questions, answers
        self.types, self.groups, self.shuffles = types, groups, shuffles
        super().__init__(answers.size, TOKENS)

    def __getitem__(self, index: int) -> int:
        """The number of a sample; ``collater`` reads the arrays once a batch."""
        return int(index)

    def collater(self, samples: list[int]) -> dict[str, Any]:
        if not samples:
            return {}
        ids = np.array(samples)
        scenes, numbers = np.divmod(ids, self.answers.shape[1])
        batch = {
            "id": torch.from_numpy(ids),
            "nsentences": len(ids),
            "ntokens": TOKENS * len(ids),
            "net_input": {
                "images": torch.from_numpy(self.images[scenes]),
                "questions": torch.from_numpy(self.questions[scenes, numbers]),
            },
            "target": torch.from_numpy(self.answers[scenes, numbers].astype(np.int64)),
        }
        if self.types is not None:
            batch["type"] = self.types[batch["id"]]
        return batch

    def ordered_indices(self) -> np.ndarray:
        return np.random.permutation(len(self)) if self.shuffles else np.arange(len(self))

    def batch_by_size(self, indices: np.ndarray, *args, **kwargs) -> list[np.ndarray]:
        """fairseq's, from each group by itself."""
        if self.groups is None:
            return super().batch_by_size(indices, *args, **kwargs)
        of_each = [indices[self.groups[indices] == group] for group in np.unique(self.groups)]
        return [batch for group in of_each for batch in super(Questions, self).batch_by_size(group, *args, **kwargs)]


@register_task("sg_visual_qa", dataclass=SGVisualQAConfig)
class SGVisualQATask(ArrayTask):
    """See the module's docstring.

    Raises:
        UsageError: a folder without images and questions, a wrong option, another model or criterion, a command that
            generates.
    """

    cfg: SGVisualQAConfig
    name, command, contents, sample = "sg_visual_qa", COMMAND, "images with questions", "question"
    generator, version = "data_prep.sort_of_clevr", VERSION
    lacking, arch = "reads no images", "sg_encoder_sort_of_clevr"
    criterion = "classification"
    generates_nothing = "a classifier generates nothing: its accuracy"
    #: What models read (``sg_encoder``), and its sizes.
    inputs = "image_question"
    image_shape, question_bits, num_classes = IMAGE_SHAPE, BITS, len(ANSWERS)
    #: The words of classes.
    answers = ANSWERS

    def __init__(self, cfg: SGVisualQAConfig, **kwargs):
        ranges.check(SGVisualQAConfig, {"question_batches": cfg.question_batches})
        super().__init__(cfg)
        self.breakdown = Breakdown(cfg.data, cfg.accuracy_by)

    def classes(self, target: Tensor) -> Tensor:
        """target (B,) -> itself."""
        return target

    # Data.

    @property
    def subset_names(self) -> list[str]:
        return list(self.manifests[0].get("subsets", {}))

    def load_dataset(self, split: str, combine: bool = False, **kwargs) -> None:
        arrays = {name: self.mapped(split, name) for name in ARRAYS}
        self.check_arrays(split, arrays, ARRAYS)
        if split == self.cfg.train_subset:
            separate = self.cfg.question_batches == "separate"
            groups = types_of(arrays["questions"]).ravel() // SUBTYPES if separate else None
            self.datasets[split] = Questions(**arrays, groups=groups, shuffles=True)
        else:
            types = self.breakdown.types_of(split, arrays["answers"].size)
            self.datasets[split] = Questions(**arrays, types=types)
