#!/bin/sh
# Makes a virtual environment with zerojax installed in it; does nothing when that has been done.
#
#   tools/setup.sh VENV [EXTRAS] [VERSIONS]
#
#   VENV      folder of the environment, relative to the repository (.venv)
#   EXTRAS    extras of pyproject.toml to install, comma-separated (test)
#   VERSIONS  versions of Python that will do, the preferred one first (3.13 3.12 3.11 3.14)
#
# PYTHON=/path/to/python3 in the environment names the Python to use.
# constraints.txt pins every package. pip's output goes to VENV/setup.log; its end is shown if something fails.
# Exit status 3: no such Python on this machine.
set -eu

cd "$(dirname "$0")/.."
venv=${1:-.venv}
extras=${2:-}
versions=${3:-3.13 3.12 3.11 3.14}
log=$venv/setup.log

say() { printf 'zerojax: %s\n' "$*" >&2; }

# A shim on PATH may name a Python that does not run, so each candidate is executed.
is_version() {
  "$1" -c 'import sys; sys.exit(".".join(map(str, sys.version_info[:2])) != sys.argv[1])' "$2" >/dev/null 2>&1
}

pyenv_root=${PYENV_ROOT:-$(pyenv root 2>/dev/null || printf '%s' "${HOME:-/nowhere}/.pyenv")}

find_python() {
  if [ -n "${PYTHON:-}" ]; then
    for version in $versions; do
      if is_version "$PYTHON" "$version"; then
        "$PYTHON" -c 'import sys; print(sys.executable)'
        return
      fi
    done
    return
  fi
  for version in $versions; do
    # pyenv answers a shim with "command not found" unless that version is selected; its folders always work.
    for candidate in "python$version" "$pyenv_root/versions/$version".*/bin/python python3 python; do
      if is_version "$candidate" "$version"; then
        "$candidate" -c 'import sys; print(sys.executable)'
        return
      fi
    done
  done
}

# The environment is good for one pyproject.toml and one constraints.txt, at one place, with at least these extras.
pins=$(cat pyproject.toml constraints.txt | cksum)
wanted="$pins at $(pwd)"
stamp=$venv/installed
is_installed() {
  [ -x "$venv/bin/python" ] && [ -f "$stamp" ] || return 1
  [ "$(head -n 1 "$stamp")" = "$wanted" ] || return 1
  for extra in $(printf '%s' "$extras" | tr ',' ' '); do
    grep -qxF "extra $extra" "$stamp" || return 1
  done
}

fail() {
  say "$1; the last lines of $log:"
  tail -n 25 "$log" >&2
  package=$(sed -n 's/^ERROR: No matching distribution found for //p' "$log" | tail -n 1)
  [ -z "$package" ] || say "could not get $package: is the package index reachable from this machine?"
  exit 1
}

make_venv() {
  python=$(find_python)
  if [ -z "$python" ]; then
    say "found no Python of version$(printf ', %s' $versions | sed 's/^,//')${PYTHON:+ at PYTHON=$PYTHON}; install one, or name it: PYTHON=/path/to/python3 make ..."
    exit 3
  fi
  say "making $venv with $("$python" --version) ($python)"
  "$python" -m venv --clear "$venv" >>"$log" 2>&1 ||
    fail "$python -m venv did not work (on Debian and Ubuntu: apt install python3-venv)"
}

# Whether the environment runs, is of this place, and was installed from the present pins. An interrupted
# installation left an empty stamp, and goes on.
is_usable() {
  [ -x "$venv/bin/python" ] && [ -f "$stamp" ] && "$venv/bin/python" -c 'import pip' >/dev/null 2>&1 || return 1
  first=$(head -n 1 "$stamp")
  [ -z "$first" ] || [ "$first" = "$wanted" ]
}

pip_install() {
  "$venv/bin/python" -m pip install --disable-pip-version-check --no-input -c constraints.txt "$@" \
    >>"$log" 2>&1 || fail "pip install did not work"
}

install() {
  if is_installed; then return; fi
  if [ -L "${venv%/}" ]; then
    say "$venv is a symbolic link, whose target would be replaced; remove the link, or name another folder: VENV=.venv-own make ..."
    exit 1
  fi
  if ! is_usable; then
    [ ! -f "$stamp" ] || say "$venv was made with other versions of packages, or elsewhere: it is made anew"
    log=$(mktemp)
    make_venv
    mv "$log" "$venv/setup.log"
    log=$venv/setup.log
    : >"$stamp"
  fi
  say "installing zerojax${extras:+[$extras]} and the packages it needs into $venv (once, about a minute)"
  # The build backend first: pip would take the newest one for an isolated build, whatever is pinned.
  pip_install hatchling editables
  pip_install --no-build-isolation -e ".${extras:+[$extras]}"
  {
    printf '%s\n' "$wanted"
    {
      grep -s '^extra ' "$stamp" || true
      printf '%s' "$extras" | tr ',' '\n' | sed 's/^/extra /; $a\'
    } | sort -u
  } >"$stamp.new"
  mv "$stamp.new" "$stamp"
}

# Two commands started at once: the second waits for the first.
if command -v flock >/dev/null 2>&1; then
  exec 9>"$(printf '%s' "$venv" | tr '/ ' '__').lock"
  flock 9
fi
install
