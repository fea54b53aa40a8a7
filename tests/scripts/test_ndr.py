"""The experiments of classifiers: every recipe is a model that fairseq knows; the protocol, on a tiny training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from labelled_data import write_labelled

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import ndr  # noqa: E402
import runs  # noqa: E402

pytest.importorskip("fairseq")


def arguments(monkeypatch, *line: str):
    monkeypatch.setattr(sys, "argv", ["ndr.py", *line])
    return ndr.parse_arguments()


@pytest.mark.parametrize("dataset,model", [(d, m) for d, recipes in ndr.RECIPES.items() for m in recipes])
def test_every_recipe_is_a_model(dataset, model, monkeypatch):
    from fairseq import options
    from fairseq.models import ARCH_MODEL_REGISTRY
    from omegaconf import OmegaConf

    import fairseq_sg  # noqa: F401
    from fairseq_sg.models import sg_encoder

    args = arguments(monkeypatch, dataset, "--models", model, "--device", "cpu")
    (run,) = ndr.make_runs(args)
    parsed = options.parse_args_and_arch(options.get_training_parser(), run.train_command()[1:])
    assert ARCH_MODEL_REGISTRY[parsed.arch] is not None and parsed.task == run.task == "sg_classification"
    assert parsed.no_source_bos == ("lstm" in model) and parsed.max_update == ndr.RECIPES[dataset][model].steps
    if "lstm" not in model:
        config = sg_encoder.resolve(OmegaConf.create(vars(parsed)))
        assert (config.encoder_update == "copy_gate") == ("ndr" in model or "gate" in model)
    if model == "ndr" and dataset in ("listops", "ctlpp"):
        assert "{'encoder_layers': " in " ".join(run.validate_command())
    assert ("checkpoint_best.pt" in str(run.checkpoint)) == (dataset != "ctlpp")


@pytest.mark.parametrize("dataset", ndr.SMALL)
def test_small_recipes(dataset, monkeypatch):
    full = ndr.make_runs(arguments(monkeypatch, dataset, "--models", "ndr,relative", "--device", "cpu"))
    small = ndr.make_runs(arguments(monkeypatch, dataset, "--small", "--models", "ndr,relative", "--device", "cpu"))
    for run, model in zip(small, ("ndr", "relative"), strict=True):
        assert (
            run.steps == ndr.SMALL[dataset][2]["steps"] < full[0].steps
            and run.name == model
            and run.data != full[0].data
            and run.folder != full[0].folder
        )
        # What makes the model comes from the published recipe; the last of two equal options counts.
        kept = [word for word in ndr.RECIPES[dataset][model].arguments.split() if word.startswith("--encoder-att")]
        assert set(kept) <= set(run.arguments)
        changes = ndr.SMALL[dataset][2] | ndr.SMALL[dataset][3].get(model, {})
        assert run.arguments[run.arguments.index("--lr") + 1] == str(changes["lr"])
        last = len(run.arguments) - 1 - run.arguments[::-1].index("--encoder-embed-dim")
        assert run.arguments[last + 1] == "64"


def test_latest_of_the_best_is_selected(tmp_path):
    points = [{"step": s, "dev": dev, "gen": gen} for s, dev, gen in ((1, 50, 9), (2, 70, 1), (3, 70, 2), (4, 60, 3))]
    run = runs.Run("m", 1, tmp_path, tmp_path, 4, [], {"dev": "x", "gen": "OOD"}, best=True)
    assert runs.selected(run, points)["step"] == 3
    run.best = False
    assert runs.selected(run, points)["step"] == 4


@pytest.mark.parametrize(
    "line,message",
    [
        (["ctl", "--models", "bert"], "unknown model 'bert': choose from ndr, abs_rel_gate"),
        (["listops", "--order", "forward"], "--order is for ctl"),
        (["listops", "--small"], "--small is for ctl"),
        (["ctl", "--small", "--models", "lstm"], "unknown model 'lstm': choose from ndr"),
        (["ctl", "--steps-scale", "0"], "--steps-scale is 0.0: choose a number above 0"),
    ],
)
def test_wrong_arguments(line, message, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        arguments(monkeypatch, *line)
    assert message in capsys.readouterr().err


def test_protocol(tmp_path):
    data = write_labelled(tmp_path / "data")
    line = [
        sys.executable, "scripts/ndr.py", "ctl", "--models", "lstm", "--steps-scale", "0.002", "--batch-size", "16",
        "--validate-every", "10", "--device", "cpu", "--data", data, "--out", tmp_path / "out",
    ]  # fmt: skip
    done = subprocess.run(
        list(map(str, line)), cwd=REPOSITORY, env=runs.environment(), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr + done.stdout
    (record,) = json.loads((tmp_path / "out" / "summary.json").read_text())["runs"]
    result = record["result"]
    assert [point["step"] for point in result["curve"]] == [10, 20, 30, 40]
    best = max(result["curve"], key=lambda point: (point["dev"], point["step"]))
    # The checkpoint was evaluated anew; the curve is from training.
    assert result["checkpoint_step"] == best["step"] and result["generated"] == {}
    assert result["accuracy"] == {subset: best[subset] for subset in ("dev", "valid", "gen")}
    shown = (tmp_path / "out" / "summary.md").read_text()
    assert f"| lstm | 40 | {result['curve'][-1]['valid']:.1f} | {best['gen']:.1f} | {best['step']} |" in shown
    assert (tmp_path / "out" / "summary.png").read_bytes().startswith(b"\x89PNG")
