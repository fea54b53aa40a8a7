"""Whether ``fairseq-train`` takes command lines, without a training.

    python -m fairseq_sg.parse < LINES.json

LINES.json is a list of lists of arguments. The number of each line is printed before it is read; the first one that is
refused ends the command with its message and the exit code of fairseq-train.
"""

from __future__ import annotations

import json
import sys


def main() -> int:
    from fairseq import options

    import fairseq_sg.plugin  # noqa: F401

    for number, line in enumerate(json.load(sys.stdin)):
        print(number, flush=True)
        options.parse_args_and_arch(options.get_training_parser(), line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
