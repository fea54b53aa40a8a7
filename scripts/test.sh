#!/usr/bin/env bash
# Sets up .venv if need be, checks style with ruff, then runs the tests. Arguments go to pytest.
#
#   bash scripts/test.sh
#   bash scripts/test.sh -n 0 tests/ops      # in one process
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh </dev/null
"${SG_VENV:-.venv}/bin/ruff" check -q .
"${SG_VENV:-.venv}/bin/ruff" format -q --check .
# A process for each of two cores, with one thread each: more threads than cores make small models slower, not faster.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Files in their order: those that run whole commands come early, and no process is left alone with them at the end.
exec "${SG_VENV:-.venv}/bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@" </dev/null
