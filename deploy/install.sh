#!/usr/bin/env bash
# Makes the virtual environment in $1 (default .venv) and installs Diptych into it, editable,
# with the pinned versions of constraints.txt.
#
# Without an NVIDIA GPU torch's CPU build is taken explicitly: a looser requirement would bring
# gigabytes of CUDA libraries along.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
torch=2.13.0
cpu_index=https://download.pytorch.org/whl/cpu # PyTorch's public index of CPU builds

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || {
    echo "Diptych needs Python 3.11 to 3.13; $python is $("$python" --version)" >&2
    exit 1
}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check -q)

if "$venv/bin/python" -c "import torch, sys; sys.exit(torch.__version__.split('+')[0] != '$torch')" \
    2>/dev/null; then
    echo "torch $torch is installed"
elif command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
    echo "installing torch $torch for NVIDIA GPUs"
    "${pip[@]}" install "torch==$torch"
else
    echo "installing torch $torch, CPU build"
    "${pip[@]}" install "torch==$torch+cpu" 2>/dev/null ||
        "${pip[@]}" install "torch==$torch+cpu" --extra-index-url "$cpu_index"
fi
echo "installing Diptych and its dependencies"
"${pip[@]}" install -c constraints.txt -e '.[dev]'
"$venv/bin/python" -m diptych.engine.kernels
"$venv/bin/python" -m diptych.router.compile
mkdir -p build/typing
ln -sfn ../.. build/typing/diptych # where mypy and protoc find `diptych`
touch "$venv/.installed"
