#!/usr/bin/env bash
# Installs what fairseq_sg needs into .venv, in pinned versions. A second call returns at once.
#
#   bash scripts/setup.sh                  # to prepare data, train, evaluate and plot
#   bash scripts/setup.sh --with-tests     # also pytest, hypothesis and ruff
#   bash scripts/setup.sh --with-triton    # also Triton, for the kernels; a torch for GPUs brings it along
#
# An environment keeps its options and its torch: a later call adds what is missing. An empty SG_TORCH is the default.
#
# Environment:  PYTHON    the interpreter to use       (default: the first of python3.12, python3.11, python3 that fits)
#               SG_TORCH  the torch requirement        (default: torch==2.13.0, built for CPUs where there is no GPU)
#               SG_VENV   where the environment goes   (default: .venv at the project's root)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${SG_VENV:-.venv}
# The stamp lists everything that is installed: any change repeats the set-up. Its last line is the options.
stamp=$venv/.fairseq_sg
kept=$(sed -n 's/^SG_TORCH=//p' "$stamp" 2>/dev/null || true)
asked=${SG_TORCH-$kept}
torch=${asked:-torch==2.13.0}
fairseq=fairseq-fixed==0.12.3.1
triton=triton==3.6.0
torch_for_cpus=https://download.pytorch.org/whl/cpu

for option in "$@"; do
  case $option in
    --with-tests | --with-triton) ;;
    *) echo "setup: there is no option $option: choose from --with-tests, --with-triton" >&2; exit 2 ;;
  esac
done
before=$([ -f "$stamp" ] && tail -n 1 "$stamp" || true)
options=
for option in --with-tests --with-triton; do
  case " $* $before " in *" $option "*) options+=" $option" ;; esac
done
wanted=$(
  cat scripts/requirements*.txt scripts/setup.sh scripts/build_fairseq.py pyproject.toml setup.py
  echo "SG_TORCH=$asked"
  echo "options:$options"
)
version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
fits() { case $(version "$1") in 3.11 | 3.12) ;; *) return 1 ;; esac; }
# Whether the environment's interpreter is the one that was asked for.
usable() {
  [ -x "$venv/bin/python" ] && { [ -z "${PYTHON:-}" ] || [ "$(version "$PYTHON")" = "$(version "$venv/bin/python")" ]; }
}
if usable && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi

python=${PYTHON:-}
if usable && fits "$venv/bin/python"; then python=$venv/bin/python; fi
if [ -z "$python" ]; then
  # 3.12 first: nothing is compiled for it.
  for candidate in python3.12 python3.11 python3; do
    if fits "$candidate"; then python=$candidate; break; fi
  done
fi
if [ -z "$python" ] || ! fits "$python"; then
  echo "setup: Python 3.11 or 3.12 is needed and ${python:-none of python3.12, python3.11, python3} is not one." >&2
  echo "       Install one, or name it: PYTHON=/path/to/python3.12 bash scripts/setup.sh" >&2
  exit 1
fi
if ! "$python" -c 'import venv, ensurepip' >/dev/null 2>&1; then
  echo "setup: $python has no venv module. On Debian and Ubuntu: apt-get install python3-venv" >&2
  exit 1
fi
minutes="a minute or two" compiled=
if "$python" -c 'import platform, sys; sys.exit((*sys.version_info[:2], platform.machine()) == (3, 12, "x86_64"))'; then
  # fairseq-fixed has a wheel only for 3.12 on x86-64; elsewhere it is compiled.
  minutes="a few minutes" compiled=", which is compiled"
  if ! command -v "${CXX:-g++}" >/dev/null; then
    echo "setup: fairseq-fixed is compiled for $("$python" --version), and there is no C++ compiler (${CXX:-g++})." >&2
    echo "       On Debian and Ubuntu: apt-get install g++    or use Python 3.12 on x86-64, which has a wheel." >&2
    exit 1
  fi
  headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
  if [ ! -f "$headers" ]; then
    echo "setup: the headers of $python are missing ($headers). On Debian and Ubuntu: apt-get install python3-dev" >&2
    exit 1
  fi
fi
# PyPI's torch is built for GPUs and brings CUDA and Triton, several GB.
index=
if [ -z "$asked" ] && ! nvidia-smi -L >/dev/null 2>&1 &&
  "$python" -c "import urllib.request; urllib.request.urlopen('$torch_for_cpus/torch/', timeout=5)" 2>/dev/null; then
  index="--extra-index-url $torch_for_cpus"
fi

echo "setup: $("$python" --version) -> $venv: $torch${index:+ for CPUs}, libraries, and fairseq$compiled"
echo "       The first time takes $minutes and a download; a second call returns at once."
started=$SECONDS
if [ "$python" != "$venv/bin/python" ]; then
  # Without the stamp, only what an interrupted call left may be deleted: an environment without an interpreter.
  if [ ! -f "$stamp" ] && [ -n "$(ls -A "$venv" 2>/dev/null)" ] &&
    { [ ! -f "$venv/pyvenv.cfg" ] || [ -e "$venv/bin/python" ]; }; then
    what=$([ -f "$venv/pyvenv.cfg" ] && echo "an environment of other projects" || echo "no Python environment")
    echo "setup: $venv is $what, and its files would be deleted: name a new folder by SG_VENV" >&2
    exit 1
  fi
  "$python" -m venv --clear "$venv"
fi
incomplete() { printf 'SG_TORCH=%s\noptions:%s\n' "$1" "$options" > "$stamp"; }
incomplete "$kept"
log=$venv/setup.log
: > "$log"

# A failure shows the end of a log, the failing command and the fix.
failed() {  # LOG FIX COMMAND…
  local status=$?
  tail -n 50 "$1" >&2
  echo "setup: this command failed with status $status: ${*:3}" >&2
  echo "       Its last lines are above, and all of them in $1." >&2
  echo "       Fix: $2. Then run bash scripts/setup.sh again." >&2
  exit 1
}
pip_install() {  # FIX ARGUMENTS…
  local command=("$venv/bin/python" -m pip --disable-pip-version-check install)
  # Bytecode of everything takes longer than installing it. That of what is imported is written below.
  command+=(--no-compile --no-build-isolation "${@:2}")
  echo "\$ ${command[*]}" >> "$log"
  "${command[@]}" >> "$log" 2>&1 || failed "$log" "$1" "${command[@]}"
}
network="check the network and pip's index (python -m pip config list)"

echo "setup: $torch"
tools=(setuptools==80.9.0 wheel==0.45.1)
if [ -n "$compiled" ]; then tools+=(cython==3.1.4 -c scripts/requirements.txt numpy); fi
# shellcheck disable=SC2086  # two words, or none
pip_install "$network, or name another torch: SG_TORCH=torch==2.12.0" $index "$torch" "${tools[@]}"
incomplete "$asked"

has_fairseq() {
  "$venv/bin/python" -c "from importlib.metadata import version; assert version('fairseq-fixed') == '${fairseq#*==}'" 2>/dev/null
}
compilation=
from=()
if [ -n "$compiled" ] && ! has_fairseq; then
  # The wheel is kept in pip's cache, for each torch that it is compiled against: a second clone compiles nothing.
  wheels=$venv
  if cache=$("$venv/bin/python" -m pip cache dir 2>/dev/null) && mkdir -p "$cache/fairseq_sg" 2>/dev/null; then
    wheels=$cache/fairseq_sg
  fi
  wheels=$wheels/$("$venv/bin/python" -c 'import sys; from importlib.metadata import version; print(
    "python%d.%d" % sys.version_info[:2], *(name + version(name) for name in ("torch", "numpy")), sep="-")')
  from=(--no-index --find-links "$wheels")
  echo "setup: $fairseq is compiled while the libraries are installed"
  build=("$venv/bin/python" scripts/build_fairseq.py "$fairseq" "$wheels")
  "${build[@]}" >"$venv/fairseq.log" 2>&1 </dev/null &
  compilation=$!
  trap 'kill "$compilation" 2>/dev/null || true' EXIT
else
  echo "setup: libraries"
fi
more=()
case $options in *--with-tests*) more+=(-r scripts/requirements-test.txt) ;; esac
case $options in
  # A torch for GPUs includes it.
  *--with-triton*) "$venv/bin/python" -c 'import triton' 2>/dev/null || more+=("$triton") ;;
esac
pip_install "$network" --prefer-binary -r scripts/requirements.txt ${more[@]+"${more[@]}"}
if [ -n "$compilation" ]; then
  needed="a compiler for C++20 (g++ 11 or newer); or Python 3.12 on x86-64, which needs none: PYTHON=/path/to/python3.12"
  wait "$compilation" || failed "$venv/fairseq.log" "$needed" "${build[@]}"
  trap - EXIT
fi
echo "setup: $fairseq and fairseq_sg"
pip_install "$network" --no-deps ${from[@]+"${from[@]}"} "$fairseq" -e .
# The bytecode of what a training imports. Where PYTHONDONTWRITEBYTECODE is set, each start would compile it again.
bytecode=("$venv/bin/python" -P -c "import fairseq_cli.generate, fairseq_cli.train, matplotlib.pyplot, torch._dynamo")
PYTHONDONTWRITEBYTECODE= "${bytecode[@]}" >> "$log" 2>&1 || failed "$log" "name a new folder by SG_VENV" "${bytecode[@]}"
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
echo "setup: done in $((SECONDS - started)) s"
if [ -n "$index" ]; then
  echo "       This torch is for CPUs. On a machine with a GPU:"
  echo "       rm -r $venv; SG_VENV=$venv SG_TORCH=$torch bash scripts/setup.sh$options"
fi
