"""A Ray that serves nothing, to tell Ray's own share of what an idle cluster takes.

    python -m diptych.cluster.bench.empty_serve

Starts Ray as `diptych serve` does, with as many Serve deployments as a cluster of one prefill and
one decode worker has, which do nothing; runs until ^C. `loadtests/footprint.py` measures it.
"""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

from ..launch.ray_cluster import start_ray

#: Gateway, Control, router, and the two pools.
DEPLOYMENTS = 5


class Nothing:
    """What Serve needs to deploy something."""


def main() -> None:
    """Runs until SIGINT or SIGTERM ends it."""
    # Not blocked, as processes that are started here would have them blocked too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(
        prefix="dip", dir="/tmp", ignore_cleanup_errors=True
    ) as folder:
        start_ray(Path(folder), "token", max(os.cpu_count() or 1, 2), with_fork_server=True)
        import ray  # here, as it reads the token's variable, which `start_ray` has set
        from ray import serve

        try:
            serve.start(proxy_location="Disabled")
            for number in range(DEPLOYMENTS):
                # Of no core, as the machine may have fewer than there are deployments.
                deploy = serve.deployment(ray_actor_options={"num_cpus": 0})
                serve.run(deploy(Nothing).bind(), name=f"nothing-{number}", route_prefix=None)
            print("ready: measure it, then end it with ^C", flush=True)
            signal.pause()
        except KeyboardInterrupt:
            print("stopping")
        finally:
            serve.shutdown()
            ray.shutdown()


if __name__ == "__main__":
    main()
