#!/usr/bin/env bash
# Writes the Kubernetes manifests of this folder's fleet to build/manifests/fleet.yaml, and checks them. Applies nothing.
set -euo pipefail
cd "$(dirname "$0")/../.."
bin=${BIN:-.venv/bin}
"$bin/diptych" render --fleet examples/kuberay_fleet/fleet.yaml --config examples/kuberay_fleet/cluster.yaml \
    --output build/manifests
exec "$bin/python" deploy/validate.py build/manifests/fleet.yaml
