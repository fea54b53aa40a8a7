"""Arguments of trainings, read before the first of them starts: a row with a wrong one may be the last to train."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable

from fairseq_sg.errors import UsageError
from fairseq_sg.experiments.jobs import executable
from fairseq_sg.experiments.plan import Trial


def check(trials: Iterable[Trial]) -> None:
    """Reads the command of one training of every row on every dataset, as fairseq-train reads it.

    Raises:
        UsageError: it would refuse one; what depends on data is only found when the training starts.
    """
    from fairseq import options

    import fairseq_sg.plugin  # noqa: F401

    for trial in {(trial.row, trial.data): trial for trial in trials}.values():
        arguments = executable(trial.run.train_command())[3:]  # python -m fairseq_cli.train
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                options.parse_args_and_arch(options.get_training_parser(), arguments)
        except (SystemExit, UsageError) as error:
            lines = said.getvalue().strip().splitlines()
            why = lines[-1].removeprefix("error: ") if lines else str(error)
            raise UsageError(f"the row {trial.row!r} cannot be trained: {why}") from None
