"""The commands that README and docs show, and their tiny forms.

PYTHONPATH=tests python -m helpers.documented_commands PAGE …     # parses every training in pages
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
#: The first words of commands. Other lines of a block are what a command prints, or code.
PROGRAMS = re.compile(r"(fairseq-[a-z-]+|python|bash|git|pip|echo|sbatch|torchrun)$")
#: Filters behind a pipe.
FILTERS = ("grep", "tail", "head")
#: What "…" stands for in a training that a page shows in part.
REST = (
    "--user-dir fairseq_sg --task sg_translation --arch sg_transformer_scan --criterion cross_entropy_orthogonality "
    "--optimizer torch_adam --batch-size 64 --max-update 100 --disable-validation"
)

#: So many epochs may end with a validation and a checkpoint each.
FEW_EPOCHS = 10

#: The tiny form of a command: options that get another value, options that are left out, and further ones.
SMALLER = {
    **{
        "--max-update": "2",
        "--max-epoch": "1",
        "--batch-size": "8",
        "--batch-size-valid": "8",
        "--length-window": "64",
        "--limit": "8",
        "--epoch-size": "16",
    },
    **{"--validate-interval-updates": "2", "--save-interval-updates": "2"},
    **{"--tokens-per-sample": "16", "--memory-length": "16", "--eval-memory-length": "32"},
}
LEFT_OUT = ("--amp",)
LM_SIZES = "--decoder-layers 2 --decoder-embed-dim 32 --decoder-ffn-embed-dim 64 --decoder-attention-heads 2"
SIZES = {
    "sg_transformer_lm_e8": f"{LM_SIZES} --decoder-head-dim 8",
    "sg_encoder_sort_of_clevr": "--encoder-embed-dim 16 --encoder-ffn-embed-dim 32",
    "sg_encoder_ctl": "--encoder-layers 3 --encoder-embed-dim 32 --encoder-ffn-embed-dim 32",
}
#: A task, or an architecture -> the folder of tiny data that stands for its data.
DATA = {
    "sg_operator_darcy_small": "darcy",
    "sg_classification": "ctl_small_forward",
    "sg_language_modeling": "enwik8",
    "language_modeling": "enwik8",
    "sg_regression": "regression",
    "sg_tagging": "words",
    "sg_visual_qa": "scenes",
    "sg_operator": "burgers",
}
TRANSLATION_DATA = "scan26"


@dataclass(frozen=True)
class Command:
    """A command of a page: its words, without the shell's; ``given`` is what is echoed into it."""

    page: str
    line: int
    words: tuple[str, ...]
    given: str = ""

    @property
    def name(self) -> str:
        """The program; for ``python -m`` and ``fairseq-sg`` the module."""
        if self.words[0] == "fairseq-sg" and len(self.words) > 1:
            return f"fairseq_sg.{self.words[1]}"
        return self.words[2] if self.words[:2] == ("python", "-m") else self.words[0]

    @property
    def arguments(self) -> list[str]:
        module = self.words[:2] == ("python", "-m")
        return list(self.words[3 if module else 2 if self.words[0] == "fairseq-sg" else 1 :])

    @property
    def is_fairseq(self) -> bool:
        return self.name.startswith("fairseq-") and self.name != "fairseq-sg"

    def value(self, option: str) -> str | None:
        """The value of an option, or None."""
        return self.words[self.words.index(option) + 1] if option in self.words else None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {shlex.join(self.words)}"


def commands() -> list[Command]:
    """All commands of all pages."""
    return [command for page in PAGES for command in commands_of(page)]


def commands_of(page: Path) -> Iterator[Command]:
    name = page.relative_to(REPOSITORY).as_posix() if page.is_relative_to(REPOSITORY) else page.name
    for first, text in blocks(page):
        lines = text.splitlines()
        number, variables = 0, {}
        while number < len(lines):
            line, start = lines[number], number
            while line.endswith("\\") and number + 1 < len(lines):
                number += 1
                line = line[:-1] + lines[number]
            number += 1
            if assigned := re.fullmatch(r"([A-Z]+)=(\S+)", line):
                variables[assigned[1]] = assigned[2]
            for variable, value in variables.items():
                line = re.sub(rf"\${variable}\b", lambda _, value=value: value, line)
            yield from commands_in(line, name, first + start)


def commands_in(line: str, page: str, number: int) -> Iterator[Command]:
    """The commands of a line, which may be a pipe."""
    try:
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&<>;")
        lexer.whitespace_split = True
        words = list(lexer)
    except ValueError:  # quotation marks in what a command prints
        return
    words = [word for word in words if not re.fullmatch(r"[A-Z_]+=\w*", word)]  # the environment of a command
    if not words or not PROGRAMS.match(words[0]):
        return
    given, part = "", []
    for word in [*words, "|"]:
        if word != "|" and word != "&&":
            part.append(word)
            continue
        if part[0] == "echo":
            given = " ".join(part[1:])
        elif part[0] not in FILTERS:
            redirected = next((i for i, found in enumerate(part) if found in (">", ">&", "&")), len(part))
            plain = part[: redirected - 1] if part[redirected : redirected + 1] == [">&"] else part[:redirected]
            yield Command(page, number, tuple(plain), given)
        part = []


def blocks(page: Path) -> Iterator[tuple[int, str]]:
    """(number of its first line, text) of every block of code that is no Python and no YAML."""
    lines: list[str] = []
    start, fence, after_blank = 0, None, True
    for number, line in enumerate([*page.read_text(encoding="utf-8").splitlines(), ""], start=1):
        marker = re.match(r"```(\w*)$", line)
        if marker and fence is None:
            fence, start, lines = marker[1], number + 1, []
        elif marker:
            if fence in ("", "bash", "sh", "console"):
                yield start, "\n".join(lines)
            fence, lines = None, []
        elif fence is not None:
            lines.append(line)
        elif line.startswith("    ") and (lines or after_blank):
            start = start if lines else number
            lines.append(line[4:])
        elif lines:
            yield start, "\n".join(lines)
            lines = []
        after_blank = not line.strip() or line.startswith("#")


def smaller(command: Command) -> list[str]:
    """The arguments of the tiny form, for the folder of tiny data and checkpoints."""
    words = command.arguments
    done: list[str] = []
    for word in words:
        option = done[-1] if done else ""
        if word in LEFT_OUT:
            continue
        done.append(SMALLER.get(option, str(REPOSITORY / word) if option == "--user-dir" and "_sg" in word else word))
    if "--help" in words:
        return done
    done += SIZES.get(command.value("--arch") or "", "").split()
    if command.is_fairseq:
        task = command.value("--task") or ""
        done[0] = f"data-bin/{DATA.get(command.value('--arch') or '') or DATA.get(task, TRANSLATION_DATA)}"
        done += ["--num-workers", "0"]
    own = command.name in ("fairseq_sg.analysis", "fairseq_sg.evaluate")
    return done + (["--device", "cpu"] if own else ["--cpu"])


def parse(command: Command) -> None:
    """Raises UsageError, or ends with a message, for a training with a wrong option, value or mechanism.

    Also refused is a training of many epochs that validates or saves after each: an epoch of these data takes seconds.
    """
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    from fairseq_sg import checks
    from fairseq_sg.errors import UsageError
    from fairseq_sg.models import sg_dnc, sg_encoder, sg_operator, sg_regressor, sg_transformer, sg_transformer_lm

    words = command.arguments
    if "…" in words:
        words = [word for word in words if word != "…"] + REST.split()
    words = [str(REPOSITORY / word) if word == "fairseq_sg" else word for word in words]
    parsed = options.parse_args_and_arch(options.get_training_parser(), words)
    cfg = convert_namespace_to_omegaconf(parsed)
    checks.check(cfg, "train")
    models = {
        "sg_dnc": sg_dnc,
        "sg_encoder": sg_encoder,
        "sg_operator": sg_operator,
        "sg_regressor": sg_regressor,
        "sg_transformer_lm": sg_transformer_lm,
        "sg_transformer": sg_transformer,
    }
    for prefix, module in models.items():
        if parsed.arch.startswith(prefix):
            module.resolve(parsed)
            break
    if 0 < cfg.optimization.max_epoch <= FEW_EPOCHS:
        return
    if not cfg.dataset.disable_validation and cfg.dataset.validate_interval < 1000:
        raise UsageError("it validates after every epoch: give --validate-interval-updates and --validate-interval")
    if not cfg.checkpoint.no_save and cfg.checkpoint.save_interval < 1000 and "…" not in command.words:
        raise UsageError("it saves after every epoch: give --save-interval-updates and --save-interval")


def main(pages: list[str]) -> int:
    """Parses the trainings in pages; the exit status is that of a program."""
    import fairseq_sg.plugin  # noqa: F401
    from fairseq_sg.errors import UsageError

    wrong = 0
    for command in (command for page in pages for command in commands_of(Path(page))):
        if command.name == "fairseq-train" and "--help" not in command.words:
            try:
                parse(command)
            except (UsageError, SystemExit) as error:
                print(command, error, sep="\n")
                wrong += 1
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
