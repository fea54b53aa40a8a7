"""Checks the installation: what is there, what is missing or wrong, and the fix.

    fairseq-sg doctor

The exit code is 0 if everything that training needs is there, and 1 otherwise. It also runs without fairseq or torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fairseq_sg import __version__, compat
from fairseq_sg.errors import exit_code
from fairseq_sg.parsers import Command

PACKAGE = Path(__file__).resolve().parent
PYTHONS = ((3, 11), (3, 12))
#: Whether there is a wheel of fairseq-fixed for this Python and processor; elsewhere, it is compiled.
HAS_WHEEL = (*sys.version_info[:2], platform.machine()) == (3, 12, "x86_64")
SETUP = "bash scripts/setup.sh"

#: distribution -> (module, least version) of the libraries without which fairseq does not import or does not train.
NEEDED = {
    "numpy": ("numpy", "1.26"),
    "hydra-core": ("hydra", "1.3"),
    "omegaconf": ("omegaconf", "2.3"),
    "sacrebleu": ("sacrebleu", "2.0"),
    "scikit-learn": ("sklearn", "1.0"),
    "bitarray": ("bitarray", "2.0"),
    "tqdm": ("tqdm", "4.0"),
    "packaging": ("packaging", "20.0"),
}
#: distribution -> the feature that needs it, and the command that installs it.
OPTIONAL = {
    "matplotlib": ("plots", "pip install matplotlib"),
    "sentencepiece": ("texts in subwords", "pip install sentencepiece"),
    "rich": ("live progress of experiments", "pip install rich"),
    "tensorboardX": ("--tensorboard-logdir", "pip install tensorboardX"),
    "triton": ("GPU kernels; PyTorch's own operators do the same work", "pip install triton"),
}


@dataclass(frozen=True)
class Finding:
    """One line of the report: its ``status`` is ``ok``, ``note`` (training works all the same) or ``WRONG``."""

    status: str
    message: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.status:6} {self.message}" + (f"\n       fix: {self.fix}" if self.fix else "")


def ok(message: str) -> Finding:
    return Finding("ok", message)


def wrong(message: str, fix: str) -> Finding:
    return Finding("WRONG", message, fix)


def older(version: str, least: str) -> bool:
    """Whether ``version`` is older than ``least``, by their first two numbers."""

    def first_two(text: str) -> tuple[int, ...]:
        return tuple(int(number) for number in re.findall(r"\d+", text)[:2])

    return first_two(version) < first_two(least)


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> Finding:
    name = "Python " + ".".join(map(str, version))
    if tuple(version[:2]) in PYTHONS:
        return ok(name)
    return wrong(f"{name}: fairseq-fixed is made for 3.11 and 3.12", f"PYTHON=/path/to/python3.12 {SETUP}")


def check_library(distribution: str, module: str, least: str) -> Finding:
    """Whether a library is installed, new enough, and can be imported."""
    install = f"pip install '{distribution}>={least}', or {SETUP}"
    if importlib.util.find_spec(module) is None:
        return wrong(f"{distribution} is missing", install)
    try:
        imported = importlib.import_module(module)
    except Exception as error:
        return wrong(f"{distribution} cannot be imported: {type(error).__name__}: {error}", install)
    version = str(getattr(imported, "__version__", None) or compat.version_of(distribution))
    if older(version, least):
        return wrong(f"{distribution} {version} is too old: {least} is the least", install)
    return ok(f"{distribution} {version}")


def check_optional(distribution: str, purpose: str, fix: str) -> Finding:
    version = compat.version_of(distribution)
    return ok(f"{distribution} {version}") if version else Finding("note", f"no {distribution} (for {purpose})", fix)


def check_fairseq() -> Iterator[Finding]:
    """fairseq-fixed, with its compiled parts; where it is missing, the compiler to build it with."""
    try:
        version = compat.fairseq_version()
    except ImportError as error:
        problem, _, fix = str(error).partition(" Fix: ")
        yield wrong(problem.rstrip("."), fix)
        return
    if version is None:
        isolation = "" if HAS_WHEEL else " --no-build-isolation"
        yield wrong("fairseq-fixed is missing", f"pip install --no-deps{isolation} {compat.FAIRSEQ}, or {SETUP}")
        yield from check_compiler()
        return
    try:
        for part in ("fairseq", "fairseq.data.data_utils_fast", "fairseq.libbleu"):
            importlib.import_module(part)
    except Exception as error:
        yield wrong(
            f"{part} cannot be imported: {type(error).__name__}: {error}", f"install what it lacks, or run {SETUP}"
        )
        return
    yield ok(f"fairseq-fixed {version}")


def check_compiler() -> Iterator[Finding]:
    """The C++ compiler that fairseq-fixed is built with where it has no wheel."""
    compiler = os.environ.get("CXX", "g++")
    if HAS_WHEEL:
        return
    if shutil.which(compiler) is None:
        message = f"no C++ compiler ({compiler}) to build fairseq-fixed with"
        yield wrong(message, "apt-get install g++, or use Python 3.12 on x86-64")
    else:
        yield ok(f"C++ compiler {shutil.which(compiler)}")


def check_devices() -> Iterator[Finding]:
    """CPU threads and GPUs."""
    import torch

    yield ok(f"CPU: {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads (OMP_NUM_THREADS sets it)")
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        yield ok(f"GPU {index}: {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB")
    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi") is None:
            yield Finding("note", "no GPU: fairseq's commands run on the CPU")
        else:
            message = f"there is an nvidia-smi, but torch {torch.__version__} uses no GPU"
            fix = "look at `nvidia-smi` and at CUDA_VISIBLE_DEVICES"
            if torch.version.cuda is None:
                fix = "install a torch with CUDA"
                if (Path(sys.prefix) / ".fairseq_sg").is_file():  # an environment of scripts/setup.sh
                    fix = f"rm -r {sys.prefix}; SG_VENV={sys.prefix} {SETUP}"
            yield Finding("note", message, fix)


def check_kernels() -> Iterator[Finding]:
    """What was verified and measured of the operators on this CPU, and on a GPU if there is one."""
    import torch

    from fairseq_sg.kernels import listing
    from fairseq_sg.ops.tuning import COMMAND

    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        tuning, line = listing.tuning_of(device), f"operators on {listing.tuned(device)}"
        if tuning is not None and tuning.failing():
            yield Finding("note", line, f"fairseq-sg kernels verify --device {device} shows what is wrong; report it")
        elif tuning is None and device == "cuda":
            yield Finding("note", line, COMMAND)
        else:
            yield ok(line)


def check_user_dir() -> Finding:
    """Which folder ``--user-dir fairseq_sg`` names: fairseq looks in the current folder, then beside its package."""
    fairseq = Path(importlib.util.find_spec("fairseq").submodule_search_locations[0])
    places = (Path.cwd() / "fairseq_sg", fairseq / "fairseq_sg", fairseq / ".." / "fairseq_sg")
    found = next((place.resolve() for place in places if place.exists()), None)
    if found is not None and PACKAGE in (found, clone_of(found)):
        return ok(f"--user-dir fairseq_sg finds {PACKAGE}")
    where = "nothing" if found is None else f"another folder, {found}"
    return Finding("note", f"--user-dir fairseq_sg finds {where} from here", f"give the path: --user-dir {PACKAGE}")


def clone_of(package: Path) -> Path | None:
    """The folder of the code, where ``package`` is the one that scripts/setup.sh writes beside fairseq; else None."""
    init = package / "__init__.py"
    text = init.read_text(encoding="utf-8") if init.is_file() else ""
    written = re.search(r'^__path__\.insert\(0, "(.*)"\)$', text, re.MULTILINE)
    return Path(written[1]).resolve() if written else None


def check_registration() -> Iterator[Finding]:
    """Registers everything and lists it."""
    from fairseq.criterions import CRITERION_REGISTRY
    from fairseq.models import ARCH_MODEL_REGISTRY
    from fairseq.optim import OPTIMIZER_REGISTRY
    from fairseq.scoring import SCORER_REGISTRY
    from fairseq.tasks import TASK_REGISTRY

    import fairseq_sg.plugin  # noqa: F401
    from fairseq_sg.models.checks import REGISTRIES

    theirs = {
        "architectures": ARCH_MODEL_REGISTRY,
        "tasks": TASK_REGISTRY,
        "criteria": CRITERION_REGISTRY,
        "optimizers": OPTIMIZER_REGISTRY,
        "scorers": SCORER_REGISTRY,
    }
    for kind, registry in theirs.items():
        names = sorted(name for name, cls in registry.items() if cls.__module__.startswith("fairseq_sg."))
        missing = wrong(f"no {kind} are registered", f"reinstall fairseq_sg, or run {SETUP}")
        yield ok(f"{kind}: {', '.join(names)}") if names else missing
    for registry in REGISTRIES:
        yield ok(f"{registry.option}: {', '.join(sorted(registry))}")


def check_training() -> Iterator[Finding]:
    """One forward and backward pass of a tiny model with each attention, on the CPU and on a GPU if there is one."""
    import torch

    from fairseq_sg.modules.attention import ATTENTION_REGISTRY

    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        for name in sorted(ATTENTION_REGISTRY):
            try:
                loss = tiny_step(name, device)
            except Exception as error:
                report = f"{name} attention does not train on {device}: {type(error).__name__}: {error}"
                yield wrong(report, "report it, with this whole output")
            else:
                yield ok(f"{name} attention trains on {device} (loss {loss:.3f})")


def tiny_step(attention: str, device: str) -> float:
    """Loss in nats per token of a tiny model with ``attention`` in every role it can serve, after a backward pass.

    Raises RuntimeError where the loss or a gradient is not finite.
    """
    from types import SimpleNamespace

    import torch
    from fairseq.data import Dictionary

    from fairseq_sg.criterions import cross_entropy_orthogonality as criteria
    from fairseq_sg.models.sg_transformer import SGTransformer
    from fairseq_sg.modules.attention import ATTENTION_REGISTRY

    torch.manual_seed(0)
    words = Dictionary()
    for word in "abcdef":
        words.add_symbol(word)
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words, cfg=SimpleNamespace(left_pad_target=False))
    sizes = {"embed_dim": 16, "ffn_embed_dim": 32, "attention_heads": 2, "layers": 2}
    config = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()}
    config |= {f"{role}_attention": attention for role in ATTENTION_REGISTRY.find(attention).roles}
    model = SGTransformer.build_model(SimpleNamespace(**config), task).to(device).train()
    options = criteria.SGCriterionConfig(orthogonality_weight=1e-3, sentence_avg=False)
    criterion = criteria.CrossEntropyOrthogonality(options, task)
    tokens = torch.randint(4, len(words), (3, 7), device=device)
    lengths = torch.full((3,), 7, device=device)
    inputs = {"src_tokens": tokens, "src_lengths": lengths, "prev_output_tokens": tokens.roll(1, 1)}
    loss, tokens_in_all, _ = criterion(model, {"net_input": inputs, "target": tokens, "ntokens": tokens.numel()})
    loss.backward()
    numbers = [loss, *(p.grad for p in model.parameters() if p.grad is not None)]
    if not all(x.isfinite().all() for x in numbers):
        raise RuntimeError("the loss or a gradient is not finite")
    return loss.item() / tokens_in_all


def examine() -> Iterator[Finding]:
    """All findings in order; a finding that makes later ones impossible ends them."""
    yield check_python()
    torch = check_library("torch", "torch", "2.6")
    libraries = [torch, *(check_library(name, *rest) for name, rest in NEEDED.items())]
    yield from libraries
    fairseq = list(check_fairseq())
    yield from fairseq
    yield from (check_optional(name, *rest) for name, rest in OPTIONAL.items())
    if torch.status == "ok":
        yield from check_devices()
        yield from check_kernels()
    if all(finding.status == "ok" for finding in libraries + fairseq):
        yield check_user_dir()
        yield from check_registration()
        yield from check_training()


def main(line: Sequence[str] | None = None) -> int:
    """Prints the report; returns the exit code. Ends with 2 for an argument, as there is none."""
    Command(prog="fairseq-sg doctor", usage="%(prog)s", description=__doc__).parse_args(line)
    print(f"fairseq_sg {__version__} in {PACKAGE}")
    problems = 0
    for finding in examine():
        print(finding, flush=True)
        problems += finding.status == "WRONG"
    print("everything that training needs is there" if not problems else f"{problems} to fix before training")
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(exit_code(main))
