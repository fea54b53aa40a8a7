"""What models with labels share: how many outputs a task wants, for a sentence or for every word, and how words enter.

``sg_classification`` and ``sg_visual_qa`` want one class a sentence, ``sg_tagging`` one label a word.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fairseq_sg.errors import UsageError
from fairseq_sg.modules.bits import BitEmbedding


@dataclass
class InputConfig:
    """How words enter."""

    input_embedding: str | None = field(
        default=None,
        metadata={
            "help": "'learned', a vector for every word, or 'bits', the word's own bits as ±1, and a linear map of "
            "them (default: bits with --task sg_tagging where the data have them, else learned)",
            "choices": ("learned", "bits"),
        },
    )


def outputs_of(task) -> int:
    """The number of outputs for a sentence or a word. Raises UsageError for a task that has no labels."""
    if not hasattr(task, "num_classes"):
        raise UsageError("this --arch is a classifier: choose --task sg_classification, sg_visual_qa or sg_tagging")
    return task.num_classes


def labels_words(task) -> bool:
    """Whether a task has a label for every word."""
    return getattr(task, "labels_words", False)


def source_bits(config, task) -> Tensor | None:
    """The bits of the task's source words, (V, bits); None for learned embeddings.

    Raises UsageError for bits that the data do not have.
    """
    bits = getattr(task, "source_bits", None)
    if config.input_embedding is None:
        return bits
    if config.input_embedding == "learned":
        return None
    if bits is None:
        raise UsageError(
            "--input-embedding bits needs --task sg_tagging and words of bits, as `python -m data_prep repeat_copy` "
            "makes them: leave it out"
        )
    return bits


def word_embedding(config, task) -> nn.Module:
    """The embedding of the task's source words, ``config.embed_dim`` wide: learned, or of bits (`BitEmbedding`).

    Its width is ``embedding_dim``. Without ``config.embed_dim``, learned embeddings are 256 wide, and bits enter as
    they are.
    """
    bits, dim = source_bits(config, task), config.embed_dim
    if bits is not None:
        return BitEmbedding(bits, dim)
    dictionary = task.source_dictionary
    return nn.Embedding(len(dictionary), 256 if dim is None else dim, padding_idx=dictionary.pad())


# Padding on either side.


def first_column(padding_mask: Tensor) -> Tensor:
    """padding_mask (B, N) bool -> (B,) int64, where each sentence begins; 0 for a row of padding alone."""
    return (~padding_mask).int().argmax(1)


def last_column(padding_mask: Tensor) -> Tensor:
    """padding_mask (B, N) bool -> (B,) int64, where each sentence ends; N − 1 for a row of padding alone."""
    return padding_mask.size(1) - 1 - first_column(padding_mask.flip(1))


def moved_left(tokens: Tensor, padding_mask: Tensor) -> Tensor:
    """tokens (B, N) with every sentence at the left end; what follows it is arbitrary."""
    columns = first_column(padding_mask)[:, None] + torch.arange(tokens.size(1), device=tokens.device)
    return tokens.gather(1, columns.clamp(max=tokens.size(1) - 1))


def moved_back(x: Tensor, padding_mask: Tensor) -> Tensor:
    """Outputs (B, N, C) of ``moved_left`` where the words were."""
    columns = torch.arange(x.size(1), device=x.device) - first_column(padding_mask)[:, None]
    return x.gather(1, columns.clamp(min=0)[:, :, None].expand_as(x))
