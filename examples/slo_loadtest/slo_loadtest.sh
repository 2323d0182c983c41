#!/usr/bin/env bash
# Offers a load to an OpenAI-compatible server (Diptych, vLLM, SGLang, ...), and says whether it keeps its targets.
#
#   slo_loadtest.sh [URL]      without a URL: a cluster that is started here, and stopped
#
# SLO, RATE (requests/s) and DURATION change what is offered and asked. A report with plots is written to
# build/slo.html. The exit code is 4 if less than nine tenths of the requests were in time, or one failed.
set -euo pipefail
cd "$(dirname "$0")/../.."
bin=${BIN:-.venv/bin}
target=(--laptop)
[ $# -eq 0 ] || target=(--endpoint "$1")
mkdir -p build
exec "$bin/diptych" loadtest "${target[@]}" --profile poisson --rate "${RATE:-2}" --duration "${DURATION:-20s}" \
    --prompt-tokens 32-128 --output-tokens 8-32 --slo "${SLO:-ttft=2s,itl=200ms}" \
    --gate 'goodput>=0.9' --gate 'errors<=0' --html build/slo.html --json build/slo.json
