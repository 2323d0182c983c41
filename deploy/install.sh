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
uv=0.13.9
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

# uv installs in a tenth of pip's time: it resolves and unpacks on all cores, and leaves compiling to the first
# import. It does not read pip's configuration, so that is passed on. Where uv cannot be had or does not get
# through, pip does the work.
if "$venv/bin/python" -m pip --disable-pip-version-check install -q "uv==$uv" 2>/dev/null; then
    while IFS= read -r setting; do
        export "${setting?}"
    done < <("$venv/bin/python" deploy/pip_settings.py)
else
    echo "uv cannot be installed: pip does the work, which takes longer"
fi

# Installs packages with one line of progress for each step; $1 says what is installed.
install() {
    local what=$1
    shift
    if [ -x "$venv/bin/uv" ]; then
        # As with pip, the best version of all indexes is taken, and not the first index that has any.
        "$venv/bin/python" deploy/progress.py "$what" "$venv/bin/uv" pip install --python "$venv/bin/python" \
            --index-strategy unsafe-best-match "$@" && return
        echo "trying it with pip"
    fi
    "$venv/bin/python" deploy/progress.py "$what" \
        "$venv/bin/python" -m pip --disable-pip-version-check install "$@"
}

if "$venv/bin/python" -c "import torch, sys; sys.exit(torch.__version__.split('+')[0] != '$torch')" \
    2>/dev/null; then
    echo "torch $torch is installed"
elif command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
    install "torch $torch for NVIDIA GPUs" -c constraints.txt "torch==$torch"
else
    cpu_torch=("torch==$torch+cpu")
    if ! "$venv/bin/python" -m pip --disable-pip-version-check install --dry-run --no-deps "${cpu_torch[@]}" \
        >/dev/null 2>&1; then
        echo "the usual index has no CPU build of torch: PyTorch's own is asked too"
        cpu_torch+=(--extra-index-url "$cpu_index")
    fi
    install "torch $torch, CPU build" -c constraints.txt "${cpu_torch[@]}"
fi
# Many tests start processes at once, each of which would compile what it imports.
[ "$size" != dev ] || [ ! -x "$venv/bin/uv" ] || export UV_COMPILE_BYTECODE=1
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
