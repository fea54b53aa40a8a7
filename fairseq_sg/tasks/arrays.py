"""What tasks on folders of arrays share (``data_prep.arrays``): one folder, no dictionaries, mapped arrays."""

import os
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from fairseq import utils
from fairseq.data import FairseqDataset
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.tasks import FairseqTask

from fairseq_sg.errors import UsageError
from fairseq_sg.tasks.breakdown import read_manifest
from fairseq_sg.tasks.mixin import SGTask, asks_for_training


class ArrayTask(SGTask, FairseqTask):
    """The base of these tasks. A subclass loads its datasets, whose samples all have the same number of tokens, and
    says which models ``serve``.

    Raises UsageError for a folder of other data, or of another version of its generator; for another model or
    criterion; for a command that generates.
    """

    #: The name of the task, what makes its folders, and what a folder and a sample have.
    name: ClassVar[str]
    command: ClassVar[str]
    generator: ClassVar[str]
    version: ClassVar[int]
    contents: ClassVar[str]
    sample: ClassVar[str]
    #: What other models do not do, a model for the task, the mark of its criteria, one of them, and why no command
    #: generates.
    lacking: ClassVar[str]
    arch: ClassVar[str]
    criterion_mark: ClassVar[str]
    criterion: ClassVar[str]
    generates_nothing: ClassVar[str]
    source_dictionary = target_dictionary = None

    @classmethod
    def manifest_of(cls, data: str) -> dict[str, Any]:
        """``dataset.json`` of the folder ``data``."""
        if len(utils.split_paths(data)) != 1:
            raise UsageError(f"--task {cls.name} takes one folder, not {data!r}: make it with `{cls.command}`")
        manifest = read_manifest(data)
        origin = manifest.get("origin") or {}
        if origin.get("generator") != cls.generator:
            raise UsageError(f"{data} has no {cls.contents}: make a folder with `{cls.command}`")
        if origin.get("version") != cls.version:
            raise UsageError(
                f"{data} was made by version {origin.get('version')} of its generator, and the task needs "
                f"version {cls.version}: make the folder again with `{cls.command}`"
            )
        return manifest

    @property
    def trained_on(self) -> dict[str, Any]:
        """The record of the data that a checkpoint keeps; arrays have no dictionaries."""
        return {"data": self.cfg.data, "requests": [m.get("request") for m in self.manifests], "dictionaries": {}}

    def mapped(self, split: str, name: str) -> np.ndarray:
        """The array ``name`` of a subset, mapped into memory, so that only what is read is loaded.

        Raises UsageError where it is missing or broken.
        """
        if split not in self.manifests[0].get("subsets", {}):
            raise self.no_such_subset(split)
        try:
            return np.load(os.path.join(self.cfg.data, f"{split}.{name}.npy"), mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise self.no_such_subset(split) from error

    def check_arrays(self, split: str, arrays: Mapping[str, np.ndarray], forms: Mapping[str, tuple]) -> None:
        """Raises UsageError for an array of another type or shape than its form, (type, shape of a sample), and for
        another number of samples than the first array has.
        """
        samples = len(next(iter(arrays.values())))
        for name, array in arrays.items():
            dtype, shape = forms[name][0], (samples, *forms[name][1])
            if array.dtype != dtype or array.shape != shape:
                raise UsageError(
                    f"{self.cfg.data}/{split}.{name}.npy has {array.dtype} {array.shape}, and {dtype} {shape} is "
                    f"needed: prepare the folder again with `{self.command}`"
                )

    def get_batch_iterator(self, dataset: FairseqDataset, max_tokens: int | None = None, *args, **kwargs):
        """fairseq's, but evaluation never drops a last batch that is not a multiple of
        ``--required-batch-size-multiple``.

        Raises UsageError where ``max_tokens`` is less than the tokens of a sample.
        """
        if max_tokens is not None and max_tokens < dataset.size(0):
            raise UsageError(
                f"--max-tokens is {max_tokens}, and a {self.sample} has {dataset.size(0)} tokens: choose at least as "
                "many, or give --batch-size instead"
            )
        if not asks_for_training(kwargs):
            kwargs["required_batch_size_multiple"] = 1
            # The iterator in the cache is the one of the training in progress.
            if dataset is self.datasets.get(self.cfg.train_subset):
                kwargs["disable_iterator_cache"] = True
        return super().get_batch_iterator(dataset, max_tokens, *args, **kwargs)

    def max_positions(self) -> None:
        """A sample has as many tokens as its folder says; the model may have fewer positions."""
        return None

    def serves(self, model: type | None) -> bool:
        """Whether the task can train models of this class."""
        raise NotImplementedError

    def build_model(self, cfg, from_checkpoint: bool = False):
        kind = ARCH_MODEL_REGISTRY.get(getattr(cfg, "_name", None) or getattr(cfg, "arch", None))
        if not self.serves(kind):
            raise UsageError(f"this --arch {self.lacking}: choose one that does, such as --arch {self.arch}")
        return super().build_model(cfg, from_checkpoint)

    def build_criterion(self, cfg, from_checkpoint: bool = False):
        criterion = super().build_criterion(cfg, from_checkpoint)
        if not getattr(criterion, self.criterion_mark, False):
            raise UsageError(f"--task {self.name} needs another criterion: choose --criterion {self.criterion}")
        return criterion

    def build_generator(self, *args, **kwargs):
        raise UsageError(f"{self.generates_nothing} is what fairseq-validate reports")
