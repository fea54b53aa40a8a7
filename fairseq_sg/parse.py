"""Whether ``fairseq-train`` takes command lines, without a training.

    python -m fairseq_sg.parse < LINES.json

LINES.json is a list of lists of arguments. The number of each line is printed before it is read. The first one that is
refused ends the command with its message: a wrong option or value, or mechanisms that do not fit. No data are read.
"""

from __future__ import annotations

import json
import sys

from fairseq_sg.errors import UsageError


def main() -> int:
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.models import ARCH_MODEL_NAME_REGISTRY

    import fairseq_sg.plugin  # noqa: F401
    from fairseq_sg import command_line
    from fairseq_sg.models.config import CONFIGURATIONS

    for number, line in enumerate(json.load(sys.stdin)):
        print(number, flush=True)
        cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), line))
        command_line.check(cfg, "train")
        ours = CONFIGURATIONS.get(ARCH_MODEL_NAME_REGISTRY.get(cfg.model._name))
        if ours is not None:
            ours.resolve(cfg.model)
    return 0


def run() -> int:
    try:
        return main()
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(run())
