"""The quickstart: reading of fairseq's logs, skipped and refused runs, and one real, tiny run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import quickstart  # noqa: E402
import runs  # noqa: E402

LOG = """\
$ fairseq-train …
2026-01-01 10:00:00 | INFO | fairseq_cli.train | some line
2026-01-01 10:00:10 | INFO | train_inner | {"epoch": 1, "loss": "2.5", "num_updates": "100", "lr": "0.001"}
2026-01-01 10:01:00 | INFO | valid | {"epoch": 1, "valid_accuracy": "12.5", "valid_nll_loss": "0.75", "valid_num_updates": "100"}
2026-01-01 10:01:30 | INFO | gen | {"epoch": 1, "gen_accuracy": "1.25", "gen_nll_loss": "1.5", "gen_num_updates": "100"}
2026-01-01 10:02:00 | INFO | valid | {"epoch": 1, "valid_accuracy": "50", "valid_nll_loss": "0.5", "valid_num_updates": "200"}
2026-01-01 10:03:00 | INFO | train_inner | {"epoch": 1, "loss": "inf", "num_updates": "250"}
not a log line | INFO | valid | {broken
"""  # noqa: E501


@pytest.fixture
def run(tmp_path) -> runs.Run:
    folder = tmp_path / "linear-seed1"
    folder.mkdir()
    (folder / "train.log").write_text(LOG.replace("not a log line | INFO | valid | {broken", "killed in mid-wri"))
    return runs.Run("linear", 1, folder, Path("data"), 400, ["--arch", "x"], {"valid": "IID", "gen": "OOD"})


def test_curve_and_position(run):
    assert runs.curve(run) == [
        {"step": 100, "valid": 12.5, "valid_loss": 0.75, "gen": 1.25, "gen_loss": 1.5},
        {"step": 200, "valid": 50.0, "valid_loss": 0.5},
    ]
    assert runs.position(run) == {"step": 250, "valid": 50.0, "gen": 1.25}


def test_partial_result_is_cut_at_the_step(run):
    partial = runs.partial_result(run, 100)
    assert partial["minutes"] == 1.5
    assert partial["result"]["steps"] == 100 and partial["result"]["accuracy"] == {"valid": 12.5, "gen": 1.25}
    assert runs.partial_result(run, 200) is None  # only one subset was evaluated there
    assert runs.partial_result(run, 300) is None


def test_a_folder_with_other_settings_is_refused(run):
    runs.write_json(
        run.folder / "run.json", {"settings": runs._settings(run), "minutes": 1.0, "result": {"steps": 400}}
    )
    assert runs.result_of(run) == {"steps": 400}
    run.steps = 500
    assert runs.result_of(run) is None  # goes on
    run.arguments = ["--arch", "y"]
    with pytest.raises(ValueError, match="holds a training with other settings"):
        runs.result_of(run)


def test_fewer_steps_than_a_stopped_training_has_made_are_refused(run):
    """Otherwise the evaluation would be reported as that of fewer steps."""
    run.steps = 150
    with pytest.raises(
        ValueError, match="holds a training at step 200, beyond the requested 150: request more steps, or choose"
    ):
        runs.run_all([run], 1, lambda *_: None)
    assert not (run.folder / "run.json").exists()


def test_every_commit_and_machine_that_a_training_was_started_at_is_told(run, monkeypatch):
    monkeypatch.setattr(runs, "_launch", lambda *_, **__: None)
    for commit in ("aaa", "aaa", "bbb"):
        monkeypatch.setenv("SG_COMMIT", commit)
        runs._start(run, {})["lock"].close()
    record = runs.saved(run)
    assert [(start["step"], start["commit"]) for start in record["starts"]] == [(250, "aaa"), (250, "bbb")]
    before = {"commit": "ccc", "machine": {"cpu": "x"}}  # as records were
    summary = quickstart.common_summary(SimpleNamespace(seeds=[1]), [record, before, {}])
    assert summary["commits"] == ["aaa", "bbb", "ccc"] and {"cpu": "x"} in summary["machines"]


def test_a_report_does_not_cut_trainings_for_one_that_diverged(run, tmp_path):
    good, bad, going = (replace(run, folder=tmp_path / name, name=name) for name in ("good", "bad", "going"))
    for one, more in ((good, {"result": {"steps": 400}}), (bad, {"diverged": {"step": 250, "why": "nan"}})):
        one.folder.mkdir()
        (one.folder / "train.log").write_text(LOG)
        runs.write_json(one.folder / "run.json", {"settings": runs._settings(one), "name": one.name} | more)
    found = quickstart.report([good, bad])
    assert found[0]["result"] == {"steps": 400} and "result" not in found[1] and "diverged" in found[1]
    going.folder.mkdir()
    (going.folder / "train.log").write_text(LOG)
    found = quickstart.report([good, bad, going])
    assert [record.get("result", {}).get("steps") for record in found] == [100, None, 100]


def test_generated_output_is_scored(tmp_path):
    path = tmp_path / "generate.log"
    path.write_text(
        "S-0\tjump\nT-0\tA B\nH-0\t-0.1\tA B\nD-0\t-0.1\tA B\nT-1\tA\nD-1\t-0.2\tA A\nT-2\tC\nD-2\t-0.2\t\n"
        "Generate gen with beam=1: BLEU = 41.50 1/1/1/1 (BP = 1.000)\n"
    )
    assert runs._generated(path) == {"exact_match": pytest.approx(100 / 3), "bleu": 41.5, "sentences": 3}


def test_table_and_plot_with_a_failure_and_several_seeds(tmp_path):
    def record(name, seed, iid, ood):
        curve = [{"step": s, "valid": iid * s / 10, "gen": ood * s / 10} for s in (5, 10)]
        generated = {subset: {"bleu": 50.0, "exact_match": ood, "sentences": 3} for subset in ("valid", "gen")}
        result = {"steps": 10, "accuracy": {"valid": iid, "gen": ood}, "generated": generated, "curve": curve}
        return {"name": name, "seed": seed, "folder": f"runs/{name}-seed{seed}", "minutes": 2.0, "result": result}

    failed = {"name": "relative", "seed": 1, "folder": "runs/relative-seed1", "failed": "training"}
    summary = {
        "what": "test", "command": "c", "commits": ["abc"], "machines": [{"cpu": "x"}], "steps": 10, "batch_size": 4,
        "length_window": 1,
        "seeds": [1, 2],
        "published": {m: dict(zip(("IID", "OOD", "source"), quickstart.PUBLISHED[m])) for m in quickstart.MODELS},
        "runs": [record("linear", 1, 100.0, 40.0), record("linear", 2, 98.0, 20.0), failed],
    }  # fmt: skip
    rows = quickstart.table(summary)
    assert rows[1][:6] == ["linear", "10", "99.0 ± 1.4", "30.0 ± 14.1", "50.0 ± 0.0", "2.0 ± 0.0"]
    assert rows[2][:3] == ["relative", "failed", "–"]
    assert "| linear | 10 | 99.0 ± 1.4 |" in quickstart.as_markdown(summary)
    quickstart.plot(summary, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def command(*arguments: object, **kwargs) -> subprocess.CompletedProcess:
    line = [sys.executable, "scripts/quickstart.py", *map(str, arguments)]
    return subprocess.run(
        line, cwd=REPOSITORY, env=runs.environment(), capture_output=True, text=True, timeout=600, **kwargs
    )


def test_wrong_arguments():
    wrong = command("--models", "absolute,quadratic")
    assert wrong.returncode == 2
    assert (
        "unknown model 'quadratic': choose from absolute, relative, linear, linear-l2, linear-l2-orthogonality, or all"
        in wrong.stderr
    )
    for option, value in (("--steps", 100), ("--batch-size", 8), ("--models", "linear"), ("--length-window", 1024)):
        wrong = command("--paper", option, value)
        assert wrong.returncode == 2 and f"--paper sets {option}: omit one of them" in wrong.stderr


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """Forty commands each, in a folder of data_prep's form."""
    from data_prep.binarize import binarize
    from data_prep.scan_grammar import generate
    from data_prep.text import write_lines

    folder = tmp_path_factory.mktemp("tiny")
    (folder / "raw").mkdir()
    pairs = generate()
    subsets = {"train": pairs[:200:5], "valid": pairs[1:200:5], "gen": pairs[20000:20400:10]}
    for name, chosen in subsets.items():
        write_lines(folder / "raw" / f"{name}.src", (p.source for p in chosen))
        write_lines(folder / "raw" / f"{name}.tgt", (p.target for p in chosen))
    binarize(folder, subsets)
    (folder / "dataset.json").write_text("{}")
    return folder


def test_trains_evaluates_skips_and_continues(tiny, tmp_path):
    arguments = [
        "--models", "linear-l2-orthogonality", "--batch-size", 16, "--validate-every", 2, "--device", "cpu",
        "--data", tiny,
        "--out", tmp_path / "out", "--results", tmp_path / "results" / "table",
    ]  # fmt: skip
    first = command("--steps", 4, *arguments)
    assert first.returncode == 0, first.stderr + first.stdout
    summary = json.loads((tmp_path / "results" / "table.json").read_text())
    (record,) = summary["runs"]
    assert record["result"]["generated"]["gen"]["sentences"] == 40
    assert [p["step"] for p in record["result"]["curve"]] == [2, 4]
    assert record["result"]["accuracy"]["gen"] == record["result"]["generated"]["gen"]["exact_match"]
    assert record["commands"][0].startswith("fairseq-train ") and "--orthogonality-weight 1e-4" in record["commands"][0]
    for suffix in (".md", ".png"):
        assert (tmp_path / "results" / "table").with_suffix(suffix).stat().st_size > 200
    log = (tmp_path / "out" / "linear-l2-orthogonality-seed1" / "train.log").read_text()

    again = command("--steps", 4, *arguments)
    assert again.returncode == 0 and "linear-l2-orthogonality" in again.stdout
    assert (tmp_path / "out" / "linear-l2-orthogonality-seed1" / "train.log").read_text() == log  # nothing was trained

    further = command("--steps", 6, *arguments)
    assert further.returncode == 0, further.stderr
    summary = json.loads((tmp_path / "results" / "table.json").read_text())
    assert [p["step"] for p in summary["runs"][0]["result"]["curve"]] == [2, 4, 6]

    other = command("--steps", 6, *arguments, "--batch-size", 8)
    assert other.returncode == 1 and "holds a training with other settings" in other.stderr


def test_a_folder_in_use_is_refused_and_a_stopped_training_goes_on(tiny, tmp_path):
    arguments = [
        "--models", "linear", "--batch-size", 16, "--validate-every", 2, "--device", "cpu", "--data", tiny,
        "--out", tmp_path / "out",
    ]  # fmt: skip
    line = [sys.executable, "scripts/quickstart.py", "--steps", "100000", *map(str, arguments)]
    pipe = subprocess.PIPE
    first = subprocess.Popen(line, cwd=REPOSITORY, env=runs.environment(), stdout=pipe, stderr=pipe, text=True)
    log = tmp_path / "out" / "linear-seed1" / "train.log"
    while not (log.parent / "checkpoint_last.pt").exists():
        assert first.poll() is None, first.stderr.read()
        time.sleep(0.2)
    second = command("--steps", 100000, *arguments)
    assert second.returncode == 1 and "another process is training there" in second.stderr
    first.terminate()
    _, errors = first.communicate(timeout=60)
    assert first.returncode == 130 and "stopped; the same command resumes from the last checkpoints" in errors
    reached = runs.curve(runs.Run("", 1, log.parent, tiny, 0, [], quickstart.SUBSETS))[-1]["step"]
    rest = command("--steps", reached + 4, *arguments)
    assert rest.returncode == 0, rest.stderr
    assert "Loaded checkpoint" in log.read_text()
