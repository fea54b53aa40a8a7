"""The record of a training's data in its checkpoints.

A checkpoint records the data it was trained on (``task_state["trained_on"]``): the folder, the request that it was
prepared by, and a hash of each dictionary's words in their order. An embedding is a row number: with another order of
words, a model runs without an error and its outputs mean nothing. So another dictionary is refused.
"""

from __future__ import annotations

import hashlib
import logging
from functools import cached_property
from typing import Any

from fairseq.data import Dictionary

from fairseq_sg.errors import UsageError

logger = logging.getLogger(__name__)


class DataRecord:
    """The part of ``SGTask`` that writes and compares the record."""

    @cached_property
    def trained_on(self) -> dict[str, Any]:
        """The record of the data that a checkpoint keeps; plain values."""
        sides = {"source": self.source_dictionary, "target": self.target_dictionary}
        return {
            "data": self.cfg.data,
            "requests": [manifest.get("request") for manifest in self.manifests],
            # Tasks on arrays have no dictionaries.
            "dictionaries": {side: hash_of_words(words) for side, words in sides.items() if words is not None},
        }

    def state_dict(self) -> dict[str, Any]:
        """The ``task_state`` that fairseq writes into a checkpoint."""
        return {**super().state_dict(), "trained_on": self.trained_on}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Called with a checkpoint's ``task_state`` before its model is built for an evaluation.

        Raises UsageError for a model that was trained with other dictionaries than the folder's.
        """
        super().load_state_dict({name: value for name, value in state.items() if name != "trained_on"})
        self.check_dictionaries(state.get("trained_on"))

    def check_dictionaries(self, trained_on: dict[str, Any] | None) -> None:
        """Raises UsageError where the dictionaries of a checkpoint's record are not the folder's.

        Warns of a checkpoint without a record.
        """
        here = self.trained_on
        if trained_on is None:
            logger.warning(
                "the checkpoint does not record its dictionaries (it was made before version 0.2). Check that %s is "
                "the very folder it was trained on: with another order of words, its outputs mean nothing",
                here["data"],
            )
            return
        there = trained_on["data"]
        for side, words in here["dictionaries"].items():
            if trained_on["dictionaries"].get(side) == words:
                continue
            if words in trained_on["dictionaries"].values():
                raise UsageError(
                    f"the model was trained with the languages of {there} in the other direction: give the "
                    "--source-lang and --target-lang of the training"
                )
            if there == here["data"]:
                raise UsageError(
                    f"the model was trained on {there} before that folder was prepared again: its {side} dictionary "
                    "had other words, or another order of words. Restore that folder, or train into another --save-dir"
                )
            raise UsageError(
                f"the model was trained on {there}, and the {side} dictionary of {here['data']} has other words, or "
                "another order of words. Evaluate on a folder with the dictionaries of training: "
                + self.with_dictionaries_of(there)
            )

    def with_dictionaries_of(self, there: str) -> str:
        """How to make a folder with the data of ``cfg.data`` and the dictionaries of the folder ``there``."""
        return reordering(self.cfg.data, there)

    def other_data(self, trained_on: dict[str, Any] | None) -> str:
        """How the data of a checkpoint's record differ from the folder's, in words; "" if not, or without a record."""
        return different_requests(trained_on["requests"], self.trained_on["requests"]) if trained_on else ""

    def check_resumed(self, trained_on: dict[str, Any] | None, new_data: bool) -> None:
        """Raises UsageError where a training cannot be resumed on the folder.

        Args:
            trained_on: the checkpoint's record. new_data: whether the command says that its data are others, by
                ``--reset-dataloader`` or ``--finetune-from-model``; the dictionaries must be the same all the same.
        """
        self.check_dictionaries(trained_on)
        different = self.other_data(trained_on)
        if different and not new_data:
            raise UsageError(
                f"the checkpoint was trained on {trained_on['data']}, and {self.cfg.data} has other data "
                f"({different}). Resume with the folder of training, train into another --save-dir, or use "
                "--finetune-from-model with another --save-dir to begin a new training from its weights"
            )


def reordering(folder: str, like: str) -> str:
    """How to make a folder with the data of one and the dictionaries of another."""
    return f"`python -m data_prep reorder {folder} --like {like} --out NEW` makes one where the words are the same"


def hash_of_words(dictionary: Dictionary) -> str:
    """SHA-256 of a dictionary's words in their order. Their counts, which no model sees, differ between splits."""
    return hashlib.sha256("\n".join(dictionary.symbols).encode()).hexdigest()


def different_requests(there: list, here: list) -> str:
    """The first difference between the requests of two lists of folders, in words; "" where there is none."""
    if len(there) != len(here):
        return f"{len(there)} folders then, {len(here)} here"
    for one, two in zip(there, here, strict=True):
        for name in sorted({*(one or {}), *(two or {})}):
            values = [(request or {}).get(name) for request in (one, two)]
            if values[0] != values[1]:
                return f"{name} was {values[0]}, and here it is {values[1]}"
    return ""
