#!/usr/bin/env bash
# Installs the packages of the file $3 into the folder $2, without what they depend on, with the programs of $1 (a
# virtual environment's bin): with uv, which is told what pip is configured with, or with pip where uv is not there or
# does not get through.
set -euo pipefail
cd "$(dirname "$0")/../.."
while IFS= read -r setting; do
    export "${setting?}"
done < <("$1/python" deploy/pip_settings.py)
if [ -x "$1/uv" ] &&
    "$1/uv" pip install -q --python "$1/python" --index-strategy unsafe-best-match --no-deps --target "$2" -r "$3"; then
    exit
fi
rm -rf "$2"
"$1/python" -m pip --disable-pip-version-check -q install --no-deps --target "$2" -r "$3"
