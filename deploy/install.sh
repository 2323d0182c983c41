#!/usr/bin/env bash
# Makes the virtual environment in $1 (default .venv) and installs Diptych into it, editable, with the
# pinned versions of constraints.txt. $2 says how much:
#
#   serve     what `diptych serve` and `diptych chat` need (the default)
#   loadtest  that and Locust, for `diptych loadtest`
#   dev       everything: tests, lint, `diptych render`, peers' clients, and the router as machine code
#
# Without an NVIDIA GPU torch's CPU build is taken explicitly: a looser requirement would bring
# gigabytes of CUDA libraries along.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
size=${2:-serve}
torch=2.13.0
cpu_index=https://download.pytorch.org/whl/cpu # PyTorch's public index of CPU builds

case $size in
    serve) extras= ;;
    loadtest) extras='[loadtest]' ;;
    dev) extras='[dev]' ;;
    *)
        echo "install.sh: no size '$size'; there are serve, loadtest and dev" >&2
        exit 2
        ;;
esac

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || {
    echo "Diptych needs Python 3.11 to 3.13; $python is $("$python" --version)" >&2
    exit 1
}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"

# Runs pip with its output turned into one line of progress for each step; $1 says what is installed.
install() {
    local what=$1
    shift
    "$venv/bin/python" deploy/progress.py "$what" \
        "$venv/bin/python" -m pip --disable-pip-version-check install "$@"
}

if "$venv/bin/python" -c "import torch, sys; sys.exit(torch.__version__.split('+')[0] != '$torch')" \
    2>/dev/null; then
    echo "torch $torch is installed"
elif command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
    install "torch $torch for NVIDIA GPUs" "torch==$torch"
else
    install "torch $torch, CPU build" "torch==$torch+cpu" 2>/dev/null || {
        echo "the usual index has no CPU build of torch: asking PyTorch's own"
        install "torch $torch, CPU build" "torch==$torch+cpu" --extra-index-url "$cpu_index"
    }
fi
install "Diptych ($size)" -c constraints.txt -e ".$extras"
"$venv/bin/python" -m diptych.engine.kernels
if [ "$size" = dev ]; then
    "$venv/bin/python" -m diptych.router.compile
    mkdir -p build/typing
    ln -sfn ../.. build/typing/diptych # where mypy and protoc find `diptych`
fi
# The larger sizes hold the smaller ones.
case $size in
    dev) touch "$venv/.installed-serve" "$venv/.installed-loadtest" "$venv/.installed-dev" ;;
    loadtest) touch "$venv/.installed-serve" "$venv/.installed-loadtest" ;;
    serve) touch "$venv/.installed-serve" ;;
esac
