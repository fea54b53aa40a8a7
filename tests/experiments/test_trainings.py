"""Real trainings through ``experiments run``: killed and resumed, evaluated twice; translations by SLURM.

Every command runs where the user stands, which is not the clone, with relative paths.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from multiprocessing import Process
from pathlib import Path
from typing import NamedTuple

import pytest

from helpers import commands, forked
from helpers.commands import Result
from helpers.experiment_files import TINY
from helpers.labelled_data import write_labelled

pytest.importorskip("fairseq")

import fairseq_sg
from fairseq_sg.experiments import __main__ as experiments
from fairseq_sg.experiments import jobs, records, report, results
from fairseq_sg.experiments.results import Results

DEEPER = "{'encoder_layers': 4}"
#: A shared layer, evaluated with more steps too.
SHARED = TINY.replace(
    "--no-source-bos --arch sg_lstm_ctl --hidden-dim 32",
    "--arch sg_encoder_ctl --encoder-layers 2 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 --dropout 0\n"
    "  --encoder-attention-heads 2 --encoder-attention relative",
).replace("  OOD-20: {subset: gen, at: 20}\n", f'  OOD-deeper: {{subset: gen, model_overrides: "{DEEPER}"}}\n')
SHARED = SHARED.replace("An LSTM_1", "An encoder_1").replace("    steps: 60\n", "")
#: Masks of every trained model, and a number of them.
MASKS = "masks {checkpoint} --data {tiny} --steps 3 --batch-size 8 --evaluate gen --seed {seed} --device {device}"
SHARED = SHARED.replace(
    "rows:\n",
    "  shared-weights: {subset: gen, metric: analysis, value: overlap/total/iou/mean/0/1, digits: 3}\n"
    "  nothing: {subset: gen, metric: analysis, value: overlap/no/number}\n"
    f"analyses:\n  control: {MASKS}\n  other: {MASKS} --initial-logit 0.01 --lr 0.01\n"
    "  overlap: overlap control={control}.npz other={other}.npz\nrows:\n",
)
STEPS = 120


def environment(**more: str) -> dict[str, str]:
    """This process's, with the package that is tested before any other."""
    return jobs.environment() | {"PYTHONPATH": str(Path(fairseq_sg.__file__).parents[1])} | more


def run(folder: Path, *arguments: object, **more: str) -> Result:
    return commands.run("fairseq_sg.experiments", *arguments, cwd=folder, **environment(**more))


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def wait_for(path: Path, process: Process, log: Path) -> None:
    while not path.exists():
        assert process.is_alive(), log.read_text()
        time.sleep(0.05)


class Trained(NamedTuple):
    """The user's folder, the second command after the kill, whether the first lock outlived its driver, the results."""

    folder: Path
    second: Result
    outlived: bool
    found: Results

    @property
    def good(self) -> Path:
        return self.folder / "out" / "good-tiny-seed1"


PLAN = ("tiny.yaml", "--device", "cpu", "--data", ".", "--out", "out", "--seeds", "1", "--results", "tables/x_v0.2")


def locked(folder: Path) -> bool:
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Trained:
    """Two rows, one of which diverges. The command and its trainings are killed after the first checkpoint."""
    folder = tmp_path_factory.mktemp("user")
    write_labelled(folder / "tiny")
    (folder / "tiny.yaml").write_text(SHARED.replace("STEPS", str(STEPS)))
    log = tmp_path_factory.mktemp("first") / "log"
    words = ("fairseq_sg.experiments", "run", *PLAN, "--jobs", 2)
    first = forked.start(*words, streams=(os.devnull, log, log), cwd=folder, env=environment(SG_COMMIT="first"))
    good = folder / "out" / "good-tiny-seed1"
    wait_for(good / "checkpoint_last.pt", first, log)
    groups = children(first.pid)
    for group in groups:
        os.killpg(group, signal.SIGSTOP)
    first.kill()
    first.join()
    outlived = locked(good)
    for group in groups:
        os.killpg(group, signal.SIGKILL)
    assert "result" not in json.loads((good / "run.json").read_text())
    second = run(folder, "run", *PLAN, "--jobs", 2, SG_COMMIT="second")
    assert second.code == 0, second.out + second.err
    return Trained(folder, second, outlived, results.read(folder / "tables" / "x_v0.2.json"))


def of(found: Results, row: str, seed: int = 1) -> dict:
    return next(record for record in found.records if (record["row"], record["seed"]) == (row, seed))


def test_a_killed_command_leaves_its_trainings_locked_and_is_resumed(trained):
    """kill -9 of the driver: its folder stays busy as long as the training lives."""
    assert trained.outlived and not locked(trained.good)
    assert "Loaded checkpoint" in (trained.good / "train.log").read_text()
    curve = of(trained.found, "good")["result"]["curve"]
    assert [point["step"] for point in curve] == list(range(20, STEPS + 1, 20))
    assert "resumes" not in trained.second.err and "minutes in all" in trained.second.out


def test_trainings_of_one_process_have_the_results_of_two(trained):
    """One of them diverges, and is ended without the other."""
    plan = ["out/beside" if word == "out" else word.replace("tables/x_v0.2", "out/beside/results") for word in PLAN]
    done = run(trained.folder, "run", *plan, "--together", 2)
    assert done.code == 0, done.out + done.err
    found = results.read(trained.folder / "out" / "beside" / "results.json")
    assert of(found, "good")["result"] == of(trained.found, "good")["result"]
    assert of(found, "bad")["diverged"] == of(trained.found, "bad")["diverged"]
    beside = trained.folder / "out" / "beside"
    assert (beside / "together.log").exists() and not locked(beside / "good-tiny-seed1")
    logs = [(beside / f"{name}-tiny-seed1" / "train.log").read_text() for name in ("good", "bad")]
    assert [log.count("$ fairseq-train") for log in logs] == [1, 1] and "done training in" in logs[0]


def test_every_start_has_its_commit_and_machine(trained):
    starts = of(trained.found, "good")["starts"]
    assert [start["commit"] for start in starts] == ["first", "second"] and starts[0]["step"] == 0
    assert starts[1]["step"] >= 20 and all(start["machine"] == records.machine(gpu=False) for start in starts)
    page = (trained.folder / "tables" / "x_v0.2.md").read_text()
    assert "Commits: first, second. Machine: " in page
    assert "Command: `python -m fairseq_sg.experiments run tiny.yaml --seeds 1`." in page


def test_a_divergence_is_a_result(trained):
    bad = of(trained.found, "bad")
    assert "diverged" in bad and "result" not in bad
    assert "bad (seed 1) diverged: " in trained.second.err and "error" not in trained.second.err
    assert "fail, as published" in trained.second.out


def test_the_best_checkpoint_is_evaluated_again(trained):
    """The latest of the best on dev; its numbers are those of the curve there."""
    found = of(trained.found, "good")["result"]
    best = max(found["curve"], key=lambda point: (point["dev"], point["step"]))
    assert found["checkpoint_step"] == best["step"] and found["generated"] == {}
    for subset in ("dev", "valid", "gen"):
        assert found["accuracy"][subset] == pytest.approx(best[subset], abs=0.01)
        assert found["loss"][subset] == pytest.approx(best[f"{subset}_loss"], abs=0.002)


def test_a_further_evaluation_has_its_column(trained):
    """With more steps of the shared layer: other numbers, in the results and in the table."""
    found = of(trained.found, "good")
    deeper = found["result"]["more"][DEEPER]
    assert set(deeper["accuracy"]) == {"dev", "valid", "gen"}
    assert deeper["loss"]["gen"] != pytest.approx(found["result"]["loss"]["gen"], abs=1e-3)
    evaluated = [shlex.split(command) for command in found["commands"] if "--model-overrides" in command]
    assert [command[command.index("--model-overrides") + 1] for command in evaluated] == [DEEPER]
    rows = [line.split(" | ") for line in (trained.folder / "tables" / "x_v0.2.md").read_text().splitlines()]
    header, row = (next(row for row in rows if name in row[0]) for name in ("model", "An encoder_1"))
    assert row[header.index("OOD-deeper")] == f"{deeper['accuracy']['gen'] / 100:.2f}"


def test_analyses_of_a_trained_model_have_their_column(trained):
    """Masks that start at 0.01 and at 2: after three steps, some of the first are gone."""
    found = of(trained.found, "good")
    overlap = json.loads((trained.good / "overlap.json").read_text())
    share = overlap["total"]["iou"]["mean"][0][1]
    assert 0 < share < 1 and found["result"]["analysed"] == {
        "overlap/total/iou/mean/0/1": share,
        "overlap/no/number": None,
    }
    assert f"warning: {Path('out/good-tiny-seed1')}: overlap.json has no number overlap/no/number" in trained.second.err
    control = json.loads((trained.good / "control.json").read_text())
    assert control["training"]["seed"] == 1 and control["checkpoint"].endswith("good-tiny-seed1/checkpoint_best.pt")
    assert any(command.startswith("fairseq-sg analysis overlap control=") for command in found["commands"])
    page = (trained.folder / "tables" / "x_v0.2.md").read_text()
    assert f" {share:.3f} " in page and "`total/iou/mean/0/1` of the analysis `overlap`" in page


def test_pages_stand_beside_the_results(trained):
    ends = (".json", ".md", ".tex", ".csv", ".png", "-curves.png")
    assert {path.name for path in (trained.folder / "tables").iterdir()} == {f"x_v0.2{end}" for end in ends}
    assert sorted(path.name for path in trained.folder.iterdir()) == ["out", "tables", "tiny", "tiny.yaml"]


def test_finished_trainings_are_not_repeated(trained, monkeypatch, capsys):
    """With other options of the same settings; another recipe's arguments are refused."""
    monkeypatch.chdir(trained.folder)
    monkeypatch.setattr(jobs, "_launch", None)
    monkeypatch.setattr(experiments, "interrupt_by_signals", lambda: None)
    log = (trained.good / "train.log").read_bytes()
    before = (trained.folder / "tables" / "x_v0.2.md").read_text()
    assert experiments.main(["run", *PLAN, "--jobs", "1", "--memory-guard", "0"]) == 0
    assert (trained.good / "train.log").read_bytes() == log
    assert (trained.folder / "tables" / "x_v0.2.md").read_text() == before
    capsys.readouterr()
    changed = trained.folder / "other.yaml"
    changed.write_text((trained.folder / "tiny.yaml").read_text().replace("--lr 3e-3", "--lr 4e-3"))
    try:
        assert experiments.main(["run", "other.yaml", *PLAN[1:-2]]) == 2
    finally:
        changed.unlink()
    assert "holds a training with other settings" in capsys.readouterr().err


def test_what_a_recipe_has_got_since_is_evaluated_without_training(trained):
    """A column with other steps, and a row that evaluates another with its types of columns."""
    shallower = "{'encoder_layers': 1}"
    recipe = (trained.folder / "tiny.yaml").read_text()
    recipe = recipe.replace(
        "analyses:\n", f'  IID-shallower: {{subset: valid, model_overrides: "{shallower}"}}\nanalyses:\n'
    )
    recipe = recipe.replace(
        "  bad:\n", f'  deep: {{label: deeper, evaluates: good, model_overrides: "{DEEPER}"}}\n  bad:\n'
    )
    changed = trained.folder / "more.yaml"
    changed.write_text(recipe)
    before, log = of(trained.found, "good")["result"], (trained.good / "train.log").read_text()
    record = (trained.good / "run.json").read_bytes()
    try:
        again = run(trained.folder, "run", "more.yaml", *PLAN[1:-1], "out/more", "--rows", "good", SG_COMMIT="third")
    finally:
        changed.unlink()
        # The other tests share the training.
        (trained.good / "run.json").write_bytes(record)
    assert again.code == 0, again.out + again.err
    results_file = results.read(trained.folder / "out" / "more.json")
    found = of(results_file, "good")
    assert (trained.good / "train.log").read_text() == log
    more = found["result"].pop("more")
    assert found["result"] == {key: value for key, value in before.items() if key != "more"}
    assert set(more) == {DEEPER, shallower} and more[DEEPER] == before["more"][DEEPER]
    assert [start["commit"] for start in found["starts"]] == ["first", "second", "third"]
    lines = {line.row: line for line in report.lines(results_file)}
    assert set(lines) == {"good", "deep", "shown"} and lines["deep"].curves == []
    assert set(lines["deep"].cells) == {"OOD"}
    assert lines["deep"].cells["OOD"].values == lines["good"].cells["OOD-deeper"].values
    assert "deeper: the models of An encoder_1, evaluated with" in (trained.folder / "out" / "more.md").read_text()


# Translations, by SLURM.

TRANSLATION = """\
title: A tiny translation
source: nobody
data:
  tiny:
    folder: tiny
    prepare: >-
      parallel --src src.txt --tgt tgt.txt --valid-share 0 --test-share 0.3 --vocab-size 40 --model bpe --max-length 4
    subsets: [test, gen]
steps: 4
validate_every: 2
batch_size_valid: 16
seeds: 1
unit: percent
checkpoint: last
generate: --beam 2 --max-len-b 12 --post-process sentencepiece
train: >-
  --task sg_translation --arch sg_transformer_scan --encoder-embed-dim 16 --decoder-embed-dim 16
  --encoder-attention-heads 2 --decoder-attention-heads 2 --encoder-layers 1 --decoder-layers 1
  --criterion cross_entropy_orthogonality --optimizer torch_adam --lr 1e-3 --batch-size 16
columns:
  short: {subset: test, metric: bleu}
  long: {subset: gen, metric: bleu}
by_length: {baseline: softmax, tokenize: none, bounds: [2, 6]}
rows:
  softmax: {label: soft, arguments: ""}
"""


def test_a_slurm_array_trains_and_translates(tmp_path, monkeypatch, capsys):
    """From two text files, whose data folder is missing: index 1 is the second seed. A report scores it."""
    pytest.importorskip("sentencepiece")
    user = tmp_path / "user"
    user.mkdir()
    draw = random.Random(0)
    sources = [" ".join(draw.choices("Ly đi xa thu về nhà mưa ăn cơm".split(), k=1 + i % 7)) for i in range(120)]
    (user / "src.txt").write_text("".join(f"{s}\n" for s in sources), "utf-8")
    (user / "tgt.txt").write_text("".join(f"{' '.join(s.split()[::-1])}\n" for s in sources), "utf-8")
    (user / "tiny.yaml").write_text(TRANSLATION)
    plan = ["--seeds", "4,6", "--device", "cpu", "--data", "my data", "--out", "out"]
    written = run(user, "slurm", "tiny.yaml", "array.sbatch", *plan, "--jobs", 1)
    assert written.code == 0 and "2 runs; submit them by: sbatch array.sbatch" in written.out, written.err
    request = json.loads((user / "my data" / "tiny" / "dataset.json").read_text())["request"]
    assert (request["dataset"], request["max_length"], request["vocab_size"]) == ("parallel", 4, 40)
    script = user / "array.sbatch"
    assert "#SBATCH --array=0-1%1\n" in script.read_text() and "gres" not in script.read_text()
    # It may be started in another folder. Its command is run in a forked process.
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$PWD" "$@"\n')
    python.chmod(0o755)
    script.write_text(script.read_text().replace(sys.executable, str(python)))
    said = subprocess.run(["bash", script], cwd=tmp_path, env=environment(SLURM_ARRAY_TASK_ID="1"), capture_output=True)
    cwd, option, module, *words = said.stdout.decode().splitlines()
    assert (said.returncode, option, module) == (0, "-m", "fairseq_sg.experiments"), said.stderr
    done = run(Path(cwd), *words)
    assert done.code == 0, done.out + done.err
    assert "INFO:" not in done.err and "DEBUG:" not in done.err
    assert [path.name for path in (user / "out").iterdir()] == ["softmax-tiny-seed6"]

    monkeypatch.chdir(user)
    assert experiments.main(["report", "tiny.yaml", *plan, "--results", "tiny"]) == 0
    assert "BLEU by length, tiny" in capsys.readouterr().out
    kept = results.read(user / "tiny.json")
    found = kept.bleu["tiny"]
    raw = user / "my data" / "tiny" / "raw"
    subsets = {s: len((raw / f"{s}.plain.tgt").read_text("utf-8").splitlines()) for s in ("test", "gen")}
    assert found["subsets"] == subsets and sum(b["sentences"] for b in found["buckets"]) == sum(subsets.values())
    assert [b["label"] for b in found["buckets"]] == ["1–2", "3–4", "5–6", "7+"] and found["limit"] == 4
    (entry,) = found["systems"]
    for subset in subsets:
        # fairseq scores the same words and prints two digits.
        generated = of(kept, "softmax", 6)["result"]["generated"][subset]["bleu"]
        assert entry["subsets"][subset]["BLEU"]["score"] == pytest.approx(generated, abs=0.006)
    for end in ("-bleu.md", "-bleu.png", ".md", ".png"):
        assert (user / f"tiny{end}").stat().st_size > 200

    # Both seeds make their steps at once.
    done = run(user, "run", "tiny.yaml", *plan, "--out", "stacked", "--together", 2, "--stacked")
    assert done.code == 0, done.out + done.err
    found = results.read(user / "stacked" / "results.json")
    assert [record["seed"] for record in found.records] == [4, 6]
    assert all(start["machine"]["steps"] == "stacked" for record in found.records for start in record["starts"])
    assert "steps stacked" in (user / "stacked" / "results.md").read_text()


MINE = """\
import fairseq_sg.plugin
from fairseq_sg.modules.attention import SoftmaxAttention, register_attention

register_attention("mine")(type("Mine", (SoftmaxAttention,), {}))
"""


def test_mechanisms_of_one_s_own_are_trained_and_analysed(tmp_path):
    write_labelled(tmp_path / "tiny")
    text = SHARED.replace("STEPS", "4").replace("--encoder-attention relative", "--encoder-attention mine")
    (tmp_path / "tiny.yaml").write_text(f"user_dir: mechanisms\n{text}")
    command = ("run", "tiny.yaml", "--device", "cpu", "--data", ".", "--rows", "good", "--seeds", "1")
    refused = run(tmp_path, *command)
    assert refused.code == 2 and refused.err.startswith("error: user_dir: there is no folder mechanisms: ")
    (tmp_path / "mechanisms").mkdir()
    (tmp_path / "mechanisms" / "__init__.py").write_text(MINE)
    done = run(tmp_path, *command, SG_COMMIT="abc")
    assert done.code == 0, done.out + done.err
    (record,) = results.read(tmp_path / "runs" / "tiny" / "results.json").records
    assert record["result"]["steps"] == 4 and record["result"]["analysed"]["overlap/total/iou/mean/0/1"] is not None
    assert re.fullmatch(r"abc with mechanisms [0-9a-f]{12}", record["starts"][0]["commit"])
