"""vLLM's NixlConnector on a network that damages data: one bit of what a request reads is flipped.

vLLM loads it by `kv_connector_module_path`. As long as the file that `DAMAGE_FILE` names exists, the
first block of every request that arrives is damaged before vLLM hears of its arrival.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.v1.kv_cache_interface import KVCacheConfig

EXPONENT_BIT = 1 << 14  #: Of a bfloat16: the number becomes very large, or very small.


class DamagingNixlConnector(NixlPullConnector):
    """Reads as NixlConnector does, and flips a bit behind its back."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._switch = Path(os.environ["DAMAGE_FILE"])
        self._blocks: dict[str, int] = {}  #: By request: the first block that its KV goes to.
        self._caches: dict[str, torch.Tensor] = {}

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = kv_caches
        super().register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **named: Any) -> None:
        for request_id, meta in self._connector_metadata.reqs_to_recv.items():
            if meta.local_block_ids and meta.local_block_ids[0]:
                self._blocks[request_id] = meta.local_block_ids[0][0]
        super().start_load_kv(forward_context, **named)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        for request_id in results.finished_recving or ():
            block = self._blocks.pop(request_id, None)
            if block is not None and self._switch.exists():
                self._damage(block)
        return results

    def _damage(self, block: int) -> None:
        """Flips one bit of one number of the last layer."""
        cache = list(self._caches.values())[-1]
        number = cache[block].view(torch.int16).flatten()
        number[0] ^= EXPONENT_BIT
