#!/bin/sh
# Writes constraints.txt anew: the newest release of each package that each supported Python can install.
# Then run `make test-all`: a new release may need a change here.
set -eu

cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check uv
{
  echo "# Versions that development and CI install (tools/setup.sh). Written by \`make upgrade\`; do not edit."
  "$folder/venv/bin/uv" pip compile pyproject.toml --extra test --extra plan --extra docs \
    --universal --python-version 3.11 --strip-extras \
    --quiet --no-header --no-annotate
} >"$folder/constraints.txt"
mv "$folder/constraints.txt" constraints.txt
