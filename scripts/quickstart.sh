#!/usr/bin/env bash
# A first result from a fresh clone: installs into .venv, generates SCAN (length cutoff 26), trains three small universal
# models in parallel, evaluates them and prints one table. Run it again to resume: finished runs are skipped.
#
#   bash scripts/quickstart.sh              # at most 15 minutes on 2 CPU cores after the installation; a GPU is used where there is one
#   bash scripts/quickstart.sh --paper      # the model of Park & Kim 2024 (linear + L2 + orthogonality loss) at the paper's length
#   bash scripts/quickstart.sh --help
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
exec "${SG_VENV:-.venv}/bin/python" scripts/quickstart.py "$@"
