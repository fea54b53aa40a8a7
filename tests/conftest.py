"""What all tests share: one thread, a fixed seed, a random order, and where real data lies if it is there."""

from __future__ import annotations

import gc
import os
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("helpers")
REPOSITORY = Path(__file__).resolve().parents[1]
#: Folders with files that take long. They come first, so that all processes of pytest end together.
SLOW = ("cli", "devices", "experiments", "models", "modules", "ops", "tests")

# No test depends on time.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")
#: What was measured on this machine has no say in tests.
os.environ["FAIRSEQ_SG_TUNING"] = ""


def pytest_addoption(parser) -> None:
    help = "shuffles the files, and the tests in each; `random` draws a seed, and prints it"
    parser.addoption("--order-seed", metavar="SEED", help=help)


def pytest_configure(config) -> None:
    if hasattr(config, "workerinput"):
        config.option.order_seed = config.workerinput["order_seed"]
    elif config.option.order_seed == "random":
        config.option.order_seed = str(random.SystemRandom().randrange(10**6))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    """All processes of xdist have the same order."""
    node.workerinput["order_seed"] = node.config.option.order_seed


def pytest_sessionstart(session) -> None:
    seed, reporter = session.config.option.order_seed, session.config.pluginmanager.getplugin("terminalreporter")
    if seed is not None and reporter is not None:
        reporter.write_line(f"order of tests: --order-seed {seed}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items) -> None:
    """Tests of a file stay together: what they share is made once."""
    if config.option.order_seed is None:
        return
    draw, files = random.Random(config.option.order_seed), {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    groups = list(files.values())
    draw.shuffle(groups)
    groups.sort(key=lambda group: group[0].path.parent.name not in SLOW)
    for group in groups:
        draw.shuffle(group)
    items[:] = [item for group in groups for item in group]


def pytest_collection_finish() -> None:
    """What is there now stays: a search for garbage leaves it out."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _deterministic():
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def common_folder(tmp_path_factory) -> Path:
    """A folder of this session, the same one in all of its processes."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "common"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data beside the repository; a clone of a user's own has none, and its tests skip."""
    path = REPOSITORY.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"no real data at {path}")
    return path
