"""``sg_language_modeling``: language models on the folders of ``python -m data_prep text``, in streams with a memory.

It differs from fairseq's ``language_modeling`` in these points, and each of them changes a number:

- the text is read as ``--batch-size`` streams side by side (``streams``), and the model has a memory of the segments
  before (``--memory-length``), instead of independent blocks in random order;
- evaluation scores every token once, also the last ones, with its own length of memory (``--eval-memory-length``);
- beside ``ppl``, per token, it logs bits per character and per byte and the perplexity per word, from the counts in
  ``dataset.json``.

The memory of the training streams is saved with the checkpoint, so that a resumed run is bit-equal to an uninterrupted
one. An epoch begins with the streams' beginnings and without memory.

``fairseq-interactive`` continues prompts: in decoding all of the prefix is remembered. ``fairseq-eval-lm`` has no
place for a memory: use it with fairseq's task, ``--task language_modeling``, which reads the same folder and the same
checkpoints.
"""

import math
import os
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
import torch.distributed
from fairseq import utils
from fairseq.data import Dictionary, FairseqDataset, data_utils, iterators
from fairseq.dataclass import FairseqDataclass
from fairseq.distributed import utils as distributed_utils
from fairseq.logging import metrics
from fairseq.models import FairseqLanguageModel
from fairseq.tasks import FairseqTask, register_task
from omegaconf import II
from torch import Tensor

from fairseq_sg import ranges
from fairseq_sg.errors import UsageError
from fairseq_sg.files import read_manifest
from fairseq_sg.generation import by_length
from fairseq_sg.tasks.breakdown import sums_of_logs
from fairseq_sg.tasks.mixin import CUT_OFF, SGTask, asks_for_training, check_whole
from fairseq_sg.tasks.segment_memory import Remembering, SegmentMemories
from fairseq_sg.tasks.streams import Streams, Text

#: what ``dataset.json`` counts -> the metric of bits per one of these
UNITS = {"characters": "bpc", "bytes": "bpb", "words": "bits_per_word"}
COUNT = "text_n_"


@dataclass
class SGLanguageModelingConfig(FairseqDataclass):
    data: str = field(default="", metadata={"help": "folder made by `python -m data_prep text`"})
    tokens_per_sample: int = field(default=256, metadata={"help": "N, tokens in a segment of a stream", "least": 1})
    memory_length: int = field(
        default=0,
        metadata={
            "help": "positions before a segment that the model remembers in training; 0: segments are independent",
            "least": 0,
        },
    )
    # fairseq's parser reads Optional alone.
    eval_memory_length: Optional[int] = field(  # noqa: UP045
        default=None,
        metadata={
            "help": "positions that it remembers in evaluation (default: --memory-length); may be changed at test time",
            "least": 0,
        },
    )
    update_freq: list[int] = II("optimization.update_freq")


@register_task("sg_language_modeling", dataclass=SGLanguageModelingConfig)
class SGLanguageModelingTask(SGTask, FairseqTask):
    """See the module's docstring.

    Raises:
        UsageError: a folder that ``data_prep text`` has not made, a wrong option, a model without memory, a command
            that carries none.
    """

    takes_words = False

    def __init__(self, cfg: SGLanguageModelingConfig, dictionary: Dictionary, subsets: dict[str, dict[str, Any]]):
        super().__init__(cfg)
        self.dictionary, self.subsets = dictionary, subsets
        self.memory_length = cfg.memory_length
        self.eval_memory_length = cfg.memory_length if cfg.eval_memory_length is None else cfg.eval_memory_length
        self.trained, self.evaluated = SegmentMemories(), SegmentMemories()
        #: For what the iterator over a dataset was made, and the iterator. One made for every epoch would leave
        #: worker processes to the garbage collector, where each costs a timeout of 5 seconds.
        self._batches: dict[Text, tuple[tuple, iterators.EpochBatchIterator]] = {}
        #: Which of how many workers trains on the batches of the last training iterator.
        self._shard = 0, 1
        #: The memories of all workers, for the one that saves them.
        self._gathered: dict[int, Any] | None = None

    @classmethod
    def setup_task(cls, cfg: SGLanguageModelingConfig, **kwargs) -> "SGLanguageModelingTask":
        lengths = ("tokens_per_sample", "memory_length", "eval_memory_length")
        ranges.check(SGLanguageModelingConfig, {name: getattr(cfg, name) for name in lengths})
        if len(utils.split_paths(cfg.data)) != 1:
            raise UsageError(f"--task sg_language_modeling takes one folder, not {cfg.data!r}")
        subsets = read_manifest(cfg.data).get("subsets", {})
        if not subsets or not all("tokens" in subset for subset in subsets.values()):
            raise UsageError(
                f"{cfg.data} is no text for language models: make one with `python -m data_prep text`, without "
                "--raw-only"
            )
        return cls(cfg, cls.load_dictionary(os.path.join(cfg.data, "dict.txt")), subsets)

    def with_dictionaries_of(self, there: str) -> str:
        return (
            f"prepare the text as --test-input, with --input {there}/raw/train.txt, --valid-share 0 and the other "
            f"options of {there}"
        )

    @property
    def source_dictionary(self) -> Dictionary:
        return self.dictionary

    target_dictionary = source_dictionary

    # Data.

    def load_dataset(self, split: str, combine: bool = False, **kwargs) -> None:
        path = os.path.join(self.cfg.data, split)
        try:
            entries = data_utils.load_indexed_dataset(path, self.dictionary) if split in self.subsets else None
            check_whole(entries)
        except CUT_OFF as error:
            raise self.cut_off(split, error) from error
        if entries is None:
            raise self.no_such_subset(split)
        text = Text(entries, entries.sizes, self.dictionary, split, units_of(self.subsets[split]))
        if len(text) != self.subsets[split]["tokens"]:
            raise UsageError(
                f"{path}.bin has {len(text)} tokens, and dataset.json says {self.subsets[split]['tokens']}: prepare "
                "the folder again with `python -m data_prep text`"
            )
        self.datasets[split] = text

    def get_batch_iterator(
        self,
        dataset: Text,
        max_tokens: int | None = None,
        max_sentences: int | None = None,
        seed: int = 1,
        num_shards: int = 1,
        shard_id: int = 0,
        num_workers: int = 0,
        epoch: int = 1,
        skip_remainder_batch: bool = False,
        **others: Any,
    ) -> iterators.EpochBatchIterator:
        """The batches of a subset's streams, in their order, in every epoch the same."""
        if not isinstance(dataset, Text):  # prompts
            return super().get_batch_iterator(dataset, max_tokens, max_sentences, num_workers=num_workers, **others)
        if max_tokens is not None or max_sentences is None or max_sentences < 1:
            raise UsageError(
                "streams have as many rows as --batch-size says: give it, and leave out --max-tokens and "
                "--max-tokens-valid (to continue prompts, use fairseq-interactive)"
            )
        training = asks_for_training(others)
        if training:
            self._shard = shard_id, num_shards
        updates = self.cfg.update_freq[:epoch][-1] if training else 1
        count = max_sentences * num_shards * updates
        if training and len(dataset) < count:
            raise UsageError(
                f"{dataset.name} has {len(dataset)} tokens, fewer than the {count} streams of --batch-size "
                f"{max_sentences}, --update-freq {updates} and {num_shards} workers: choose smaller ones"
            )
        made_for = count, max_sentences, training, seed, num_shards, shard_id, num_workers, skip_remainder_batch
        before, batches = self._batches.get(dataset, (None, None))
        if before != made_for:
            streams = Streams(dataset, count, max_sentences, self.cfg.tokens_per_sample, all_tokens=not training)
            batches = iterators.EpochBatchIterator(
                dataset=streams,
                collate_fn=streams.collater,
                batch_sampler=streams.batches(),
                seed=seed,
                num_shards=num_shards,
                shard_id=shard_id,
                num_workers=num_workers,
                epoch=epoch,
                disable_shuffling=True,
                skip_remainder_batch=skip_remainder_batch,
                reuse_dataloader=True,
            )
            self._batches[dataset] = made_for, batches
        return batches

    # Steps.

    def build_model(self, cfg, from_checkpoint: bool = False):
        model = super().build_model(cfg, from_checkpoint)
        if not isinstance(model, FairseqLanguageModel):
            raise UsageError("this --arch is no language model: choose one, such as --arch sg_transformer_lm")
        if max(self.memory_length, self.eval_memory_length) and not getattr(model, "remembers", False):
            raise UsageError(
                "this --arch has no memory of earlier segments: choose --arch sg_transformer_lm, or leave "
                "--memory-length and --eval-memory-length out"
            )
        lengths = {"--memory-length": self.memory_length, "--eval-memory-length": self.eval_memory_length}
        for option, memory in lengths.items():
            if memory:
                model.decoder.check_memory(memory + self.cfg.tokens_per_sample, option)
        return model

    def check_training(self, trainer) -> None:
        """See :meth:`SGTask.check_training`. Also raises UsageError for a stream that is longer than the positions."""
        data, workers = trainer.cfg.dataset, trainer.data_parallel_world_size
        subsets = [] if data.disable_validation else data.valid_subset.split(",")
        streams = [(name, "--eval-memory-length", self.eval_memory_length, data.batch_size_valid) for name in subsets]
        rows = (data.batch_size or 0) * min(self.cfg.update_freq)
        streams.append((data.train_subset, "--memory-length", self.memory_length, rows))
        for subset, option, memory, rows in streams:
            if not (memory and rows and subset in self.subsets):
                continue
            # Training drops the tokens that do not fill all streams.
            rounded = math.floor if subset == data.train_subset else math.ceil
            length = rounded(self.subsets[subset]["tokens"] / (rows * workers))
            longest = trainer.get_model().decoder.longest_stream()
            if length > longest:
                raise UsageError(
                    f"with {option}, positions count from the beginning of a stream. Those of {subset!r} have {length} "
                    f"tokens, and there are {longest} positions: choose another --position, a larger limit (such as "
                    "--learned-positions), or larger batches"
                )
        super().check_training(trainer)

    @property
    def not_recorded(self) -> str:
        return "a graph has no place for a memory of earlier segments (--memory-length)" if self.memory_length else ""

    @staticmethod
    def recorded(sample: dict[str, Any]) -> dict[str, Any]:
        """A batch without the place of its segments, which only a memory needs."""
        return {name: part for name, part in sample.items() if name != "segment"}

    def train_step(self, sample, model, criterion, optimizer, update_num, ignore_grad=False):
        # A batch whose gradient is ignored fills a gap at the end of an epoch, and is no part of the streams.
        if self.memory_length and not ignore_grad:
            model = Remembering(model, self.trained, sample["segment"], self.memory_length)
        self.evaluated.forget()
        loss, size, logs = super().train_step(sample, model, criterion, optimizer, update_num, ignore_grad)
        return loss, size, counted(logs, sample)

    def valid_step(self, sample, model, criterion):
        if self.eval_memory_length:
            model = Remembering(model, self.evaluated, sample["segment"], self.eval_memory_length)
        loss, size, logs = super().valid_step(sample, model, criterion)
        return loss, size, counted(logs, sample)

    def reduce_metrics(self, logging_outputs: list[dict[str, Any]], criterion) -> None:
        """The criterion's metrics; ``ppl`` per token, ``bpc`` and ``bpb`` per character and byte, ``word_ppl`` per
        word.
        """
        super().reduce_metrics(logging_outputs, criterion)
        if any("nll_loss" in log for log in logging_outputs):
            metrics.log_derived("ppl", lambda meters: utils.get_perplexity(meters["nll_loss"].avg))
        # fairseq's cross_entropy has one loss alone.
        sums = sums_of_logs(logging_outputs)
        nll = sums.get("nll_loss", sums["loss"]) / math.log(2)
        for unit, name in UNITS.items():
            count = sums[COUNT + unit]
            if count:
                metrics.log_scalar(name, nll / count, count, round=4)
        if any(COUNT + "words" in log for log in logging_outputs):
            metrics.log_derived("word_ppl", lambda meters: utils.get_perplexity(meters["bits_per_word"].avg))

    # Checkpoints.

    def gather_state(self) -> None:
        """Called on every worker before a checkpoint is saved (``compat``): the first one saves the memories of all."""
        workers = distributed_utils.get_data_parallel_world_size() if torch.distributed.is_initialized() else 1
        if workers == 1 or not self.memory_length:
            return
        first = distributed_utils.get_data_parallel_rank() == 0
        states: list[Any] | None = [None] * workers if first else None
        torch.distributed.gather_object(self.trained.state(), states, group=distributed_utils.get_data_parallel_group())
        self._gathered = {group: memory for state in states or () for group, memory in state.items()}

    def get_checkpoint_dict(self) -> dict[str, Any]:
        """Also has the memories of the training streams; there are none at the end of an epoch."""
        state = self.trained.state() if self._gathered is None else self._gathered
        self._gathered = None
        return super().get_checkpoint_dict() | ({type(self).__name__: {"trained": state}} if state else {})

    def set_checkpoint_dict(self, state: dict[str, Any]) -> None:
        """Restores the memories of ``get_checkpoint_dict``, once the streams are where the checkpoint was saved."""
        shard, shards = self._shard
        self.trained.load({group: memory for group, memory in state["trained"].items() if group % shards == shard})

    # Other commands.

    def build_dataset_for_inference(self, src_tokens: list[Tensor], src_lengths: list[int], **kwargs):
        """Prompts as ``fairseq-interactive`` reads them, which end in the end symbol; here it comes before them."""
        return Prompts([tokens[:-1] for tokens in src_tokens], self.dictionary)

    def inference_step(self, generator, models, sample, prefix_tokens=None, constraints=None):
        """Continues the prompts of ``build_dataset_for_inference``, those of one length at a time: fairseq takes
        ``--max-len-a`` of the longest, and applies ``--min-len`` only behind it.
        """
        search = getattr(generator, "search", None)
        constrained = constraints is not None or (search is not None and search.supports_constraints)
        if "segment" in sample or prefix_tokens is not None or constrained:
            raise UsageError(
                "this task continues prompts without constraints: use fairseq-interactive, not fairseq-generate"
            )
        for length in (sample["net_input"]["src_lengths"] - 1).tolist():
            # As ``SequenceGenerator`` has it; it cuts longer prompts.
            longest = min(int(generator.max_len_a * (length + 1) + generator.max_len_b), generator.max_len - 1)
            if length >= longest:
                raise UsageError(
                    f"a prompt has {length} tokens, and with its continuation at most {longest} are taken: choose a "
                    "larger --max-len-b, or a shorter prompt where the model's positions are the limit"
                )

        def generate(part: dict, _rows: Tensor) -> list:
            prompts = part["net_input"]["src_tokens"][:, 1:]
            return generator.generate(models, part, prefix_tokens=prompts, bos_token=self.dictionary.eos())

        with torch.no_grad():
            return by_length(sample, self.dictionary.pad(), generate)

    def eval_lm_dataloader(self, *args, **kwargs):
        raise UsageError(
            "fairseq-eval-lm has no place for a memory of earlier segments: use it with --task language_modeling, "
            "which reads the same folder and checkpoints, or evaluate with fairseq-validate"
        )


class Prompts(FairseqDataset):
    """Beginnings of texts, without end symbols; int64 (N,) each. Batches put an end symbol before them."""

    def __init__(self, prompts: list[Tensor], dictionary: Dictionary):
        self.prompts, self.dictionary = prompts, dictionary

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        end = torch.tensor([self.dictionary.eos()])
        return {"id": index, "source": torch.cat([end, self.prompts[index].long()])}

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        rows = [sample["source"] for sample in samples]
        tokens = data_utils.collate_tokens(rows, self.dictionary.pad())
        inputs = {"src_tokens": tokens, "src_lengths": torch.tensor([len(row) for row in rows])}
        return {"id": torch.tensor([sample["id"] for sample in samples]), "net_input": inputs}

    def size(self, index: int) -> int:
        return len(self.prompts[index]) + 1

    num_tokens = size


def counted(logs: dict[str, Any], sample: dict[str, Any]) -> dict[str, Any]:
    """Logs with the characters, bytes and words of a batch's tokens, on the average of its subset."""
    return {**logs, **{COUNT + unit: count for unit, count in sample["units"].items()}}


def units_of(subset: dict[str, Any]) -> dict[str, float]:
    """Characters (where the text is UTF-8), bytes, and words with line ends per token, from an entry of
    ``dataset.json``.
    """
    counts = {**subset, "words": subset["words"] + subset["lines"]}
    return {unit: counts[unit] / subset["tokens"] for unit in UNITS if counts[unit] is not None}
