"""What clients are told of a worker in place of its id.

A worker's id names a replica of Ray Serve and an agent of KV transfer. Clients get an alias: enough
to see whether two requests met the same worker, and to tell an operator which one.
"""

from __future__ import annotations

import hmac

#: Hexadecimal; of 100 workers of a pool, two share an alias in one of 3,400 clusters.
ALIAS_DIGITS = 6


def worker_alias(secret: str, worker: str) -> str:
    """Return the alias of a worker's id: its pool, and digits that need the cluster's secret.

    Every process of a cluster computes the same one.
    """
    pool = worker.partition("/")[0]
    digest = hmac.digest(secret.encode(), b"alias of " + worker.encode(), "sha256")
    return f"{pool}/{digest.hex()[:ALIAS_DIGITS]}"
