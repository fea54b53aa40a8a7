#!/usr/bin/env bash
# Sets up .venv if necessary, checks style with ruff, then runs the tests. Arguments go to pytest.
#
#   bash scripts/test.sh
#   bash scripts/test.sh -n 0 tests/ops      # in one process
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh --with-tests --with-triton </dev/null
"${SG_VENV:-.venv}/bin/ruff" check -q .
"${SG_VENV:-.venv}/bin/ruff" format -q --check .
# Bytecode is kept: without it, every start of Python compiles torch and fairseq again.
unset PYTHONDONTWRITEBYTECODE
# Two processes with one thread each: more threads than cores slow small models down.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# In an order that is drawn each time; `--order-seed SEED`, with the seed that is printed, repeats one.
exec "${SG_VENV:-.venv}/bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder --order-seed random --durations=30 "$@" </dev/null
