#!/bin/sh
# Makes a virtual environment with zerojax installed in it; does nothing when that has been done.
#
#   tools/setup.sh VENV [EXTRAS] [OLDEST]
#
#   VENV    folder of the environment, relative to the repository (.venv)
#   EXTRAS  extras of pyproject.toml to install, comma-separated (test)
#   OLDEST  oldest Python that will do (3.11); PYTHON=... in the environment names one to use
#
# What pip prints goes to VENV/setup.log and is shown when something fails. Exit status 3: no such Python here.
set -eu

cd "$(dirname "$0")/.."
venv=${1:-.venv}
extras=${2:-}
oldest=${3:-3.11}
log=$venv/setup.log

say() { printf 'zerojax: %s\n' "$*" >&2; }

# A shim on PATH may name a Python that does not run, so each candidate is asked to do something.
runs() {
  "$1" -c 'import sys; sys.exit(sys.version_info[:2] < tuple(map(int, sys.argv[1].split("."))))' \
    "$oldest" >/dev/null 2>&1
}

candidates() {
  if [ -n "${PYTHON:-}" ]; then
    printf '%s\n' "$PYTHON"
    return
  fi
  printf '%s\n' python3 python python3.13 python3.12 python3.14 python3.11
  # pyenv answers a shim with "command not found" unless that version is selected; its folders always work.
  root=${PYENV_ROOT:-$(pyenv root 2>/dev/null || printf '%s' "${HOME:-/nowhere}/.pyenv")}
  for folder in "$root/versions"/*/bin; do
    printf '%s\n' "$folder"
  done | sed -n 's|.*/versions/\([0-9.]*\)/bin$|\1 &|p' | sort -t. -k1,1nr -k2,2nr | sed 's|^[^ ]* ||; s|$|/python|'
}

find_python() {
  candidates | while read -r candidate; do
    if runs "$candidate"; then
      "$candidate" -c 'import sys; print(sys.executable)'
      break
    fi
  done
}

# The environment is good for one pyproject.toml, at one place, with at least these extras.
wanted="$(cksum <pyproject.toml) at $(pwd)"
is_installed() {
  [ -x "$venv/bin/python" ] && [ -f "$venv/installed" ] || return 1
  [ "$(head -n 1 "$venv/installed")" = "$wanted" ] || return 1
  [ -z "$extras" ] || grep -qxF "extras $extras" "$venv/installed"
}

fail() {
  say "$1; the last lines of $log:"
  tail -n 25 "$log" >&2
  exit 1
}

make_venv() {
  python=$(find_python)
  if [ -z "$python" ]; then
    say "no Python >= $oldest was found that runs; install one, or name it: PYTHON=/path/to/python3 make ..."
    exit 3
  fi
  say "making $venv with $("$python" --version) ($python)"
  "$python" -m venv --clear "$venv" >>"$log" 2>&1 ||
    fail "$python -m venv did not work (on Debian and Ubuntu: apt install python3-venv)"
}

install() {
  if is_installed; then return; fi
  mkdir -p "$venv"
  if ! { [ -x "$venv/bin/python" ] && "$venv/bin/python" -c 'import pip' &&
    [ "$(sed -n 's/.* at //p;1q' "$venv/installed")" = "$(pwd)" ]; } >/dev/null 2>&1; then
    log=$(mktemp)
    make_venv
    mv "$log" "$venv/setup.log"
    log=$venv/setup.log
    : >"$venv/installed"
  fi
  say "installing zerojax${extras:+[$extras]} and what it needs into $venv (once, about a minute)"
  "$venv/bin/python" -m pip install --disable-pip-version-check --no-input \
    -e ".${extras:+[$extras]}" >>"$log" 2>&1 || fail "pip install did not work"
  {
    printf '%s\n' "$wanted"
    grep -sF 'extras ' "$venv/installed" || true
    if [ -n "$extras" ]; then printf 'extras %s\n' "$extras"; fi
  } >"$venv/installed.new"
  mv "$venv/installed.new" "$venv/installed"
}

# Two commands started at once: the second waits for the first.
if command -v flock >/dev/null 2>&1; then
  exec 9>"$(printf '%s' "$venv" | tr '/ ' '__').lock"
  flock 9
fi
install
