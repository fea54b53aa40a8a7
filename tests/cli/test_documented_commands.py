"""Every command in README and docs works as it stands: it is run in a tiny form, parsed, or on a list with a reason."""

from __future__ import annotations

import importlib
import os
import re
from functools import cache
from pathlib import Path

import pytest

from helpers.commands import run
from helpers.documented_commands import PAGES, REPOSITORY, Command, commands, commands_in, smaller
from helpers.scenes import write_scenes

#: A part of a command -> why it is parsed only, or, for a program without a parser here, why it is not looked at.
NOT_RUN = {
    "--download": "a download",
    "--archive": "an archive of the user",
    "--raw-dir": "files of the user",
    "train.en": "files of the user",
    "train.src": "files of the user",
    "commands.tsv": "files of the user",
    "wiki.train.tokens": "files of the user",
    "data-bin/ende": "made from files of the user",
    "scan_mcd1": "made from files of the user",
    "checkpoints/listops/": "a model of ListOps, whose data take minutes",
    "checkpoints/ctlpp/": "a model of CTL++, whose data take half a minute",
    "checkpoints/pcfg_": "a model of PCFG SET, whose files are downloaded",
    "--generate": "takes minutes",
    "data_prep ctl --order forward --out": "the small task stands for it",
    "data_prep ctl --order backward --out": "the small task stands for it",
    "data_prep ctlpp": "takes half a minute",
    "data_prep arithmetic": "takes half a minute",
    "data_prep listops": "takes minutes",
    "data_prep parity": "takes half a minute",
    "data_prep sort_of_clevr": "takes ten seconds; two scenes stand for it",
    "data_prep repeat_copy": "takes ten seconds; a few sentences stand for it",
    "scripts/dnc_mechanics.py": "tests/modules/test_dnc_mechanics.py runs it",
    "data_prep verify": "tests/data_prep runs it",
    "fairseq_sg.experiments": "tests of the experiments run them",
    "fairseq_sg.kernels": "its own tests run it",
    "masks/a": "takes minutes; tests/analysis/test_masks.py runs such commands",
    "masks/b": "as masks/a",
    "parity_exact.pt": "tests/cli/test_construct_command.py runs them",
    "fairseq_sg.hydra_train": "tests/cli/test_hydra.py runs it",
    "fairseq-hydra-train": "a cluster; tests/cli/test_submitit.py runs a sweep on one machine",
    "examples/first_steps.py": "tests/test_examples.py runs it",
    "torchrun": "several machines",
    "sbatch": "a cluster",
    "fairseq_sg.doctor": "tests/test_doctor.py runs it",
    "benchmarks": "takes minutes; its own tests run it",
    "pytest": "the tests themselves",
    "bash scripts/": "installs, or runs the tests",
    "…": "shown in part",
    "git": "the network",
}
#: Words of commands that draw: nothing is drawn, except into a file of that format.
NO_PICTURE = ["--format", "none"]


def reason(command: Command) -> str | None:
    """Why a command is not run; None for one that is."""
    text = " ".join((command.name, *command.arguments))
    return next((why for part, why in NOT_RUN.items() if part in text), None)


def test_a_page_has_the_commands_that_a_reader_sees():
    line = "echo \"jump twice\" | A=1 fairseq-interactive data-bin/scan26 --path 'a b' 2>&1 | grep ^D  # a remark"
    (command,) = commands_in(line, "page.md", 7)
    assert (
        command.words == ("fairseq-interactive", "data-bin/scan26", "--path", "a b") and command.given == "jump twice"
    )
    assert not list(commands_in("| Generate gen with beam=1: exact_match = 12.0808", "page.md", 1))
    assert len(commands()) > 110 and {"README.md", "docs/training.md"} <= {c.page for c in commands()}


def test_every_reason_is_still_one():
    texts = [" ".join((command.name, *command.arguments)) for command in commands()]
    assert not [part for part in NOT_RUN if not any(part in text for text in texts)]


@pytest.fixture(scope="module")
def desk(tmp_path_factory, data) -> Path:
    """A reader's folder, in which pages are followed: tiny data, and two examples of extending.md in it."""
    folder = tmp_path_factory.mktemp("desk")
    (folder / "data-bin").mkdir()
    os.symlink(data, folder / "data-bin" / "scan26")
    write_scenes(folder / "data-bin" / "scenes", scenes=2, test_scenes=2)
    small = "repeat_copy --lengths 1-2 --repeats 1-2 --test-lengths 3 --test-repeats 3 --train 100 --test 10 --out"
    assert run("data_prep", *small.split(), folder / "data-bin" / "words").code == 0
    (folder / "enwik8").write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 400)
    examples = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "extending.md").read_text(), re.DOTALL)
    for name, line in {"my_attentions": "class MeanAttention", "my_data": "class Palindromes"}.items():
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(next(example for example in examples if line in example))
    return folder


PARSE, TESTS = "helpers.documented_commands", str(REPOSITORY / "tests")


def test_trainings_are_right_as_they_stand(desk):
    """Options, values, mechanisms that go together, and no validation after each epoch: an epoch takes seconds."""
    result = run(PARSE, *PAGES, cwd=desk, PYTHONPATH=TESTS)
    assert result.code == 0, result.out + result.err


def test_a_wrong_training_is_noticed(desk, tmp_path):
    whole = (
        "--user-dir fairseq_sg --task sg_translation --arch sg_transformer_scan --optimizer torch_adam --max-update 9 "
        "--criterion cross_entropy_orthogonality --batch-size 64 --valid-subset valid --save-dir checkpoints/none"
    )
    wrong = {
        "… --qk-norm l2": "--qk-norm l2 has no effect",
        "… --encoder-attention linear --feature-map elus": "unknown feature map 'elus'",
        whole: "it validates after every epoch",
        f"{whole} --validate-interval 1000": "it saves after every epoch",
    }
    for words, message in wrong.items():
        page = tmp_path / "page.md"
        page.write_text(f"# Page\n\n    fairseq-train data-bin/scan26 {words}\n")
        result = run(PARSE, page, cwd=desk, PYTHONPATH=TESTS)
        assert result.code == 1 and message in result.out, (words, result.out, result.err)


@cache
def parser_of(program: str):
    """The parser of a program of this project."""
    module = program if program in ("fairseq_sg.evaluate", "fairseq_sg.construct") else f"{program}.__main__"
    return importlib.import_module(module).make_parser()


PROGRAMS = (
    "data_prep",
    *(f"fairseq_sg.{name}" for name in ("evaluate", "construct", "analysis", "experiments", "kernels")),
)
OURS = [command for command in commands() if command.name in PROGRAMS]
#: ``data_prep`` has a parser for datasets of a user after their package is imported: tests/data_prep runs them.
OURS = [command for command in OURS if command.name != "data_prep" or "--user-dir" not in command.words]


@pytest.mark.parametrize("command", OURS, ids=str)
def test_options_of_our_programs(command):
    parser_of(command.name).parse_args(command.arguments)


def test_files_that_commands_name_are_there():
    for command in commands():
        if command.name not in ("bash", "pytest", "python"):
            continue
        for word in command.arguments[:1]:
            assert (REPOSITORY / word).exists(), command


def test_recipes_that_pages_name_are_there():
    there = {path.stem for path in (REPOSITORY / "fairseq_sg" / "experiments" / "recipes").glob("*.yaml")}
    for command in commands():
        if command.name == "fairseq_sg.experiments":
            assert command.arguments[1] in there, command


def pages_to_run() -> list[str]:
    """Pages with a command to run: first that of data, last those which read checkpoints of others."""
    names = {command.page for command in commands() if reason(command) is None}
    return sorted(names, key=lambda name: (name != "docs/datasets.md", name in ("README.md", "docs/analysis.md"), name))


def test_commands_run_in_a_tiny_form(desk):
    """Page after page, in one folder: data are prepared, models trained, evaluated and looked into."""
    done = []
    for page in pages_to_run():
        for command in (command for command in commands() if command.page == page and reason(command) is None):
            if command.name == "data_prep":
                out = desk / command.value("--out") if command.value("--out") else None
                if out is not None and out.exists():
                    continue
                arguments = command.arguments
            elif command.name == "fairseq_sg.options":
                arguments = command.arguments
            else:
                lay_out(command, desk)
                arguments = smaller(command)
            if command.name == "fairseq_sg.analysis" and command.value("--out") is None:
                arguments += NO_PICTURE
            if (command.name, arguments, command.given) in done:
                continue
            result = run(command.name, *arguments, text=command.given + "\n", cwd=desk)
            assert result.code == 0, f"{command}\n{result.out[-2000:]}\n{result.err[-3000:]}"
            done.append((command.name, arguments, command.given))
    assert len(done) > 25


def lay_out(command: Command, desk: Path) -> None:
    """Puts a small model where a command reads a checkpoint that no page makes."""
    for word in command.words:
        path = desk / word.rpartition("=")[2]
        if path.suffix == ".pt" and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            model = "ndr" if "ndr" in path.parent.name else "mixed"
            os.symlink(desk / "checkpoints" / model / "checkpoint_last.pt", path)
