"""What clients are told of a worker or a gateway in place of its name in the cluster.

A name in the cluster holds the id of a replica of Ray Serve, as in `decode/<id>`. The agents of KV
transfer are named by their worker's name, too. Clients get an alias: enough to see whether two
requests met the same process, and to tell an operator which process that was.
"""

from __future__ import annotations

import hmac

#: Hexadecimal digits of an alias or a tag. In a pool of 100 workers, the chance that any two share
#: an alias is 1 in 3,400.
ALIAS_DIGITS = 6


def worker_alias(secret: str, worker: str) -> str:
    """Return the alias of a worker's id `<pool>/<replica>`: `<pool>/<digits>`.

    The digits cannot be computed without the cluster's secret. Every process of a cluster computes
    the same alias.
    """
    pool = worker.partition("/")[0]
    digest = hmac.digest(secret.encode(), b"alias of " + worker.encode(), "sha256")
    return f"{pool}/{digest.hex()[:ALIAS_DIGITS]}"


def gateway_tag(secret: str, gateway: str) -> str:
    """Return the prefix of the ids that a gateway gives to clients, such as a stored response's.

    Its digits cannot be computed without the cluster's secret. So another gateway, which computes
    the tags of all gateways, can tell which one gave an id, and clients learn no name.
    """
    digest = hmac.digest(secret.encode(), b"tag of " + gateway.encode(), "sha256")
    return digest.hex()[:ALIAS_DIGITS]
