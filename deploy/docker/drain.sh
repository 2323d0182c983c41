#!/usr/bin/env bash
# diptych-drain SECONDS: a pod's preStop hook.
#
# Tells Ray that this node goes away, then waits until no Serve replica is left on it, at most so
# long. Serve starts replacements where slots are free; what still streams when its replica stops
# goes on with another worker. Then it ends Ray here: told by a signal alone, Ray takes 18 s more.
set -uo pipefail
seconds=${1:?usage: diptych-drain SECONDS}
end=$((SECONDS + seconds))

# Without --node-id Ray takes the node that it is called on. A cluster that is gone needs no drain.
timeout "$seconds" ray drain-node \
    --reason DRAIN_NODE_REASON_PREEMPTION \
    --reason-message "the pod is told to stop" \
    --deadline-remaining-seconds "$seconds" || exit 0
while ((SECONDS < end)) && pgrep -f '^ray::ServeReplica:' >/dev/null; do
    sleep 1
done
pgrep -f '^ray::ServeReplica:' >/dev/null || ray stop --grace-period 3
