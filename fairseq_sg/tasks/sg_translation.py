"""``sg_translation``: fairseq's translation task on folders made by ``python -m data_prep``, every sample scored.

It differs from ``translation`` in these points, the first five of which change a published number:

- evaluation drops no sample: fairseq 0.12 drops the rest of a last batch that is not a multiple of 8;
- the source starts with a begin symbol, as in the reference implementations of the thesis. ``--no-source-bos`` omits
  it. A checkpoint's model gets sources in the form that it was trained on;
- batches are drawn again each epoch, so that a resumed run is bit-equal to an uninterrupted one. They are drawn
  uniformly, as in the references, unless ``--length-window`` asks for batches of like lengths;
- sources are padded on the right unless asked otherwise;
- the folder must have been made by ``data_prep``, whose dictionaries cover all subsets: no ``<unk>`` in a test;
- where examples have types, accuracy is also logged by type (``breakdown``).
"""

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import numpy as np
import torch
from fairseq import utils
from fairseq.data import LanguagePairDataset, PrependTokenDataset
from fairseq.data.encoders import TOKENIZER_REGISTRY
from fairseq.dataclass.configs import GenerationConfig
from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from omegaconf import OmegaConf
from torch import Tensor

from fairseq_sg import ranges
from fairseq_sg.criterions.base import SGCriterion
from fairseq_sg.errors import UsageError
from fairseq_sg.files import read_manifest
from fairseq_sg.generation import by_length
from fairseq_sg.models.sg_transformer import SGTransformer
from fairseq_sg.tasks.breakdown import CHOICES, Breakdown
from fairseq_sg.tasks.mixin import CUT_OFF, SGTask, asks_for_training, check_whole
from fairseq_sg.tasks.pairs import PairDataset, TypedPairDataset, WindowedPairDataset, widened

logger = logging.getLogger(__name__)


@dataclass
class SGTranslationConfig(TranslationConfig):
    left_pad_source: bool = field(default=False, metadata={"help": "pad the source on the left"})
    no_source_bos: bool = field(
        default=False,
        metadata={"help": "no begin symbol at the source's start (released code has one, the papers do not say)"},
    )
    length_window: int = field(
        default=1,
        metadata={
            "help": "sort training samples by length inside random windows of this many samples before they are cut "
            "into batches: less padding, fewer lengths in a batch. 1: no sorting, as in released code; 0: the whole "
            "epoch sorted, as fairseq does",
            "least": 0,
        },
    )
    rebuild_batches: bool = field(
        default=True,
        metadata={"help": "new batches each epoch: always on, because a resumed training would have others without it"},
    )
    oracle_length: bool = field(
        default=False,
        metadata={
            "help": "the length of an output is given (Newman et al. 2020): the end symbol is neither trained nor an "
            "output, and accuracies are those of the words; for a checkpoint, --model-overrides "
            "\"{'oracle_length': True}\""
        },
    )
    accuracy_by: str = field(
        default="groups",
        metadata={
            "help": "also log the accuracy of groups of types of examples ('groups'), of these and every type "
            "('types'), or 'none'; for data that have types, such as COGS",
            "choices": CHOICES,
        },
    )


@register_task("sg_translation", dataclass=SGTranslationConfig)
class SGTranslationTask(SGTask, TranslationTask):
    """See the module's docstring; everything else is fairseq's ``translation``."""

    cfg: SGTranslationConfig
    #: fairseq's options that are not for this plugin's data -> the error.
    refused = {
        "load_alignments": "has no effect, as the data have none: leave it out",
        "truncate_source": "would cut sources that the task has sizes of already; leave it out, or raise "
        "--max-source-positions",
        "num_batch_buckets": "is for TPUs and does not run with today's numpy: leave it out; --length-window is what "
        "saves padding here",
    }
    #: ``--no-source-bos`` of the training of the models that were loaded; None before.
    no_bos_of_models: bool | None = None

    @classmethod
    def setup_task(cls, cfg: SGTranslationConfig, **kwargs) -> "SGTranslationTask":
        """Raises UsageError for a data folder that ``data_prep`` has not made, and for harmful inherited options."""
        if cls.generates_nothing and cfg.eval_bleu:
            raise UsageError(f"--eval-bleu is for translations: --task {cls.name} has accuracy")
        if cls.generates_nothing and cfg.oracle_length:
            raise UsageError(f"--oracle-length is for outputs with an end symbol: leave it out of --task {cls.name}")
        for path in utils.split_paths(cfg.data or ""):
            read_manifest(path)  # raises where it is not made by data_prep
            for flag, name in (("--source-lang", cfg.source_lang), ("--target-lang", cfg.target_lang)):
                if name is not None and not os.path.isfile(os.path.join(path, f"dict.{name}.txt")):
                    raise UsageError(f"{flag} is {name}, and {path} has no dict.{name}.txt: leave the option out")
            if not os.path.isfile(os.path.join(path, "dict.src.txt")):
                raise UsageError(
                    f"the data folder {path} has no pairs of sentences in binary form: it is text for --task "
                    "sg_language_modeling, or was prepared with --raw-only"
                )
        ranges.check(SGTranslationConfig, {"length_window": cfg.length_window})
        if not kwargs.get("from_checkpoint", False):  # checkpoints of earlier versions may have them
            _check_what_has_an_effect(cfg)
        _check_bleu(cfg)
        if cfg.dataset_impl in ("raw", "lazy", "cached", "fasta", "huffman"):
            raise UsageError(f"--dataset-impl is {cfg.dataset_impl}, and data_prep writes mmap: leave it out")
        for name, why in cls.refused.items():
            if getattr(cfg, name):
                raise UsageError(f"{ranges.flag(name)} {why}")
        task = super().setup_task(cfg, **kwargs)
        task.check_folders()
        task.breakdown = Breakdown(cfg.data, cfg.accuracy_by)
        return task

    def build_model(self, cfg, from_checkpoint: bool = False):
        """fairseq's. A model of a checkpoint gets sources in the form that it was trained on.

        Raises UsageError for models that were trained with and without ``--no-source-bos`` in one ensemble.
        """
        if from_checkpoint:
            # fairseq hands over a node of the training's configuration, or a namespace with all options.
            parent = cfg._get_parent() if OmegaConf.is_config(cfg) else None
            trained = getattr(parent, "task", cfg)
            self._keep_form_of_sources(bool(getattr(trained, "no_source_bos", self.cfg.no_source_bos)))
            self.cfg.oracle_length |= bool(getattr(trained, "oracle_length", False))
        return super().build_model(cfg, from_checkpoint)

    def build_criterion(self, cfg, from_checkpoint: bool = False):
        """See :meth:`SGTask.build_criterion`. Also raises UsageError for one that ``--oracle-length`` is not for."""
        criterion = super().build_criterion(cfg, from_checkpoint)
        if self.cfg.oracle_length and not isinstance(criterion, SGCriterion):
            raise UsageError(
                "--oracle-length is for --criterion cross_entropy_orthogonality: choose that, or leave it out"
            )
        return criterion

    def _keep_form_of_sources(self, no_bos: bool) -> None:
        if self.no_bos_of_models not in (None, no_bos):
            raise UsageError(
                "some of these models were trained with --no-source-bos and some without: evaluate them apart"
            )
        self.no_bos_of_models = no_bos
        if self.cfg.no_source_bos != no_bos:
            self.cfg.no_source_bos = no_bos
            logger.info(
                "the model was trained %s --no-source-bos, and so is used here", "with" if no_bos else "without"
            )

    @property
    def prepends_bos(self) -> bool:
        """Whether sources begin with a begin symbol."""
        return not self.cfg.no_source_bos

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs) -> None:
        try:
            super().load_dataset(split, epoch=epoch, combine=combine, **kwargs)
            dataset = self.datasets[split]
            for data in (dataset.src, dataset.tgt):
                check_whole(data)
            if dataset.tgt is not None and len(dataset) > 0:
                self._refuse_unknown(split, dataset)
        except FileNotFoundError as error:
            raise self.no_such_subset(split) from error
        except UsageError:
            raise
        except CUT_OFF as error:
            raise self.cut_off(split, error) from error
        if self.prepends_bos:
            dataset.src = PrependTokenDataset(dataset.src, self.source_dictionary.bos())
            dataset.src_sizes = np.array(dataset.src.sizes)
            dataset.sizes = (
                dataset.src_sizes if dataset.tgt is None else np.vstack((dataset.src_sizes, dataset.tgt_sizes)).T
            )
        if split == self.cfg.train_subset:
            dataset.__class__ = WindowedPairDataset
            dataset.length_window = self.cfg.length_window
            return
        types = self.breakdown.types_of(split, len(dataset), epoch)
        dataset.__class__ = PairDataset if types is None else TypedPairDataset
        if types is not None:
            dataset.types = types

    def _refuse_unknown(self, split: str, dataset: LanguagePairDataset) -> None:
        pairs = ((dataset.src, self.source_dictionary, "source"), (dataset.tgt, self.target_dictionary, "target"))
        for data, dictionary, side in pairs:
            for index in range(len(data)) if _holds(data, dictionary.unk()) else ():
                if dictionary.unk() in data[index]:
                    raise UsageError(
                        f"sample {index} of subset {split!r} has an unknown word in its {side}: the dictionaries of "
                        f"{self.cfg.data} do not belong to its data; prepare it again with `python -m data_prep`"
                    )

    def build_dataset_for_inference(self, src_tokens, src_lengths, constraints=None) -> LanguagePairDataset:
        """Sources for ``fairseq-interactive``, in the form that the model was trained on.

        Raises UsageError for a constraint with an unknown word, which fairseq would force into the output as <unk>.
        """
        for source, row in zip(src_tokens, [] if constraints is None else constraints, strict=False):
            forced = row[1:]  # behind their number
            if forced.eq(self.target_dictionary.unk()).any():
                raise UsageError(
                    f"--constraints {self.target_dictionary.string(forced)!r} of the input "
                    f"{self.source_dictionary.string(source)!r}: <unk> stands for a word that no output can have"
                )
        if self.prepends_bos:
            bos = torch.tensor([self.source_dictionary.bos()])
            src_tokens = [torch.cat([bos, tokens.long()]) for tokens in src_tokens]
            src_lengths = [length + 1 for length in src_lengths]
        return LanguagePairDataset(
            src_tokens,
            src_lengths,
            self.source_dictionary,
            tgt_dict=self.target_dictionary,
            left_pad_source=self.cfg.left_pad_source,
            left_pad_target=self.cfg.left_pad_target,
            constraints=constraints,
        )

    def build_generator(self, models, args, *more, **kwargs):
        """fairseq's generator.

        With ``--print-alignment`` this plugin's models return their attention weights. The positions in the alignment
        do not count the begin symbol of sources, which fairseq does not print.

        Raises UsageError with ``--oracle-length``.
        """
        if self.cfg.oracle_length:
            raise UsageError(
                "with --oracle-length the length of an output is given, and a generator has to find it: score the "
                "model with fairseq-validate or `fairseq-sg evaluate`"
            )
        aligned = bool(getattr(args, "print_alignment", None))
        for model in models:
            if isinstance(model, SGTransformer):
                model.full_context_alignment = aligned
        generator = super().build_generator(models, args, *more, **kwargs)
        if aligned and not self.cfg.no_source_bos:
            generator.extract_alignment = partial(_without, self.source_dictionary.bos(), generator.extract_alignment)
        return generator

    def inference_step(self, generator, models, sample, prefix_tokens=None, constraints=None):
        """fairseq's. With ``--max-len-a``, sources of one length at a time: fairseq takes that of the longest for all.

        Raises UsageError for ``--constraints`` where there are none: fairseq's search needs a list.
        """
        if constraints is None and getattr(generator, "search", None) and generator.search.supports_constraints:
            raise UsageError(
                "--constraints are read with the inputs of fairseq-interactive, behind tabs: leave it out here"
            )
        step = super().inference_step
        if not getattr(generator, "max_len_a", 0):
            return step(generator, models, sample, prefix_tokens, constraints)

        def generate(part: dict, rows: Tensor) -> list:
            return step(
                generator, models, part, *(None if x is None else x[rows] for x in (prefix_tokens, constraints))
            )

        return by_length(sample, self.source_dictionary.pad(), generate)

    def of_one_length(self, samples: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """See :meth:`SGTask.of_one_length`."""
        train = self.datasets[self.cfg.train_subset]
        pad = self.source_dictionary.pad()
        sources = [sample["net_input"] for sample in samples]
        sources = widened(sources, "src_tokens", pad, train.left_pad_source)
        sources = widened(sources, "prev_output_tokens", pad, train.left_pad_target)
        samples = [sample | {"net_input": source} for sample, source in zip(samples, sources, strict=True)]
        return widened(samples, "target", pad, train.left_pad_target)

    def check_training(self, trainer) -> None:
        """See :meth:`SGTask.check_training`. Also raises UsageError for validation batches too small for a sample."""
        super().check_training(trainer)
        cfg = trainer.cfg
        most = cfg.dataset.max_tokens_valid
        option = "--max-tokens" if most == cfg.dataset.max_tokens else "--max-tokens-valid"
        for subset, dataset in self.datasets.items():
            self._check_max_tokens(subset, dataset, most, option)

    def _check_max_tokens(self, subset: str, dataset: LanguagePairDataset, most: int | None, option: str) -> None:
        """Raises UsageError for a sample that no batch has room for: fairseq would drop it from training."""
        if not most:
            return
        sizes = dataset.sizes if dataset.sizes.ndim == 2 else dataset.sizes[:, None]
        limits = self.max_positions()[: sizes.shape[1]]
        longest = np.where((sizes <= limits).all(1), sizes.max(1), 0)
        if longest.max(initial=0) > most:
            sample = int(longest.argmax())
            raise UsageError(
                f"{option} is {most}, and sample {sample} of {subset!r} has {longest[sample]} tokens: choose at least "
                "as many. To leave long samples out, use --max-source-positions and --max-target-positions"
            )

    def get_batch_iterator(self, dataset, max_tokens=None, *args, **kwargs):
        """See :meth:`SGTask.get_batch_iterator`. Evaluation has the same batches each time.

        Raises UsageError where ``max_tokens`` is less than the tokens of a sample.
        """
        for subset in (name for name, known in self.datasets.items() if known is dataset):
            self._check_max_tokens(subset, dataset, max_tokens, "--max-tokens")
        iterator = super().get_batch_iterator(dataset, max_tokens, *args, **kwargs)
        if not asks_for_training(kwargs):
            # Not drawn again for each validation, as --rebuild-batches does: else a resumed training has other ones.
            iterator.batch_sampler = iterator.frozen_batches
        return iterator


def _without(symbol: int, extract, weights: Tensor, source: Tensor, *args) -> list:
    """fairseq's extraction of an alignment from weights (target, source) as if a symbol were not in the source."""
    kept = source != symbol
    return extract(weights[:, kept], source[kept], *args)


def _holds(data, symbol: int) -> bool:
    """Whether a symbol may be in an indexed dataset; one comparison where the data are one block of memory."""
    block = getattr(data, "_bin_buffer_mmap", None)
    return block is None or bool((block.view(data._index.dtype) == symbol).any())


def _check_what_has_an_effect(cfg: SGTranslationConfig) -> None:
    """Raises UsageError for options that fairseq takes and does not use here."""
    if cfg.upsample_primary != -1:
        raise UsageError("--upsample-primary has no effect, as a subset is one file: leave it out")
    for option in fields(TranslationConfig) if not cfg.eval_bleu else ():
        if "bleu" in option.name and getattr(cfg, option.name) not in (option.default, None):
            flag = ranges.flag(option.name)
            raise UsageError(f"{flag} has no effect without --eval-bleu: add --eval-bleu, or leave {flag} out")


def _check_bleu(cfg: SGTranslationConfig) -> None:
    """Raises UsageError for what ``--eval-bleu`` cannot generate with."""
    if not cfg.eval_bleu:
        return
    for name in ("eval_bleu_args", "eval_bleu_detok_args"):
        flag, text = ranges.flag(name), getattr(cfg, name)
        try:
            given = json.loads(text or "{}")
        except ValueError as error:
            raise UsageError(f"{flag} is {text!r}, and must be JSON such as '{{\"beam\": 4}}' ({error})") from error
        if not isinstance(given, dict):
            raise UsageError(f"{flag} is {text!r}, and must be a JSON object such as '{{\"beam\": 4}}'")
        unknown = set(given) - {f.name for f in fields(GenerationConfig)} if name == "eval_bleu_args" else ()
        if unknown:
            raise UsageError(f"{flag} has {', '.join(sorted(unknown))}, which is no option of fairseq-generate")
    if cfg.eval_bleu_detok not in TOKENIZER_REGISTRY:
        known = ", ".join(sorted(TOKENIZER_REGISTRY))
        raise UsageError(f"--eval-bleu-detok is {cfg.eval_bleu_detok!r}: choose from {known}")
    # fairseq leaves a batch of empty outputs out of BLEU; of ours, outputs may be empty.
    cfg.eval_bleu_args = json.dumps({"min_len": 1} | json.loads(cfg.eval_bleu_args or "{}"))
