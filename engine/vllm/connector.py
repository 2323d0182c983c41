"""The KV connector by which vLLM tells of its blocks, and waits for those that arrive.

It decides nothing: each call goes on to the engine that hosts vLLM (`hooks.VllmHooks`). vLLM makes
two of them, one beside its scheduler and one beside its model. A hosted vLLM has one rank only
(`start.py` refuses more), so both are called on the engine's thread, in this order in each step:

    scheduler   get_num_new_matched_tokens, update_state_after_alloc, build_connector_meta
    model       save_kv_layer for each layer, get_transfer_results

What is sent to a peer is kept by our own pins on its blocks, so `request_finished` never asks vLLM
to hold any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)

from .hooks import hooks_of

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class StepMetadata(KVConnectorMetadata):
    """Carries nothing: both connectors of an engine share its hooks."""


class DiptychConnector(KVConnectorBase_V1):
    """Passes vLLM's calls on to the engine that hosts it."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._hooks = hooks_of(vllm_config)

    # ---- beside the scheduler ----------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        tokens = self._hooks.expected_tokens(request.request_id, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        # vLLM keeps all KV in one group for a connector that is no `SupportsHMA`.
        (block_ids,) = blocks.get_block_ids()
        self._hooks.blocks_allocated(request.request_id, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._hooks.step_scheduled(scheduler_output)
        return StepMetadata()

    # ---- beside the model --------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._hooks.register_pool(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Does nothing: peers push."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Waits for nothing: a request is computed only when all of its KV has arrived."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Tells that a layer's KV is written; what is sent are pieces of several layers."""
        self._hooks.layer_saved(layer_name)

    def wait_for_save(self) -> None:
        """Waits for nothing: pinned blocks are not reused while transfers read them."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Returns the requests whose KV has arrived, or that were aborted while it came."""
        return KVConnectorTransferResults(finished_recving=self._hooks.arrived_requests())
