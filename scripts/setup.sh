#!/usr/bin/env bash
# Installs everything fairseq_sg needs into .venv, in pinned versions; a second call returns at once.
#
#   bash scripts/setup.sh
#
# Environment:  PYTHON    the interpreter to use       (default: the first of python3.11, python3.12, python3 that fits)
#               SG_TORCH  the torch requirement        (default: torch==2.13.0)
#               SG_VENV   where the environment goes   (default: .venv at the project's root)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${SG_VENV:-.venv}
torch=${SG_TORCH:-torch==2.13.0}
fairseq=fairseq-fixed==0.12.3.1
triton=triton==3.6.0
# The stamp lists everything that is installed: any change repeats the set-up.
wanted=$(cat scripts/requirements.txt scripts/setup.sh pyproject.toml setup.py; echo "$torch")
stamp=$venv/.fairseq_sg
if [ -x "$venv/bin/python" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi

fits() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' >/dev/null 2>&1; }
python=${PYTHON:-}
if [ -z "$python" ]; then
  for candidate in python3.11 python3.12 python3; do
    if fits "$candidate"; then python=$candidate; break; fi
  done
fi
if [ -z "$python" ] || ! fits "$python"; then
  echo "setup: Python 3.11 or 3.12 is needed and ${python:-none of python3.11, python3.12, python3} is not one." >&2
  echo "       Install one, or name it: PYTHON=/path/to/python3.11 bash scripts/setup.sh" >&2
  exit 1
fi
if ! "$python" -c 'import venv, ensurepip' >/dev/null 2>&1; then
  echo "setup: $python has no venv module. On Debian and Ubuntu: apt-get install python3-venv" >&2
  exit 1
fi
if "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
  # fairseq-fixed has a wheel only for 3.12; on 3.11 it is compiled.
  if ! command -v "${CXX:-g++}" >/dev/null; then
    echo "setup: on Python 3.11 fairseq-fixed is compiled, and there is no C++ compiler (${CXX:-g++})." >&2
    echo "       On Debian and Ubuntu: apt-get install g++    or use Python 3.12, for which a wheel exists." >&2
    exit 1
  fi
  headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
  if [ ! -f "$headers" ]; then
    echo "setup: the headers of $python are missing ($headers). On Debian and Ubuntu: apt-get install python3-dev" >&2
    exit 1
  fi
fi

echo "setup: $("$python" --version) -> $venv  (the first time takes some minutes: torch, and on 3.11 a compilation)"
rm -f "$stamp"
[ -x "$venv/bin/python" ] && fits "$venv/bin/python" || "$python" -m venv --clear "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
pip install -q setuptools==80.9.0 wheel==0.45.1 cython==3.1.4 ninja==1.13.0
echo "setup: $torch";                pip install -q "$torch"
# A torch for GPUs includes it. With a torch for CPUs, its interpreter runs the tests of kernels.
"$venv/bin/python" -c 'import triton' 2>/dev/null || { echo "setup: $triton"; pip install -q --no-deps "$triton"; }
echo "setup: requirements.txt";      pip install -q -r scripts/requirements.txt
# Without its declared dependencies (such as the unused torchaudio), compiled against the torch above.
echo "setup: $fairseq";              pip install -q --no-deps --no-build-isolation "$fairseq"
echo "setup: fairseq_sg";            pip install -q --no-deps --no-build-isolation -e .
# `--user-dir fairseq_sg` from any folder: fairseq looks for that folder beside its own package, where an editable
# installation leaves nothing. This package forwards to the clone; a link would let pip write into the clone.
# fairseq also imports the names that it finds in a --user-dir's `tasks`; one name is enough to load the plugin.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$site/fairseq_sg/tasks"
: > "$site/fairseq_sg/tasks/sg_translation.py"
cat > "$site/fairseq_sg/__init__.py" <<EOF
"""Written by scripts/setup.sh: the code of this editable installation is in its clone."""

__path__.insert(0, "$PWD/fairseq_sg")
__file__ = "$PWD/fairseq_sg/__init__.py"
with open(__file__, encoding="utf-8") as _code:
    exec(compile(_code.read(), __file__, "exec"))
EOF
printf '%s' "$wanted" > "$stamp"
echo "setup: done"
