"""The training of masks on a model's weights, and its state for --resume (``masks``)."""

from __future__ import annotations

import argparse
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq_sg.analysis.checkpoint import Loaded
from fairseq_sg.analysis.examples import Examples, interleaved, open_examples
from fairseq_sg.errors import UsageError, in_one_line
from fairseq_sg.files import replacing
from fairseq_sg.modules.masks import MaskTraining, WeightMasks, replaced, select
from fairseq_sg.tasks.streams import Streams

#: The options that decide the masks, beside β.
TRAINED_WITH = (
    "steps",
    "batch_size",
    "samples",
    "lr",
    "clip_norm",
    "initial_logit",
    "parameters",
    "seed",
)
#: Tokens of a text that are hashed at a time.
BLOCK = 1 << 20


# The parameters.


@torch.no_grad()
def maskable(loaded: Loaded, which: str) -> tuple[dict[str, Tensor], list[str]]:
    """The parameters to mask, and the names of those that no output depends on, which are left as they are.

    The outputs are those of 64 training examples, whatever the part of the mask: all masks of one model have the same
    tensors.

    Raises UsageError for a choice that names none.
    """
    try:
        names = select(loaded.model, which)
    except ValueError as error:
        raise UsageError(f"--parameters: {error}") from None
    parameters = {name: parameter for name, parameter in loaded.model.named_parameters() if name in set(names)}
    examples = open_examples(loaded, getattr(loaded.task.cfg, "train_subset", "train"))
    every = np.arange(0 if examples.is_text else len(examples))  # batches of a text do not read it
    drawn = batches(examples, every, 64, 1, torch.Generator().manual_seed(0))
    inputs = next(drawn)[0]["net_input"]
    output = loaded.model(**inputs)[0]
    idle = []
    for name, parameter in parameters.items():
        with replaced(loaded.model, {name: torch.zeros_like(parameter)}):
            if torch.equal(loaded.model(**inputs)[0], output):
                idle.append(name)
    used = {name: parameter for name, parameter in parameters.items() if name not in idle}
    if not used:
        raise UsageError(f"--parameters {which}: no output depends on {', '.join(idle[:3])}")
    return used, idle


def fingerprint(parameters: Mapping[str, Tensor]) -> str:
    """SHA-256 of the names and values of the weights: masks of one network can be compared."""
    found = hashlib.sha256()
    for name, parameter in parameters.items():
        found.update(name.encode() + parameter.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


# Training.


def batches(
    examples: Examples, chosen: np.ndarray, size: int, parts: int, generator: torch.Generator
) -> Iterator[list[dict[str, Any]]]:
    """Yields batches of ``size`` examples without end, drawn uniformly with replacement, in ``parts`` of like lengths.

    Of a text, the parts are segments of parallel streams from places drawn at random, without memory.
    """
    if examples.is_text:
        rows = max(1, size // parts)
        streams = Streams(examples.dataset, rows, rows, examples.loaded.task.cfg.tokens_per_sample, all_tokens=True)
        places = streams.batches()
        while True:
            drawn = torch.randint(len(places), (parts,), generator=generator).tolist()
            yield [examples.collate(places[number], streams) for number in drawn]
    while True:
        drawn = chosen[torch.randint(len(chosen), (size,), generator=generator).numpy()]
        yield [examples.collate(part) for part in interleaved(examples, drawn, parts)]


def train(
    loaded: Loaded,
    examples: Examples,
    chosen: np.ndarray,
    parameters: Mapping[str, Tensor],
    beta: float,
    state_file: str,
    args: argparse.Namespace,
) -> dict[str, Tensor]:
    """The trained logits by name, on the CPU. ``--resume`` continues from the state file, bit for bit.

    Raises UsageError for a state file that cannot be read, or with more steps.
    """
    criterion = loaded.task.build_criterion(loaded.cfg.criterion).to(loaded.device).eval()
    masks = WeightMasks(parameters, args.initial_logit)
    training = MaskTraining(
        loaded.model, masks, alpha=beta / args.batch_size, lr=args.lr, clip=args.clip_norm, seed=args.seed
    )
    draw = torch.Generator().manual_seed(args.seed)
    request = request_of(examples, chosen, parameters, beta, args)
    state = read_state(state_file, request) if args.resume and os.path.isfile(state_file) else None
    if state:
        training.load_state_dict(state["training"])
        draw.set_state(state["draw"])
        if training.steps > args.steps:
            raise UsageError(f"{state_file} has {training.steps} steps already: give --steps that many or more")
        print(f"resuming from step {training.steps} of {state_file}", flush=True)

    def save() -> None:
        save_state(state_file, {"request": request, "training": training.state_dict(), "draw": draw.get_state()})

    def loss_of(batch: dict[str, Any], size: int) -> Callable[[], Tensor]:
        return lambda: criterion(loaded.model, batch)[0] / size

    stream = batches(examples, chosen, args.batch_size, args.samples, draw)
    while training.steps < args.steps:
        parts = next(stream)
        size = sum(len(part["target"]) for part in parts)
        loss = training.step([loss_of(part, size) for part in parts])
        if not math.isfinite(loss):
            raise UsageError(f"the loss of the masks is {loss} at step {training.steps}: lower --lr")
        if training.steps % args.log_interval == 0 or training.steps == args.steps:
            share = 100 * float((masks.logits > 0).double().mean())
            print(f"step {training.steps} of {args.steps}: loss {loss:.4f}, {share:.2f} % kept", flush=True)
        if training.steps % args.save_interval == 0 or training.steps == args.steps:
            save()
    return {name: values.cpu() for name, values in masks.named(masks.logits.detach()).items()}


def request_of(
    examples: Examples, chosen: np.ndarray, parameters: Mapping[str, Tensor], beta: float, args: argparse.Namespace
) -> dict[str, Any]:
    """What decides the masks, but for the number of steps: only a state of the same request is continued."""
    return {name: getattr(args, name) for name in TRAINED_WITH if name != "steps"} | {
        "beta": beta,
        "network": fingerprint(parameters),
        "examples": hashlib.sha256(chosen.tobytes()).hexdigest(),
        "text": hash_of(examples, chosen),
        "subset": examples.name,
        "model_overrides": {name: value for name, value in args.model_overrides.items() if name != "data"},
    }


def hash_of(examples: Examples, chosen: np.ndarray) -> str:
    """The hash of the tokens of some examples; of a text, of all of it."""
    found, dataset = hashlib.sha256(), examples.dataset
    if examples.is_text:
        for start in range(0, len(dataset), BLOCK):
            found.update(dataset.read(start, min(start + BLOCK, len(dataset))).numpy().tobytes())
        return found.hexdigest()
    for number in chosen.tolist():
        sample = dataset[number]
        if not isinstance(sample, dict):  # a question on an image: the collater reads the arrays
            batch = dataset.collater([sample])
            sample = batch["net_input"] | {"target": batch["target"]}
        for name, values in sorted(sample.items()):
            if torch.is_tensor(values):
                found.update(f"{name} {tuple(values.shape)}".encode() + values.contiguous().numpy().tobytes())
    return found.hexdigest()


def save_state(path: str, state: Mapping[str, Any]) -> None:
    with replacing(path) as temporary:
        torch.save(state, temporary)


def read_state(path: str, request: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state of an interrupted training; None, with a message, for one of other options or of another network.

    Raises UsageError for a file that cannot be read.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        before = {"model_overrides": {}} | state["request"]
    except Exception as error:
        raise UsageError(
            f"{path} cannot be read ({in_one_line(error)}): restore a copy, or choose another --out"
        ) from error
    different = [name for name in request if before.get(name) != request[name]]
    if different:
        name = different[0]
        print(
            f"{path} is of another training ({name} was {before.get(name)}, and is {request[name]}): the masks are "
            "trained from the start"
        )
        return None
    return state
