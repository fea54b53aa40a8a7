"""Parts of a subset, by words or by type, also of another data folder than that of the model's training.

The dictionaries of two folders have different numbers for the same words. Sentences of another folder are therefore
encoded again, word by word, with the dictionaries of the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from fairseq import utils
from fairseq.data import Dictionary
from fairseq.tasks import setup_task
from omegaconf import OmegaConf
from torch import Tensor

from fairseq_sg.analysis.checkpoint import Loaded
from fairseq_sg.analysis.sentence import numbers_of
from fairseq_sg.errors import UsageError
from fairseq_sg.parsers import nearest
from fairseq_sg.tasks.sg_tagging import check_labels
from fairseq_sg.tasks.streams import Text


class Part(NamedTuple):
    """Examples with one of the source words ``where``, none of ``where_not``, one of the types, and one of the lengths.

    Lengths are those of sources (``Loaded.lengths``). What is empty does not restrict.
    """

    where: Sequence[str] = ()
    where_not: Sequence[str] = ()
    types: Sequence[str] = ()
    lengths: Sequence[int] = ()

    @property
    def is_all(self) -> bool:
        return not any(self)


@dataclasses.dataclass
class Examples:
    """A subset for a model.

    Attributes:
        name: SUBSET, or FOLDER:SUBSET for another folder than that of the training.
        loaded: the model; ``loaded.task`` is that of the folder.
        subset: the subset's name in the folder.
        dataset: the subset, in the model's numbers of words.
    """

    name: str
    loaded: Loaded
    subset: str
    dataset: Any

    @property
    def is_text(self) -> bool:
        return isinstance(self.dataset, Text)

    def __len__(self) -> int:
        return len(self.dataset)

    def types(self) -> np.ndarray:
        """The type of every example. Raises UsageError for a subset without types."""
        breakdown = getattr(self.loaded.task, "breakdown", None)
        found = breakdown and breakdown.types_of(self.subset, len(self))
        if found is None:
            raise UsageError(f"the subset {self.subset!r} of {self.loaded.data} has no types")
        return np.array(breakdown.types)[found.numpy()]

    def with_words(self, option: str, words: Sequence[str]) -> np.ndarray:
        """Whether the source of each example has one of the words, bool (S,). Raises UsageError for an unknown one."""
        self._refuse_other_inputs(option)
        wanted = numbers_of(words, self.dataset.src_dict, option, "the source dictionary")
        return np.array([bool(np.isin(self.dataset[i]["source"].numpy(), wanted).any()) for i in range(len(self))])

    def choose(self, part: Part) -> np.ndarray:
        """The examples of a part, bool (S,). Raises UsageError for an unknown word or type, and if it is empty."""
        chosen = np.ones(len(self), dtype=bool)
        if part.where:
            chosen &= self.with_words("--where", part.where)
        if part.where_not:
            chosen &= ~self.with_words("--where-not", part.where_not)
        if part.types:
            there = self.types()
            for name in part.types:
                if name not in there:
                    known = nearest(name, there) or f": choose from {', '.join(sorted(set(there)))}"
                    raise UsageError(f"--types has {name!r}, which no example of {self.name} has{known}")
            chosen &= np.isin(there, part.types)
        if part.lengths:
            self._refuse_other_inputs("--lengths")
            chosen &= np.isin(self.loaded.lengths(self.subset, self.dataset, "source"), part.lengths)
        if not chosen.any():
            raise UsageError(f"no example of {self.name} has --where, --where-not, --types and --lengths together")
        return chosen

    def only(self, words: Sequence[str]) -> dict[str, np.ndarray]:
        """For each word, whether a source has it and none of the others, bool (S,). Raises UsageError, see above."""
        found = {word: self.with_words("--only", [word]) for word in words}
        several = np.sum(list(found.values()), axis=0) > 1
        return {f"only {word}": has & ~several for word, has in found.items()}

    def _refuse_other_inputs(self, option: str) -> None:
        if self.is_text or self.loaded.reads_images:
            raise UsageError(f"{option} is for sentences, which {self.loaded.arch} does not read")

    def collate(self, indices: Sequence[int], dataset: Any = None) -> dict[str, Any]:
        """A batch on the model's device, of the subset or of another ``dataset`` made from it."""
        dataset = self.dataset if dataset is None else dataset
        batch = dataset.collater([dataset[int(i)] for i in indices])
        return utils.apply_to_sample(lambda x: x.to(self.loaded.device), batch)


def open_examples(loaded: Loaded, name: str, folder: str | None = None) -> Examples:
    """The subset ``SUBSET`` or ``FOLDER:SUBSET``, of ``folder`` or the model's own folder.

    Raises UsageError for an unknown folder or subset, and for a word that the model does not know.
    """
    before, colon, subset = name.rpartition(":")
    folder = before if colon else folder
    if folder is None or Path(folder).absolute() == Path(loaded.folder).absolute():
        return Examples(subset, loaded, subset, loaded.subset(subset))
    if not Path(folder).is_dir():
        raise UsageError(f"there is no data folder {folder}")
    there = _of_folder(loaded, folder)
    dataset = there.subset(subset)
    if not isinstance(dataset, Text) and not loaded.reads_images:
        dataset = Reencoded(dataset, loaded.task, f"the subset {subset!r} of {folder}")
        own, other = (getattr(task, "manifests", [{}])[0] for task in (loaded.task, there.task))
        check_labels(own, loaded.data, other, folder, "choose another folder")
        # Targets now have the numbers of the model's dictionaries, and the task scores them by its own.
        there.task.src_dict, there.task.tgt_dict = dataset.src_dict, dataset.tgt_dict
    elif isinstance(dataset, Text) and there.task.dictionary.symbols != loaded.task.dictionary.symbols:
        raise UsageError(
            f"the text {folder} has another dictionary than the model: {there.task.with_dictionaries_of(loaded.data)}"
        )
    return Examples(f"{Path(folder).name}:{subset}", there, subset, dataset)


def _of_folder(loaded: Loaded, folder: str) -> Loaded:
    """The same model with the task of another folder."""
    if not OmegaConf.is_config(loaded.cfg.task):
        raise UsageError("another data folder needs a checkpoint of this plugin's tasks")
    cfg = OmegaConf.create(OmegaConf.to_container(loaded.cfg.task) | {"data": folder})
    return dataclasses.replace(loaded, task=setup_task(cfg), data=folder)


class Reencoded:
    """A dataset of sentences in the numbers that a model's dictionaries have for the same words.

    Args:
        dataset: of another folder.
        task: the task of the model.
        what: the dataset, for errors.

    Raises UsageError for a word of the dataset that the model's dictionaries do not have.
    """

    def __init__(self, dataset: Any, task: Any, what: str):
        self.dataset = dataset
        self.source = table(dataset.src_dict, task.source_dictionary)
        self.target = table(dataset.tgt_dict, task.target_dictionary)
        for side, numbers, own in (
            ("source", self.source, dataset.src_dict),
            ("target", self.target, dataset.tgt_dict),
        ):
            unknown = torch.nonzero(numbers < 0).flatten()
            for index in range(len(dataset)) if len(unknown) else ():
                found = dataset[index][side]
                wrong = found[torch.isin(found, unknown)]
                if len(wrong):
                    word = own[int(wrong[0])]
                    raise UsageError(
                        f"{what} has the {side} word {word!r} in sample {index}, which the model does not know: its "
                        f"training's {side} dictionary lacks it"
                    )
        self.src_dict, self.tgt_dict = task.source_dictionary, task.target_dictionary

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = self.dataset[index]
        return item | {"source": self.source[item["source"]], "target": self.target[item["target"]]}

    def __getattr__(self, name: str) -> Any:
        # Sizes and the collater, which pads with a number that all dictionaries share.
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


def table(there: Dictionary, here: Dictionary) -> Tensor:
    """The number in ``here`` of every word of ``there``, int64; −1 for a word that ``here`` lacks."""
    numbers = [here.indices.get(word, -1) for word in there.symbols]
    return torch.tensor([*range(there.nspecial), *numbers[there.nspecial :]])


def interleaved(examples: Examples, indices: np.ndarray, parts: int) -> list[np.ndarray]:
    """Cuts a batch into parts of like lengths: part k has examples k, k + K, … by length. Empty parts are omitted."""
    dataset = examples.dataset
    if hasattr(dataset, "src_sizes"):
        targets = dataset.tgt_sizes if dataset.tgt_sizes is not None else dataset.src_sizes
        indices = indices[np.lexsort((dataset.src_sizes[indices], targets[indices]))]
    return [indices[k::parts] for k in range(min(parts, len(indices)))]
