"""Importing the package in a fresh process changes nothing, until fairseq loads it as its user directory."""

from __future__ import annotations

import os
import subprocess
import textwrap
from pathlib import Path

import pytest

from fairseq_sg import compat
from helpers import commands
from helpers.commands import Result

REPOSITORY = Path(__file__).resolve().parents[1]
needs_fairseq = pytest.mark.skipif(compat.fairseq_version() is None, reason="fairseq is not installed")

#: Imports the package and every module of ops and modules, and asserts that nothing outside of it has changed.
IMPORT_ALL = """
import logging, sys, warnings
import torch
before = sys.excepthook, list(warnings.filters), set(torch.serialization.get_safe_globals())
import fairseq_sg, fairseq_sg.ops, fairseq_sg.modules.attention, fairseq_sg.modules.feedforward
import fairseq_sg.modules.depth, fairseq_sg.modules.position, fairseq_sg.modules.update
heavy = {name.partition(".")[0] for name in sys.modules} & {"fairseq", "hydra", "omegaconf", "sklearn", "triton"}
import importlib, pkgutil
for package in (fairseq_sg.ops, fairseq_sg.modules):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if "triton" not in module.name:
            importlib.import_module(module.name)
assert before == (sys.excepthook, list(warnings.filters), set(torch.serialization.get_safe_globals()))
fairseq = [name for name in sys.modules if name.startswith("fairseq.") or name.startswith("fairseq_sg.plugin")]
assert not fairseq and "hydra" not in sys.modules and "omegaconf" not in sys.modules
import os
assert os.path.dirname("x") not in fairseq_sg.__path__  # asked by a program without fairseq
print(sorted(heavy))
"""


def run(code: str, *paths: Path, cwd: Path = REPOSITORY, argv: tuple[str, ...] = ()) -> Result:
    """A Python that has imported nothing of fairseq, and looks for modules in ``paths`` and the repository first."""
    places = os.pathsep.join(map(str, (*paths, REPOSITORY)))
    return commands.run("-c", textwrap.dedent(code), *argv, cwd=cwd, PYTHONPATH=places)


def succeed(code: str, *paths: Path, **options) -> str:
    result = run(code, *paths, **options)
    assert result.code == 0, result.err
    return result.out


def succeed_afresh(code: str, *paths: Path) -> str:
    """As ``succeed``, in a Python that has imported nothing at all."""
    result = commands.launch("python", "-c", code, PYTHONPATH=os.pathsep.join(map(str, (*paths, REPOSITORY))))
    assert result.code == 0, result.err
    return result.out


BLOCKED = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("fairseq", "hydra", "omegaconf"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""


@pytest.fixture
def upstream(tmp_path) -> Path:
    """A folder of packages with a fairseq of another release, whose import fails as on today's Python."""
    (tmp_path / "fairseq").mkdir()
    (tmp_path / "fairseq" / "__init__.py").write_text("raise ValueError('mutable default')")
    info = tmp_path / "fairseq-0.12.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fairseq\nVersion: 0.12.2\n")
    return tmp_path


@pytest.mark.parametrize("fairseq", ["absent", "upstream", "as-installed"])
def test_operators_and_modules_import_nothing_of_fairseq_and_change_nothing(fairseq, upstream):
    blocker = BLOCKED if fairseq == "absent" else ""
    paths = [upstream] if fairseq == "upstream" else []
    assert succeed_afresh(blocker + IMPORT_ALL, *paths) == "[]\n", "a heavy library was imported"


def test_the_plugin_without_fairseq():
    result = run(
        BLOCKED.replace("raise Mod", "return None #") + "sys.modules['fairseq'] = None\nimport fairseq_sg.plugin"
    )
    assert result.code == 1
    assert result.err.splitlines()[-1].startswith("ImportError: fairseq is not installed; fairseq_sg's plugin needs")


def test_the_plugin_refuses_another_fairseq(upstream):
    hidden = """
    import importlib.metadata as metadata
    version = metadata.version
    def pretend(name):
        if name == "fairseq-fixed":
            raise metadata.PackageNotFoundError(name)
        return version(name)
    metadata.version = pretend
    """
    result = run(textwrap.dedent(hidden) + "import fairseq_sg.plugin", upstream)
    assert result.code == 1
    assert result.err.splitlines()[-1].startswith("ImportError: the installed fairseq is fairseq 0.12.2; ")


#: fairseq loads a user directory, and everything is registered and repaired.
LOAD = """
import sys
from argparse import Namespace
from fairseq.utils import import_user_module
import_user_module(Namespace(user_dir={user_dir!r}))
from fairseq import checkpoint_utils
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.optim import OPTIMIZER_REGISTRY
from fairseq.scoring import SCORER_REGISTRY
from fairseq.tasks import TASK_REGISTRY
assert {{"sg_translation", "sg_classification", "sg_language_modeling"}} <= set(TASK_REGISTRY)
assert "sg_transformer_scan" in ARCH_MODEL_REGISTRY and "classification" in CRITERION_REGISTRY
assert "torch_adam" in OPTIMIZER_REGISTRY and "exact_match" in SCORER_REGISTRY
assert checkpoint_utils.load_checkpoint.func.__module__ == "fairseq_sg.resuming"
assert sys.excepthook.func.__module__ == "fairseq_sg.compat"
import fairseq_sg
print(fairseq_sg.__file__)
"""
#: Imports of the process before fairseq loads the user directory.
EARLIER = {
    "nothing": "",
    "ops": "import fairseq_sg.ops",
    "modules": "import fairseq_sg.modules.attention",
    "mixin": "import fairseq_sg.tasks.mixin",
    "fairseq-then-ops": "import fairseq.utils, fairseq_sg.ops",
}


@needs_fairseq
@pytest.mark.parametrize("earlier", EARLIER.values(), ids=EARLIER)
@pytest.mark.parametrize("user_dir", ["fairseq_sg", str(REPOSITORY / "fairseq_sg")], ids=["name", "path"])
def test_fairseq_loads_the_user_directory(earlier, user_dir, tmp_path):
    cwd = REPOSITORY if user_dir == "fairseq_sg" else tmp_path
    out = succeed(f"{earlier}\n{LOAD.format(user_dir=user_dir)}", cwd=cwd)
    assert Path(out.splitlines()[-1]) == REPOSITORY / "fairseq_sg" / "__init__.py"


@needs_fairseq
@pytest.mark.parametrize("words", ["fairseq_sg.doctor", "-m fairseq_sg.doctor"])
def test_registration_does_not_depend_on_the_command_line(words):
    succeed(LOAD.format(user_dir="fairseq_sg"), argv=tuple(words.split()))


@needs_fairseq
@pytest.mark.parametrize("earlier", ["", "import fairseq_sg.ops"], ids=["nothing", "ops"])
def test_the_package_that_setup_writes_beside_fairseq(earlier, tmp_path):
    """``--user-dir fairseq_sg`` from another folder, with an editable installation."""
    import fairseq

    site = tmp_path / "site"
    (site / "fairseq").mkdir(parents=True)
    for path in Path(fairseq.__file__).parent.iterdir():
        os.symlink(path, site / "fairseq" / path.name)
    script = (REPOSITORY / "scripts" / "setup.sh").read_text()
    start = script.index('mkdir -p "$site/fairseq_sg')
    lines = f"site={site}\nPWD={REPOSITORY}\n" + script[start : script.index("printf '%s'")]
    subprocess.run(["bash", "-euc", lines], check=True)
    code = f"{earlier}\n{LOAD.format(user_dir='fairseq_sg')}"
    result = commands.run("-c", code, cwd=tmp_path, PYTHONPATH=str(site))
    assert result.code == 0, result.err
    assert Path(result.out.splitlines()[-1]) == REPOSITORY / "fairseq_sg" / "__init__.py"


@needs_fairseq
def test_tasks_of_fairseq_keep_their_behaviour():
    """Functions of fairseq that our tasks do not need are fairseq's own, for every task in the process."""
    succeed(
        LOAD.format(user_dir="fairseq_sg")
        + """
from fairseq import trainer
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq_cli import train
functions = [FairseqTask.filter_indices_by_size, FairseqTask.get_batch_iterator, train.train, train.should_stop_early]
functions += [trainer._catalog_shared_params, checkpoint_utils.load_checkpoint_to_cpu]
functions += [checkpoint_utils.load_model_ensemble_and_task]
assert not [f for f in functions if not f.__module__.startswith(("fairseq.", "fairseq_cli."))]
"""
    )
