"""What tasks on folders of arrays share (``data_prep.arrays``): one folder, no dictionaries, mapped arrays."""

import os
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from fairseq import utils
from fairseq.data import FairseqDataset
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.tasks import FairseqTask

from fairseq_sg.errors import UsageError
from fairseq_sg.tasks.mixin import SGTask


class ArrayDataset(FairseqDataset):
    """Samples that all have the same number of tokens; a subclass reads and collates them."""

    def __init__(self, samples: int, tokens: int):
        self.sizes = np.full(samples, tokens)

    def __len__(self) -> int:
        return len(self.sizes)

    def size(self, index: int) -> int:
        return int(self.sizes[index])

    num_tokens = size

    def num_tokens_vec(self, indices: np.ndarray) -> np.ndarray:
        return self.sizes[indices]


class ArrayTask(SGTask, FairseqTask):
    """The base of these tasks. A subclass loads its datasets, and says which ``inputs`` its models read.

    Raises UsageError for a folder of other data, or of another version of its generator; for another model or
    criterion; for a command that generates.
    """

    #: What makes the task's folders, and what a folder and a sample have.
    command: ClassVar[str]
    generator: ClassVar[str]
    version: ClassVar[int]
    contents: ClassVar[str]
    sample: ClassVar[str]
    #: What models ``reads``, what other models do not do, and a model for the task.
    inputs: ClassVar[str]
    lacking: ClassVar[str]
    arch: ClassVar[str]
    source_dictionary = target_dictionary = None

    def __init__(self, cfg, **kwargs):
        super().__init__(cfg)
        if len(utils.split_paths(cfg.data)) != 1:
            raise UsageError(f"--task {self.name} takes one folder, not {cfg.data!r}: make it with `{self.command}`")
        origin = self.manifests[0].get("origin") or {}
        if origin.get("generator") != self.generator:
            raise UsageError(f"{cfg.data} has no {self.contents}: make a folder with `{self.command}`")
        if origin.get("version") != self.version:
            raise UsageError(
                f"{cfg.data} was made by version {origin.get('version')} of its generator, and the task needs "
                f"version {self.version}: make the data in a new folder with `{self.command}`"
            )

    def mapped(self, split: str, name: str) -> np.ndarray:
        """The array ``name`` of a subset, mapped into memory, so that only what is read is loaded.

        Raises UsageError where it is missing or broken.
        """
        if split not in self.manifests[0].get("subsets", {}):
            raise self.no_such_subset(split)
        try:
            return np.load(os.path.join(self.cfg.data, f"{split}.{name}.npy"), mmap_mode="r", allow_pickle=False)
        except FileNotFoundError as error:
            raise self.no_such_subset(split) from error
        except (OSError, ValueError, EOFError) as error:
            raise self.cut_off(split, error) from error

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
        """Raises UsageError where ``max_tokens`` is less than the tokens of a sample."""
        if max_tokens is not None and max_tokens < dataset.size(0):
            raise UsageError(
                f"--max-tokens is {max_tokens}, and a {self.sample} has {dataset.size(0)} tokens: choose at least as "
                "many, also as --max-tokens-valid, or give --batch-size instead"
            )
        return super().get_batch_iterator(dataset, max_tokens, *args, **kwargs)

    def build_model(self, cfg, from_checkpoint: bool = False):
        kind = ARCH_MODEL_REGISTRY.get(getattr(cfg, "_name", None) or getattr(cfg, "arch", None))
        if self.inputs not in getattr(kind, "reads", ()):
            raise UsageError(f"this --arch {self.lacking}: choose one that does, such as --arch {self.arch}")
        return super().build_model(cfg, from_checkpoint)
