#!/usr/bin/env bash
# A first result from a fresh clone: installs into .venv, then trains, evaluates and tabulates the recipe `quickstart`.
# Run it again to resume: finished trainings are skipped.
#
#   bash scripts/quickstart.sh
#   bash scripts/quickstart.sh --seeds 5      # options of `fairseq-sg experiments run`
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
exec "${SG_VENV:-.venv}/bin/python" -m fairseq_sg.experiments run quickstart "$@"
