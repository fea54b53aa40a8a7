"""``sg_tagging``: one label for each word, on folders of ``python -m data_prep`` with targets aligned to their sources.

``dataset.json`` names the word that is no label (``no_label``), where nothing is asked. Sources have neither begin nor
end symbol: the first row of a published format is the first input. A batch has sources (B, N) and the ``target``
(B, N), padded on the same side.

The label is a word of the target's dictionary (``--output words``), or the bits of that word (``--output bits``), which
are all to be right. Every encoder, decoder and recurrent model of this plugin labels words.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Optional

import numpy as np
import torch
import torch.nn.functional as F
from fairseq import utils
from fairseq.data import StripTokenDataset
from fairseq.models import FairseqEncoderDecoderModel
from fairseq.tasks import register_task
from torch import Tensor

from fairseq_sg import ranges
from fairseq_sg.errors import UsageError
from fairseq_sg.modules.bits import bits_of
from fairseq_sg.tasks.sg_translation import SGTranslationConfig, SGTranslationTask


def check_labels(first: dict[str, Any], path: str, other: dict[str, Any], folder: str, fix: str) -> None:
    """Raises UsageError, with a ``fix``, where ``dataset.json`` of a folder has other labels than the ``first`` one."""
    for name in ("no_label", "bits"):
        if first.get(name) != other.get(name):
            raise UsageError(
                f"{folder} has other labels than {path} ({name} of their dataset.json differs), and all folders are "
                f"read as the first one: {fix}"
            )


@dataclass
class SGTaggingConfig(SGTranslationConfig):
    output: Optional[str] = field(  # noqa: UP045  (the only form that fairseq's parser reads)
        default=None,
        metadata={
            "help": "labels: 'words', or the 'bits' of each (default: bits where the data have them, else words)",
            "choices": ("words", "bits"),
        },
    )


@register_task("sg_tagging", dataclass=SGTaggingConfig)
class SGTaggingTask(SGTranslationTask):
    """See the module's docstring.

    Raises:
        UsageError: a folder without aligned labels, a wrong option, a model with a decoder of its own, a criterion of
            sentences, or a command that generates.
    """

    cfg: SGTaggingConfig
    name, criterion = "sg_tagging", "tagging"
    generates_nothing = "labels are not generated: their accuracy"
    #: What tells models to label every word.
    labels_words = True
    prepends_bos = False

    @classmethod
    def setup_task(cls, cfg: SGTaggingConfig, **kwargs) -> "SGTaggingTask":
        if cfg.no_source_bos:
            raise UsageError(
                "--no-source-bos has no effect with --task sg_tagging, whose sources have none: leave it out"
            )
        task = super().setup_task(cfg, **kwargs)
        ranges.check(SGTaggingConfig, {"output": cfg.output})
        folders = utils.split_paths(cfg.data)
        for folder, manifest in zip(folders, task.manifests, strict=True):
            if "no_label" not in manifest:
                raise UsageError(
                    f"the targets of {folder} are not aligned with its sources (its dataset.json has no no_label): "
                    "choose --task sg_translation, or data with a label for every word (for instance: python -m "
                    "data_prep repeat_copy --out data-bin/repeat_copy)"
                )
            if cfg.output == "bits" and "bits" not in manifest:
                raise UsageError(f"--output bits needs words of bits, and {folder} has others: choose --output words")
            check_labels(task.manifests[0], folders[0], manifest, folder, "train on one of them")
        return task

    def _keep_form_of_sources(self, no_bos: bool) -> None:
        """Sources have no begin symbol, whatever the option was."""

    # Labels.

    @cached_property
    def source_bits(self) -> Tensor | None:
        """The bits of every number of the source's dictionary, float32 (V, bits), 0 or 1; None for other words."""
        return self._bits("source")

    @cached_property
    def target_bits(self) -> Tensor | None:
        """Those of the target's dictionary with ``--output bits``, else None."""
        return None if self.cfg.output == "words" else self._bits("target")

    def bits_on(self, device: torch.device) -> Tensor:
        """``target_bits`` on a device, where they stay: a copy for each step would make the host wait."""
        self.target_bits = self.target_bits.to(device)
        return self.target_bits

    def _bits(self, side: str) -> Tensor | None:
        form = self.manifests[0].get("bits")
        if form is None:
            return None
        dictionary = getattr(self, f"{side}_dictionary")
        words = ["."] * dictionary.nspecial + dictionary.symbols[dictionary.nspecial :]
        return bits_of(words, form[side]["width"], form[side]["markers"])

    @property
    def num_classes(self) -> int:
        """Outputs for a word: bits, or words of the target's dictionary."""
        if self.target_bits is not None:
            return self.target_bits.size(1)
        return len(self.target_dictionary) - self.target_dictionary.nspecial

    @property
    def no_label(self) -> int:
        """The number of the word that is no label."""
        return self.target_dictionary.index(self.manifests[0]["no_label"])

    def asked(self, target: Tensor) -> Tensor:
        """target (B, N) -> bool (B, N), True at labels."""
        return target.ne(self.no_label) & target.ne(self.target_dictionary.pad())

    def nll(self, logits: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Cross entropy of logits (B, N, K) at every word, a blank as any label, float32 (B, N) in nats; for padding
        it is arbitrary.
        """
        logits = logits.float()
        if self.target_bits is None:
            classes = (target - self.target_dictionary.nspecial).clamp(min=0)
            return F.cross_entropy(logits.transpose(1, 2), classes, reduction="none", label_smoothing=label_smoothing)
        bits = self.bits_on(logits.device)[target]  # (B, N, K)
        return F.binary_cross_entropy_with_logits(logits, bits, reduction="none").sum(-1)

    def right(self, logits: Tensor, target: Tensor) -> Tensor:
        """Whether there is a label and it is right: all its bits are, or it has the highest logit; bool (B, N).

        Logits that are NaN, which have a highest one and bits of 0, are never right.
        """
        if self.target_bits is None:
            found = logits.argmax(-1).eq(target - self.target_dictionary.nspecial)
        else:
            found = (logits > 0).eq(self.bits_on(logits.device)[target] > 0.5).all(-1)
        return found & self.asked(target) & ~logits.isnan().any(-1)

    def words_of(self, logits: Tensor, target: Tensor | None = None) -> list[str]:
        """The labels that logits (N, K) are: words, or bits where no word has them.

        A blank and a word of zeros have the same bits. Where the ``target`` (N,) is given and right, its word is told.
        """
        dictionary = self.target_dictionary
        if self.target_bits is None:
            return [dictionary[i] for i in (logits.argmax(-1) + dictionary.nspecial).tolist()]
        rows = [tuple(row) for row in (logits > 0).int().tolist()]
        known = {tuple(row): i for i, row in enumerate(self.target_bits.int().tolist())}
        # A blank has the vector of a word of zeros, and specials have that of a blank.
        known[(0,) * self.target_bits.size(1)] = self.no_label
        words = [dictionary[known[row]] if row in known else "".join(map(str, row)) for row in rows]
        if target is not None:
            right = self.right(logits[None], target[None])[0].tolist()
            words = [dictionary[i] if ok else word for i, ok, word in zip(target.tolist(), right, words, strict=True)]
        return words

    # Data.

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs) -> None:
        super().load_dataset(split, epoch=epoch, combine=combine, **kwargs)
        dataset = self.datasets[split]
        dataset.input_feeding = False
        dataset.left_pad_target = dataset.left_pad_source
        dataset.src = StripTokenDataset(dataset.src, self.source_dictionary.eos())
        dataset.tgt = StripTokenDataset(dataset.tgt, self.target_dictionary.eos())
        dataset.src_sizes, dataset.tgt_sizes = dataset.src_sizes - 1, dataset.tgt_sizes - 1
        dataset.sizes = np.vstack((dataset.src_sizes, dataset.tgt_sizes)).T

    def build_dataset_for_inference(self, src_tokens, src_lengths, constraints=None):
        """Sources without their end symbol, as in training."""
        eos = self.source_dictionary.eos()
        src_tokens = [tokens[: len(tokens) - (tokens[-1:] == eos).sum()] for tokens in src_tokens]
        return super().build_dataset_for_inference(src_tokens, [len(tokens) for tokens in src_tokens], constraints)

    # Models.

    def build_model(self, cfg, from_checkpoint: bool = False):
        model = super().build_model(cfg, from_checkpoint)
        if isinstance(model, FairseqEncoderDecoderModel):
            raise UsageError(
                "this --arch is an encoder with a decoder, and --task sg_tagging needs one output a word: choose "
                "sg_dnc, sg_lstm, sg_encoder or sg_transformer_lm"
            )
        return model
