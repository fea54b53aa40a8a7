"""Worker processes of fairseq's batch iterators."""

from __future__ import annotations


def end_workers(*iterators) -> None:
    """At once: the garbage collector waits 5 seconds for each."""
    for of_epochs in iterators:
        if of_epochs.num_workers:
            of_epochs.dataloader._iterator._shutdown_workers()
