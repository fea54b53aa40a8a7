"""The choice by measurements: with invented timing tables, and files that are stale, damaged or foreign."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fairseq_sg.ops import cvmm, dispatch, relative_logits, tuning
from fairseq_sg.ops.dispatch import AUTO, choose
from fairseq_sg.ops.operators import OPERATORS
from fairseq_sg.ops.tuning import Point, Tuning

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
TRITON = ("cvmm", "geometric_attention", "linear_attention", "relative_attention")


def ms(**medians: float) -> dict[str, list[float]]:
    return {name: [0.9 * median, median, 1.1 * median] for name, median in medians.items()}


def table(points, device=GPU, **verdicts) -> Tuning:
    key = dict.fromkeys(tuning.KEY, "here") | {"driver": "550.1" if device == GPU else ""}
    return Tuning(key, verdicts, [Point(*point) for point in points])


@pytest.fixture
def chosen(monkeypatch):
    """The name that a call runs, on a machine with a tuning."""

    def function(found, operator, sizes, device=GPU, dtype=torch.float32, why_not=None, implementation=AUTO):
        monkeypatch.setattr(dispatch, "tuning_on", lambda device: found)
        like = SimpleNamespace(device=device, dtype=dtype)
        run = choose(operator, implementation, like, sizes, lambda: why_not)
        return next(name for name, one in OPERATORS[operator].implementations.items() if one is run)

    return function


LINEAR = [
    ("linear_attention", "float32", (64, 64, 16), ms(chunked=1.0, triton=0.95)),
    ("linear_attention", "float32", (64, 1024, 16), ms(chunked=1.0, triton=0.96)),
    ("linear_attention", "bfloat16", (64, 64, 16), ms(chunked=1.0, triton=3.0)),
]
VERIFIED = {"linear_attention": {"chunked": "", "triton": ""}}


def test_a_verified_kernel_runs_near_sizes_at_which_it_is_faster_by_5_percent(chosen):
    found = table(LINEAR, **VERIFIED)
    for sizes, name in {
        (64, 64, 16): "triton",
        (100, 90, 30): "triton",
        (1, 1, 1): "triton",
        (64, 200, 16): "triton",
        (64, 600, 16): "chunked",
        (64, 100_000, 16): "chunked",
        (): "chunked",  # of a call that nothing was measured for
    }.items():
        assert chosen(found, "linear_attention", sizes) == name, sizes


@pytest.mark.parametrize(
    ("dtype", "name"), [("bfloat16", "chunked"), ("float16", "chunked"), ("float32", "triton"), ("float64", "chunked")]
)
def test_dtypes(dtype, name, chosen):
    """float16 takes bfloat16's measurements; for float64 there are none."""
    assert chosen(table(LINEAR, **VERIFIED), "linear_attention", (64, 64, 16), dtype=getattr(torch, dtype)) == name


@pytest.mark.parametrize(
    "verdict", [None, "it crashed: SIGSEGV", "gradient of k is off by 1.0, and 1.0e-05 is allowed"]
)
def test_a_kernel_that_is_not_verified_never_runs(verdict, chosen):
    verdicts = {"chunked": ""} | ({} if verdict is None else {"triton": verdict})
    found = table(
        [("linear_attention", "float32", (64, 64, 16), ms(chunked=1.0, triton=0.01))], linear_attention=verdicts
    )
    assert chosen(found, "linear_attention", (64, 64, 16)) == "chunked"
    assert chosen(found, "linear_attention", (64, 64, 16), implementation="triton") == "triton"  # by name it does


def test_a_kernel_does_not_get_calls_that_it_cannot_take(chosen):
    found = table(LINEAR, **VERIFIED)
    assert chosen(found, "linear_attention", (64, 64, 16), why_not="rows have 9000 keys") == "chunked"


def test_the_default_is_replaced_where_it_fails(chosen):
    found = table([], cvmm={"grouped": "it is off", "triton": "", "naive": ""}, linear_attention={"chunked": "off"})
    assert chosen(found, "cvmm", (4, 4, 4)) == "naive"  # a kernel runs where it was measured to be faster alone
    assert chosen(found, "linear_attention", (4, 4, 4)) == "naive"
    on_cpu = table([], CPU, cvmm={"grouped": "it is off"})
    assert chosen(on_cpu, "cvmm", (4, 4, 4), CPU) == "blocks"


def test_without_a_file_rules_decide(chosen):
    for operator in TRITON:
        known = OPERATORS[operator]
        assert chosen(None, operator, (1 << 20,) * len(known.sizes)) == known.default
    assert chosen(None, "cvmm", (256, 4096, 64), CPU) == "blocks"
    assert chosen(None, "cvmm", (255, 4096, 64), CPU) == "grouped"
    assert chosen(None, "relative_logits", (4, 512, 16, 16), CPU) == "naive"
    assert chosen(None, "relative_logits", (4, 512, 16, 16), CPU, torch.float16) == "shift"


def test_measurements_against_a_rule(chosen):
    """The one to beat is that of the rule for the call; where nobody does, it runs."""
    points = [
        ("cvmm", "float32", (512, 4096, 64), ms(grouped=1.0, blocks=1.2)),
        ("cvmm", "float32", (16, 4096, 64), ms(grouped=1.0, blocks=0.97)),
    ]
    found = table(points, CPU, cvmm={"grouped": "", "blocks": ""})
    assert chosen(found, "cvmm", (512, 4096, 64), CPU) == "grouped"
    assert chosen(found, "cvmm", (16, 4096, 64), CPU) == "grouped"
    # Half precision was not measured.
    assert chosen(found, "cvmm", (512, 4096, 64), CPU, torch.bfloat16) == "blocks"


def test_the_rule_of_a_call_is_measured_at_the_nearest_sizes(chosen):
    """On either side of a rule's threshold, what was five times as fast nearby runs."""
    fast = [("cvmm", "float32", (256, 4096, 64), ms(grouped=10.0, blocks=2.0))]
    slow = [("cvmm", "float32", (255, 4096, 64), ms(grouped=2.0, blocks=10.0))]
    for points, name in ((fast, "blocks"), (slow, "grouped")):
        found = table(points, CPU, cvmm={"grouped": "", "blocks": ""})
        assert [chosen(found, "cvmm", (rows, 4096, 64), CPU) for rows in (200, 300)] == [name, name]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(tuning.FOLDER_VARIABLE, str(tmp_path / "not" / "there"))
    tuning.tuning_on.cache_clear()
    yield tmp_path / "not" / "there"
    tuning.tuning_on.cache_clear()


def here() -> Tuning:
    """A file of this CPU, by which everything runs otherwise than by the rules."""
    points = [
        Point("cvmm", "float32", (16, 4096, 64), ms(grouped=2.0, blocks=1.0)),
        Point("relative_logits", "float32", (1, 512, 16, 16), ms(shift=2.0, naive=1.0)),
    ]
    verdicts = {"cvmm": {"grouped": "", "blocks": ""}, "relative_logits": {"shift": "", "naive": ""}}
    return Tuning(tuning.key_of(CPU), verdicts, points)


def test_what_is_written_is_read_and_followed(folder, monkeypatch):
    tuning.write(here(), tuning.path_of(CPU))
    assert [path.name for path in folder.iterdir()] == [tuning.path_of(CPU).name]
    assert tuning.read(tuning.path_of(CPU), CPU) == here()
    ran = []
    for operator in ("cvmm", "relative_logits"):
        for name in ("naive", "blocks", "grouped", "shift"):
            if name in OPERATORS[operator].implementations:
                monkeypatch.setitem(OPERATORS[operator].implementations, name, lambda *a, name=name: ran.append(name))
    q, p = torch.zeros(2, 1, 3, 8), torch.zeros(1, 5, 8)
    relative_logits(q, p)
    relative_logits(q.half(), p.half())
    cvmm(torch.zeros(8, 1), torch.zeros(8, dtype=torch.long), torch.zeros(2, 1, 1))
    assert ran == ["naive", "shift", "blocks"]


def damaged(text: str):
    def write(path: Path) -> str:
        path.write_text(text)
        return "it is damaged"

    return write


def changed(**changes: object):
    def write(path: Path) -> str:
        content = json.loads(here().as_json())
        for place, value in changes.items():
            *folders, last = place.split("__")
            inner = content
            for one in folders:
                inner = inner[int(one) if one.isdigit() else one]
            inner[last] = value
        path.write_text(json.dumps(content))
        other = "other" if last == "operators" else "another"
        return f"it is of {other} {last}, {value!r} and not" if folders == ["key"] else "it is damaged"

    return write


@pytest.mark.parametrize(
    "write",
    [
        damaged(""),
        damaged("{"),
        damaged("[]"),
        damaged('{"key": {}, "verdicts": {}, "points": []}'),
        damaged("[" * 100_000),
        damaged("\ufeff\x00"),
        changed(verdicts__cvmm={"groupt": ""}),
        changed(verdicts__cvmm={"grouped": 3}),
        changed(verdicts={"cvm": {}}),
        changed(points__0__operator="cvm"),
        changed(points__0__dtype="float31"),
        changed(points__0__dtype="nn"),
        changed(points__0__sizes=[1, 2]),
        changed(points__0__sizes=[1, 2, "3"]),
        changed(points__0__sizes=[1, 2, -3]),
        changed(points__0__ms={"naive": [1, 1, 1]}),  # which never runs by default
        changed(points__0__ms={"blocks": [1, 0, 1]}),
        changed(points__0__ms={"blocks": [1, float("nan"), 1]}),
        changed(points__0__ms={"blocks": 1}),
        changed(points__0__more=1),
        changed(points=3),
        changed(key__device="NVIDIA A100"),
        changed(key__driver="550.1"),
        changed(key__torch="2.4.0"),
        changed(key__triton="2.4.0"),
        changed(key__operators="0123"),
    ],
    ids=lambda write: str([cell.cell_contents for cell in write.__closure__])[:60],
)
def test_other_files_are_ignored_with_one_line(write, folder, caplog):
    folder.mkdir(parents=True)
    reason = write(tuning.path_of(CPU))
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            relative_logits(torch.zeros(2, 1, 3, 8), torch.zeros(1, 5, 8))
    (message,) = caplog.messages
    assert message.startswith(f"{tuning.path_of(CPU)} is ignored: {reason}") and "\n" not in message
    assert message.endswith("Write it again: python -m fairseq_sg.kernels tune --device cpu")
    assert tuning.tuning_on(CPU) is None


def test_a_file_that_cannot_be_read(folder, caplog):
    tuning.path_of(CPU).mkdir(parents=True)
    assert tuning.tuning_on(CPU) is None and "is ignored: " in caplog.text


def test_a_pipe_and_a_huge_file_are_not_read(folder, monkeypatch):
    folder.mkdir(parents=True)
    os.mkfifo(folder / "pipe")
    (folder / "huge").write_text(here().as_json() + " " * tuning.LARGEST)
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path.name} is read"))
    for name in ("pipe", "huge"):
        with pytest.raises(ValueError, match="it is damaged"):
            tuning.read(folder / name)
    with pytest.raises(FileNotFoundError):
        tuning.read(folder / "none")


@pytest.mark.parametrize("usable", [True, False])
def test_on_a_gpu_one_line_says_how_to_measure(usable, folder, caplog, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(tuning, "why_not_here", lambda device: None if usable else "Triton is not installed")
    like = SimpleNamespace(device=GPU, dtype=torch.float32)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert choose("cvmm", AUTO, like, (1, 2, 3)) is OPERATORS["cvmm"].implementations["grouped"]
    assert tuning.path_of(GPU).name == "kernels-NVIDIA-H100-80GB-HBM3.json"
    expected = (
        "operators run in torch: `python -m fairseq_sg.kernels tune` takes a few minutes and finds what is faster"
    )
    assert [message[: len(expected)] for message in caplog.messages] == [expected] * usable


def test_nothing_is_said_on_a_cpu_without_a_file(folder, caplog):
    with caplog.at_level(logging.INFO):
        assert tuning.tuning_on(CPU) is None and tuning.tuning_on(torch.device("meta")) is None
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"XDG_CACHE_HOME": "/somewhere"}, "/somewhere/fairseq_sg"),
        ({"XDG_CACHE_HOME": "somewhere", "HOME": "/mine"}, "/mine/.cache/fairseq_sg"),
        ({"XDG_CACHE_HOME": "", "HOME": "/mine"}, "/mine/.cache/fairseq_sg"),
        ({"HOME": "/mine"}, "/mine/.cache/fairseq_sg"),
        ({}, None),  # and the user has no entry in passwd
        ({tuning.FOLDER_VARIABLE: "~/x", "HOME": "/mine"}, "/mine/x"),
        ({tuning.FOLDER_VARIABLE: "~/x"}, None),
        ({tuning.FOLDER_VARIABLE: "x", "XDG_CACHE_HOME": "/somewhere"}, "x"),
        ({tuning.FOLDER_VARIABLE: "", "HOME": "/mine"}, None),
    ],
    ids=str,
)
def test_where_files_are(variables, folder, monkeypatch):
    for name in (tuning.FOLDER_VARIABLE, "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    path = tuning.path_of(CPU)
    assert path is None if folder is None else path.parent == Path(folder)


def test_a_cpu_has_a_file_for_each_number_of_threads():
    torch.set_num_threads(2)
    assert tuning.name_of(CPU).endswith(", 2 threads")
    torch.set_num_threads(1)
    assert tuning.name_of(CPU).endswith(", 1 thread")


def test_others_may_read_a_file(folder):
    path, mask = tuning.path_of(CPU), os.umask(0o022)
    try:
        tuning.write(here(), path)
    finally:
        os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o644


def test_an_interrupted_write_leaves_the_old_file(folder, monkeypatch):
    path = tuning.path_of(CPU)
    tuning.write(here(), path)
    before = path.read_bytes()
    monkeypatch.setattr(Tuning, "as_json", lambda self: "half of it\ud800")  # which no file takes
    with pytest.raises(UnicodeEncodeError):
        tuning.write(here(), path)
    assert path.read_bytes() == before and len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("folder", ["ops", "kernels"])
def test_a_changed_kernel_or_verification_is_another_key(folder, tmp_path, monkeypatch):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "a.py").write_text("x = 1")
    monkeypatch.setattr(tuning, "__file__", str(tmp_path / "ops" / "tuning.py"))
    first = tuning.digest.__wrapped__()
    (tmp_path / folder / "a.py").write_text("x = 2")
    assert tuning.digest.__wrapped__() != first


def test_another_ptxas_is_another_key(monkeypatch):
    monkeypatch.setattr(tuning.importlib.metadata, "version", lambda name: "3.6.0")
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    assert tuning.key_of(CPU)["triton"] == "3.6.0"
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/opt/cuda/bin/ptxas")
    assert tuning.key_of(CPU)["triton"] == "3.6.0, /opt/cuda/bin/ptxas"


def test_compiled_code_keeps_to_the_rules(monkeypatch):
    """Sizes are symbols there."""
    monkeypatch.setattr(dispatch, "tuning_on", lambda device: pytest.fail("it was asked for"))
    torch.compiler.assume_constant_result(dispatch.requested)  # as `fairseq_sg.modules.compilation` does
    compiled = torch.compile(relative_logits, backend="eager", dynamic=True, fullgraph=True)
    for batch in (2, 3, 40):
        q, p = torch.rand(batch, 2, 5, 8), torch.rand(2, 9, 8)
        torch.testing.assert_close(compiled(q, p), relative_logits(q, p, implementation="naive"))
    torch.compiler.reset()
