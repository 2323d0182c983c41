"""Whose KV a request may find in the prefix cache, and who may find the request's (pure).

The cache is cut into partitions, which have no block in common. Requests of one partition share
prefixes. Nothing that a client sees, hit figures and times included, depends on what another
partition has cached. A partition is:
    1. the tenant of the request's API key, or the key's `cache_group`, which several tenants share,
    2. and the body's `cache_salt` and `prompt_cache_key`, where a client divides its own share.
Without keys and these fields, all requests are in the one partition that has no name.
"""

from __future__ import annotations

import hashlib
import json

from ..edge.keys import ApiKey

PARTITION_BYTES = 16  #: Of a name: 128 bits, so that no two partitions share one by chance.


class CachePartitions:
    """Names the partitions of a cluster by its `secret`.

    The secret keeps the names unknown to clients: nobody can look for ids whose content hash meets
    one of another partition.
    """

    def __init__(self, secret: str) -> None:
        # blake2b takes a key of at most 64 bytes, and a secret may be longer.
        self._key = hashlib.blake2b(secret.encode(), digest_size=32).digest()

    def name_of(
        self, api_key: ApiKey | None, cache_salt: str | None, prompt_cache_key: str | None
    ) -> bytes:
        """Return the name of a request's partition, the same at every gateway of the cluster.

        `api_key` is None without keys. `cache_salt` and `prompt_cache_key` are the body's fields.
        """
        if api_key is None and not cache_salt and not prompt_cache_key:
            return b""
        owner = _owner_of(api_key) if api_key else ""
        parts = [owner, cache_salt or "", prompt_cache_key or ""]
        return hashlib.blake2b(
            json.dumps(parts).encode(), key=self._key, digest_size=PARTITION_BYTES
        ).digest()


def _owner_of(api_key: ApiKey) -> str:
    """Return who has the partition. The first word keeps a group and a tenant of one name apart."""
    if api_key.cache_group:
        return f"group {api_key.cache_group}"
    return f"tenant {api_key.tenant}"
