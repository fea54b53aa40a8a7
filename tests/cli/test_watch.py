"""``--tensorboard-logdir`` and ``--wandb-project``: our losses and the accuracies by type of example arrive there."""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.commands import SIZES, Result, metrics, run
from helpers.commands import check as check_output

#: name in the log -> values by step
Curves = dict[str, dict[int, float]]
#: What this plugin logs beside fairseq's own: all the time, and where sentences have types.
OURS = {"accuracy", "token_accuracy", "orthogonality_encoder", "share_nll", "share_orthogonality_encoder"}
TYPES = {"valid": {f"accuracy_length_{n}" for n in (4, 5, 6)}, "gen": {f"accuracy_length_{n}" for n in (8, 9)}}


def train(data: Path, folder: Path, *more: object, **env: str) -> str:
    fixed = (
        "--user-dir fairseq_sg --task sg_translation --accuracy-by types --arch sg_transformer --orthogonality-weight "
        "1e-3 --criterion cross_entropy_orthogonality --optimizer torch_adam --lr 5e-3 --batch-size 32 "
        "--batch-size-valid 64 --valid-subset valid,gen --no-epoch-checkpoints --cpu --log-format json --log-interval "
        "4 --max-epoch 2"
    )
    code, out, err = run("fairseq-train", data, *fixed.split(), *SIZES, "--save-dir", folder, *more, **env)
    # wandb comments on how fairseq calls it.
    others = "\n".join(line for line in err.splitlines() if not line.startswith("wandb: "))
    return check_output(Result(code, out, others))


def check(curves: dict[str, Curves], printed: str) -> None:
    """``curves``, by fairseq's names of its reports, are those of the log."""
    assert {"train_inner", "train", "valid", "gen"} == set(curves)
    for report in ("train", "valid", "gen"):
        logged = metrics(printed, report)
        assert len(logged) == 2 and (OURS | TYPES.get(report, set())) <= set(logged[0])
        for name in set(logged[0]) - {"epoch", "num_updates"}:
            expected = {int(epoch["num_updates"]): epoch[name] for epoch in logged if name in epoch}
            assert curves[report][name] == pytest.approx(expected, rel=1e-6), (report, name)
    assert list(curves["train_inner"]["share_orthogonality_encoder"]) == [4, 8, 12, 16, 20]


def test_tensorboard(labelled, tmp_path):
    pytest.importorskip("tensorboardX")
    printed = train(labelled, tmp_path / "model", "--tensorboard-logdir", tmp_path / "logs")
    check({folder.name: scalars(folder) for folder in (tmp_path / "logs").iterdir()}, printed)


def scalars(folder: Path) -> Curves:
    """The curves in a folder of TensorBoard's event files, which are records of protobuf messages:

    length uint64, checksum uint32, message, checksum uint32
    """
    from tensorboardX.proto.event_pb2 import Event

    curves: Curves = defaultdict(dict)
    for file in sorted(folder.glob("events.*")):
        content, start = file.read_bytes(), 0
        while start < len(content):
            (length,) = struct.unpack_from("<Q", content, start)
            event = Event.FromString(content[start + 12 : start + 12 + length])
            start += length + 16
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    curves[value.tag][event.step] = value.simple_value
    return curves


def test_weights_and_biases(labelled, tmp_path):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")
    # An installed command sees the package where this process found it.
    env = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "PYTHONPATH": str(Path(wandb.__file__).parents[1])}
    printed = train(labelled, tmp_path / "model", "--wandb-project", "tests", **env)
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    check(history(file), printed)


def history(file: Path) -> dict[str, Curves]:
    """The curves of a run that was recorded offline, by report; the records of the file are protobuf messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    curves: dict[str, Curves] = defaultdict(lambda: defaultdict(dict))
    for content in records(file.read_bytes()):
        items = {item.key or "/".join(item.nested_key): item for item in Record.FromString(content).history.item}
        for name in items.keys() - {"_step", "_runtime", "_timestamp"}:
            report, _, metric = name.partition("/")
            curves[report][metric][json.loads(items["_step"].value_json)] = json.loads(items[name].value_json)
    return curves


def records(content: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format, after a header of 7 bytes.

    Blocks have 32 KiB. In them are parts of records: checksum uint32, length uint16, kind uint8 (1 all of a record, 2
    its first part, 3 a middle one, 4 the last), bytes. Less than 7 bytes at the end of a block are padding.
    """
    record, start = b"", 7
    while start + 7 <= len(content):
        left = 32768 - start % 32768
        if left < 7:
            start += left
            continue
        length, kind = struct.unpack_from("<HB", content, start + 4)
        record += content[start + 7 : start + 7 + length]
        start += 7 + length
        if kind in (1, 4):
            yield record
            record = b""
