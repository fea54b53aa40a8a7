"""``fairseq-sg kernels verify`` and ``tune``: their reports, what they keep, and what runs afterwards."""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from fairseq_sg.kernels import __main__ as commands
from fairseq_sg.kernels import keeping, listing, processes
from fairseq_sg.kernels.cases import TIMED, Make
from fairseq_sg.kernels.tune import LIMIT, measure
from fairseq_sg.kernels.verify import Result, Verdict
from fairseq_sg.ops import dispatch, tuning
from fairseq_sg.ops.operators import OPERATORS
from fairseq_sg.ops.tuning import Point
from helpers.commands import environment, launch
from helpers.forked import REPOSITORY

CPU = torch.device("cpu")
#: operator -> its folder, where that has another name
FOLDERS = {"geometric_attention": "geometric", "relative_attention": "relative", "relative_logits": "relative"}


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Where the file of this CPU will be."""
    monkeypatch.setenv(tuning.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(processes, "preload", lambda: None)
    monkeypatch.setattr(listing, "why_not", lambda name, device: None if name != "triton" else "there is no GPU")
    tuning.tuning_on.cache_clear()
    yield tuning.path_of(CPU)
    tuning.tuning_on.cache_clear()


@pytest.fixture
def invented(monkeypatch):
    """Verdicts and times that nothing was run for; what was asked for."""
    asked = SimpleNamespace(verified=[], timed={}, ended="", ends_in=None, unusable="")

    def verdict_of(operator, name, device, quick, parts):
        asked.verified.append((operator, name))
        results = [Result("a case", dtype, 1e-7) for dtype in ("float32", "bfloat16", "float16")]
        if (operator, name) == ("cvmm", "blocks"):
            results.append(Result("33 rows", "float32", 0.3, "gradient of x is off by 3.0e-01, and 1.0e-05 is allowed"))
        if (operator, name) == ("geometric_attention", "triton"):
            return Verdict(operator, name, results, "it crashed: SIGABRT")
        if (operator, name) == ("spectral_multiply", "fft"):
            results.append(Result("8192 points", "float32", cannot="CUDA error: out of memory"))
        if name == "gram":
            results = [Result("a case", "float32", cannot="not on a CPU")]
        return Verdict(operator, name, results, seconds=1.0)

    def points_of(operator, names, device, dtype, most, rounds, shortest):
        asked.timed[operator] = names
        ms = {name: [1.0 + i] * 3 for i, name in enumerate(reversed(names))}  # the last is the fastest
        if len(names) < 2 or (dtype != torch.float32 and asked.ends_in is None):
            return [], asked.ended
        name = str(dtype).removeprefix("torch.")
        points = [Point(operator, name, sizes, ms) for sizes in getattr(TIMED[operator], device)]
        return points, asked.ended if asked.ends_in in (None, dtype) else ""

    def isolated(task, limit):
        return points_of(*task.args) if task.func is measure else ([1.0], asked.unusable)

    monkeypatch.setattr(commands, "isolated", isolated)
    monkeypatch.setattr(commands.verify, "verdict_of", verdict_of)
    return asked


def test_verify(path, invented, capsys):
    assert commands.main(["verify", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "cvmm blocks 4 1.0 FAILS: 33 rows, float32: gradient of x is off" in "\n".join(lines)
    assert "cvmm: blocks fails here and never runs by default; grouped runs in its place" in lines
    assert "orthogonality_loss gram cannot run here: not on a CPU" in lines
    assert "cvmm triton cannot run here: there is no GPU" in lines
    assert "linear_attention chunked 3 1.0 1e-07 1e-07 1e-07" in lines
    assert "spectral_multiply fft 3 1.0 not verified: no memory for 1 more; try again" in lines
    unable = sum("cannot run here" in line or "not verified:" in line for line in lines)
    assert (
        f"{sum(len(one.implementations) for one in OPERATORS.values()) - unable - 1} implementations verified, 1 fail"
        in out
    )
    assert f"kept in {path}" in out
    found = tuning.read(path, CPU)
    assert found.verdicts["cvmm"]["grouped"] == "" and "off by 3.0e-01" in found.verdicts["cvmm"]["blocks"]
    assert "gram" not in found.verdicts["orthogonality_loss"] and found.points == []
    assert "fft" not in found.verdicts["spectral_multiply"]
    like = torch.ones(1)
    assert dispatch.choose("cvmm", "auto", like, (512, 4096, 64)) is OPERATORS["cvmm"].implementations["grouped"]


def test_tune(path, invented, capsys):
    """What fails is not timed; what was timed runs; what was verified is not verified again."""
    assert commands.main(["tune", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    operators = ("cvmm", "relative_attention", "relative_logits")
    assert invented.verified == [(o, name) for o in operators for name in OPERATORS[o].candidates("cpu", torch.float32)]
    assert invented.timed == {"cvmm": ["grouped"], "relative_attention": ["shift", "naive"]} | {
        "relative_logits": ["shift", "naive"]
    }
    assert "\ncvmm\nnothing to choose from\n" in out
    assert "dtype    sequences_per_width  heads  length  width  shift  naive  runs\n" in out
    assert "float32  1                    256    16      16     2      1      naive\n" in out
    logits = OPERATORS["relative_logits"].implementations
    assert dispatch.choose("relative_logits", "auto", torch.ones(1), (1, 256, 16, 16)) is logits["naive"]
    assert commands.main(["tune", "--device", "cpu"]) == 0 and len(invented.verified) == 6
    assert commands.main(["verify", "--device", "cpu"]) == 1
    assert len(tuning.read(path, CPU).points) == 12  # they stay


@pytest.fixture
def meanwhile(path, monkeypatch):
    """Makes another command write the file of this CPU while one times, or verifies."""

    def function(stage, write):
        module, name = {"timing": (commands, "isolated"), "verifying": (commands.verify, "verdict_of")}[stage]
        original = getattr(module, name)

        def run(task, *more, **options):
            if stage == "verifying" or task.func is measure:
                found = tuning.read(path) if path.exists() else tuning.Tuning(tuning.key_of(CPU))
                write(found)
                tuning.write(found, path)
            return original(task, *more, **options)

        monkeypatch.setattr(module, name, run)

    return function


@pytest.mark.parametrize("known", [True, False], ids=["verified before", "verified by tune"])
def test_a_failure_that_verify_finds_survives_a_tune_that_began_before(known, path, invented, meanwhile):
    """And what was timed of it never runs."""
    if known:
        commands.main(["verify", "--device", "cpu"])
    meanwhile("timing", lambda found: found.verdicts.setdefault("relative_logits", {}).update(naive="it is off"))
    assert commands.main(["tune", "--device", "cpu"]) == 0
    found = tuning.read(path, CPU)
    assert found.verdicts["relative_logits"] == {"shift": "", "naive": "it is off"}
    assert found.verdicts["relative_attention"]["naive"] == "" and len(found.points) == 12
    logits = OPERATORS["relative_logits"].implementations
    assert dispatch.choose("relative_logits", "auto", torch.ones(1), (1, 256, 16, 16)) is logits["shift"]


def test_points_that_tune_measures_survive_a_verify_that_began_before(path, invented, meanwhile):
    """With its verdict of what verify has no memory for, and with a failure that is not found again."""
    commands.main(["tune", "--device", "cpu"])
    tuned, before = tuning.read(path, CPU), tuning.Tuning(tuning.key_of(CPU), {"cvmm": {"grouped": "it is off"}})
    tuning.write(before, path)

    def write(found):
        found.points = tuned.points
        found.verdicts["spectral_multiply"] = {"fft": ""}

    meanwhile("verifying", write)
    assert commands.main(["verify", "--device", "cpu"]) == 1
    found = tuning.read(path, CPU)
    assert found.points == tuned.points and found.verdicts["spectral_multiply"] == {"fft": "", "naive": ""}
    assert found.verdicts["cvmm"]["grouped"] == "" and "off by 3.0e-01" in found.verdicts["cvmm"]["blocks"]


def test_one_command_at_a_time_writes_the_file(path, invented, monkeypatch):
    """It holds the lock while it reads again and writes."""
    locked = []

    def write(found, path):
        with pytest.raises(BlockingIOError):
            opened = os.open(path.parent, os.O_RDONLY)
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(opened)
        locked.append(path)

    monkeypatch.setattr(keeping, "write", write)
    assert commands.main(["tune", "--device", "cpu"]) == 0 and locked == [path]


def test_an_interrupted_verify_keeps_the_verdicts_that_are_complete(path, invented, capsys, monkeypatch):
    def verdict_of(operator, name, *more, **options):
        if operator >= "geometric_attention":
            raise KeyboardInterrupt
        return complete(operator, name, *more, **options)

    complete = commands.verify.verdict_of
    monkeypatch.setattr(commands.verify, "verdict_of", verdict_of)
    assert commands.main(["verify", "--device", "cpu"]) == 130
    out, err = capsys.readouterr()
    assert err == "interrupted\n" and f"3 verdicts and 0 sizes measured are kept in {path}\n" in out
    found = tuning.read(path, CPU)
    assert list(found.verdicts) == ["cvmm"] and "off by 3.0e-01" in found.verdicts["cvmm"]["blocks"]


def test_an_interrupted_tune_keeps_the_times_of_operators_that_are_complete(path, invented, capsys, monkeypatch):
    """Those of the others are as before."""
    commands.main(["tune", "--device", "cpu"])
    before = tuning.read(path)
    before.points = [replace(point, ms={"shift": [3.0] * 3}) for point in before.points]
    tuning.write(before, path)

    def interrupted(task, limit):
        if task.args[0] == "relative_logits":
            raise KeyboardInterrupt
        return complete(task, limit)

    complete = commands.isolated
    monkeypatch.setattr(commands, "isolated", interrupted)
    capsys.readouterr()
    assert commands.main(["tune", "--device", "cpu"]) == 130
    out, err = capsys.readouterr()
    assert err == "interrupted\n" and "0 verdicts and 6 sizes measured are kept" in out
    found = tuning.read(path)
    assert found.verdicts == before.verdicts and len(found.points) == 12
    assert {(point.operator, *point.ms) for point in found.points} == {
        ("relative_attention", "naive", "shift"),
        ("relative_logits", "shift"),
    }


@pytest.mark.parametrize("command", ["verify", "tune"])
def test_one_that_is_interrupted_before_it_found_anything_keeps_nothing(command, path, invented, capsys, monkeypatch):
    def isolated(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "isolated", isolated)
    assert commands.main([command, "--device", "cpu"]) == 130 and not path.exists()
    assert "; nothing is kept\n" in capsys.readouterr().out


def test_ctrl_c_in_a_terminal(tmp_path):
    """It reaches all processes: they end, one line says so, and the first verdict is kept."""
    command = [sys.executable, "-P", "-m", "fairseq_sg.kernels", "verify", "--device", "cpu"]
    env = environment(PYTHONPATH=str(REPOSITORY), **{tuning.FOLDER_VARIABLE: str(tmp_path)})
    options = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE) | {"text": True, "start_new_session": True}
    # Tests in a shell's background ignore Ctrl-C, and hand that on.
    options["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, env=env, **options) as process:
        for line in process.stdout:
            if line.startswith("cvmm  "):
                break
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate()
    (file,) = tmp_path.iterdir()
    assert (process.returncode, err) == (130, "interrupted\n") and tuning.read(file).verified("cvmm", "naive")


def test_a_device_that_no_process_can_use_says_nothing_of_the_operators(path, invented, capsys):
    invented.unusable = "RuntimeError: out of memory"
    for command in ("verify", "tune"):
        assert commands.main([command, "--device", "cpu"]) == 1 and not path.exists() and invented.verified == []
        assert "error: cpu cannot be used in a process of its own: RuntimeError: out of" in capsys.readouterr().err


def test_on_a_gpu(path, invented, capsys, monkeypatch):
    """From the commands to the choice of a call, with a GPU that is not there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X100")
    monkeypatch.setattr(listing, "why_not", lambda name, device: None)
    assert commands.main(["tune"]) == 0
    out = capsys.readouterr().out
    assert "geometric_attention triton 3 0.0 FAILS: it crashed: SIGABRT, after 3 cases" in " ".join(out.split())
    assert "geometric_attention: triton fails here and never runs by default; scan runs in its place" in out
    assert "float32  16     16      16     2        1       triton\n" in out
    file = path.with_name("kernels-NVIDIA-X100.json")
    assert f"kept in {file}" in out and list(path.parent.iterdir()) == [file]
    like = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.float32)
    for operator, name in {
        "linear_attention": "triton",
        "relative_attention": "triton",
        "cvmm": "triton",
        "geometric_attention": "scan",
        "relative_logits": "shift",
    }.items():
        known = OPERATORS[operator]
        chosen = dispatch.choose(operator, "auto", like, (64,) * len(known.sizes), lambda: None)
        assert chosen is known.implementations[name], operator


def test_a_dtype_whose_timing_ends_early_leaves_the_other(path, invented, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X100")
    monkeypatch.setattr(listing, "why_not", lambda name, device: None)
    invented.ended, invented.ends_in = "AcceleratorError: misaligned address", torch.bfloat16
    assert commands.main(["tune"]) == 0
    message = "cvmm in bfloat16: AcceleratorError: misaligned address, after 8 sizes; its own rule decides"
    assert message in capsys.readouterr().out.splitlines()
    found = tuning.read(path.with_name("kernels-NVIDIA-X100.json")).points
    assert len(found) > 8 and {point.dtype for point in found} == {"float32"}


def test_an_operator_whose_timing_ends_early_is_as_if_not_timed(path, invented, capsys):
    invented.ended = "it took longer than 120 seconds"
    assert commands.main(["tune", "--device", "cpu"]) == 0
    assert (
        "relative_logits: it took longer than 120 seconds, after 6 sizes; its own rule decides"
        in capsys.readouterr().out
    )
    assert tuning.read(path, CPU).points == []


def test_a_file_that_does_not_count_is_replaced(path, invented):
    path.write_text("{")
    assert commands.main(["tune", "--device", "cpu"]) == 0 and tuning.read(path, CPU).points


@pytest.mark.parametrize("command", ["verify", "tune"])
def test_quick_keeps_nothing(command, path, invented, capsys):
    commands.main([command, "--device", "cpu", "--quick"])
    assert "nothing is kept" in capsys.readouterr().out and not path.exists()


def test_a_folder_that_takes_no_file(path, invented, capsys, monkeypatch):
    path.parent.joinpath("file").touch()
    monkeypatch.setenv(tuning.FOLDER_VARIABLE, str(path.parent / "file"))
    assert commands.main(["tune", "--device", "cpu"]) == 1
    assert "cannot be written" in capsys.readouterr().err
    monkeypatch.setenv(tuning.FOLDER_VARIABLE, "")
    assert commands.main(["tune", "--device", "cpu"]) == 0
    assert "nothing is kept, as FAIRSEQ_SG_TUNING is empty" in capsys.readouterr().out


def test_a_folder_in_the_place_of_the_file(path, invented, capsys):
    """It is found before anything is verified."""
    path.mkdir()
    assert commands.main(["verify", "--device", "cpu"]) == 1 and invented.verified == []
    message = "cannot be written (there is a folder of this name): set FAIRSEQ_SG_TUNING to another folder"
    assert capsys.readouterr().err == f"error: {path} {message}\n"


def test_a_home_folder_that_is_not_known(path, invented, capsys, monkeypatch):
    monkeypatch.setenv(tuning.FOLDER_VARIABLE, "~nobody-of-this-name/x")
    assert commands.main(["verify", "--device", "cpu"]) == 1 and invented.verified == []
    message = "the home folder is not known: set FAIRSEQ_SG_TUNING to a folder by its full path"
    assert capsys.readouterr().err == f"error: {message}\n"


def test_there_is_no_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        commands.main(["verify", "--device", "cuda"])
    assert "--device cuda: torch finds no GPU" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("operator", TIMED)
def test_what_is_timed_has_the_sizes_that_it_says(operator, device, monkeypatch):
    """The call, made with its inputs, asks for a choice by these sizes."""
    seen = []

    def choose(name, implementation, like, sizes=(), why_not=None):
        seen.append(sizes)
        raise StopIteration

    monkeypatch.setattr(importlib.import_module(f"fairseq_sg.ops.{FOLDERS.get(operator, operator)}"), "choose", choose)
    make = Make("cpu")
    make.normal = make.positive = lambda *shape: torch.empty(shape, device="meta")
    for sizes in (points := getattr(TIMED[operator], device)):
        case = TIMED[operator].case(make, *sizes)
        with pytest.raises(StopIteration):
            case.function("auto", **case.inputs)
    assert seen == list(points)


def test_every_choice_is_timed():
    for operator, known in OPERATORS.items():
        for device in ("cpu", "cuda"):
            choice = len(known.candidates(device, torch.float32)) > 1
            assert bool(operator in TIMED and getattr(TIMED[operator], device)) == choice, (operator, device)


def test_points_are_measured():
    points = list(measure("relative_logits", ("shift", "naive"), "cpu", torch.float32, None, 2, 0.0))
    assert [point.sizes for point in points] == list(TIMED["relative_logits"].cpu)
    for point in points:
        assert point.dtype == "float32" and list(point.ms) == ["shift", "naive"]
        assert all(0 < low <= median <= high for low, median, high in point.ms.values())
    assert list(measure("relative_logits", ("shift",), "cpu", torch.float32, None, 2, 0.0)) == []


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: out of memory")], ids=str
)
def test_sizes_beyond_the_memory_have_no_point(error, monkeypatch):
    """Wherever the memory ends: in making the inputs, or in running."""
    made = TIMED["relative_logits"].case
    sizes = []

    def limited(make, *of_case):
        sizes.append(of_case)
        if len(sizes) == 2:
            raise error
        return made(make, *of_case)

    monkeypatch.setitem(TIMED, "relative_logits", replace(TIMED["relative_logits"], case=limited))
    points = list(measure("relative_logits", ("shift", "naive"), "cpu", torch.float32, 3, 2, 0.0))
    assert [point.sizes for point in points] == [sizes[0], sizes[2]]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="bash scripts/setup.sh --with-triton")
def test_the_whole_command(tmp_path):
    """In real processes, with the kernels under Triton's interpreter."""
    where = {tuning.FOLDER_VARIABLE: str(tmp_path), "TRITON_INTERPRET": "1"}
    code, out, err = launch("python", "-m", "fairseq_sg.kernels", "verify", "--device", "cpu", "--quick", **where)
    assert (code, err) == (0, ""), out + err
    for operator, known in OPERATORS.items():
        for name in known.implementations:
            (line,) = [line for line in out.splitlines() if line.split()[:2] == [operator, name]]
            assert "cannot run here" not in line and "FAILS" not in line
    assert list(tmp_path.iterdir()) == []


def test_times_are_taken_in_a_process_of_its_own():
    task = partial(measure, "relative_logits", ["shift", "naive"], "cpu", torch.float32, 2, 1, 0.0)
    points, ended = processes.isolated(task, LIMIT)
    assert ended == "" and [point.sizes for point in points] == list(TIMED["relative_logits"].cpu[:2])
