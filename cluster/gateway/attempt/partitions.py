"""Whose KV a request may find in the prefix cache, and who may find the request's (pure).

The cache is cut into partitions, which have no block in common. Requests of one partition share
prefixes. Nothing that a client sees, hit figures and times included, depends on what another
partition has cached. A partition is:
    1. the tenant of the request's API key, or the key's `cache_group`, which several tenants share,
    2. and the body's `cache_salt` and `prompt_cache_key`, where a client divides its own share.
Requests with neither an API key nor one of these fields share the one partition without a name.
The name of a partition goes into the content hash of each of its blocks (`identity.partition_salt`
of `kv_transfer`), so one partition's requests never find another's blocks.
"""

from __future__ import annotations

import hashlib
import json

from ..edge.keys import ApiKey

#: The length of a partition's name: 128 bits, so that two partitions do not get one name by chance.
PARTITION_BYTES = 16


class CachePartitions:
    """Names the partitions of a cluster by its `secret`.

    The secret keeps the names unknown to clients. A client who does not know a partition's name
    cannot search for token ids whose content hash equals that of a block of this partition.
    """

    def __init__(self, secret: str) -> None:
        # blake2b takes a key of at most 64 bytes, and a secret may be longer.
        self._key = hashlib.blake2b(secret.encode(), digest_size=32).digest()

    def name_of(
        self,
        api_key: ApiKey | None,
        cache_salt: str | None,
        prompt_cache_key: str | None,
        adapter: str = "",
    ) -> bytes:
        """Return the name of a request's partition, the same at every gateway of the cluster.

        `api_key` is None where the request has no API key. `cache_salt` and `prompt_cache_key` are
        the body's fields; an empty one counts as missing. `adapter` is that of the model: with
        another one, or none, the same prompt has other KV. The name has `PARTITION_BYTES` bytes, or
        none where all four are missing.
        """
        if api_key is None and not cache_salt and not prompt_cache_key and not adapter:
            return b""
        owner = _owner_of(api_key) if api_key else ""
        parts = [owner, cache_salt or "", prompt_cache_key or ""]
        if adapter:
            parts.append(adapter)
        return hashlib.blake2b(
            json.dumps(parts).encode(), key=self._key, digest_size=PARTITION_BYTES
        ).digest()


def _owner_of(api_key: ApiKey) -> str:
    """Return who has the partition. The first word keeps a group and a tenant of one name apart."""
    if api_key.cache_group:
        return f"group {api_key.cache_group}"
    return f"tenant {api_key.tenant}"
