"""What vLLM calls in the middle of its steps, and how these calls find their engine.

vLLM makes its connectors and logits processors itself, by class name, and hands them its
configuration. The configuration carries the name of the engine (`ENGINE_NAME`), and `HOOKS` leads
from that name to the object which answers. So several engines can live in one process (in tests;
a worker has one).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

ENGINE_NAME = "diptych_engine"  #: Key of `kv_connector_extra_config`, and of `HOOKS`.
REQUEST_ID = "diptych_request"  #: Key of a request's `SamplingParams.extra_args`.


class VllmHooks(Protocol):
    """What an engine that hosts vLLM does at the points where vLLM asks. One thread calls it."""

    def expected_tokens(self, request_id: str, cached_tokens: int) -> int:
        """Returns how many ids behind the first `cached_tokens` have KV that is going to arrive."""
        ...

    def blocks_allocated(self, request_id: str, blocks: list[int], arriving_tokens: int) -> None:
        """Takes note that a request has these blocks, into which `arriving_tokens` ids' KV goes."""
        ...

    def step_scheduled(self, scheduler_output: Any) -> None:
        """Takes note of what the step that begins now computes."""
        ...

    def layer_saved(self, layer_name: str) -> None:
        """Takes note that the step's KV of one layer is in the pool."""
        ...

    def arrived_requests(self) -> set[str]:
        """Returns the requests, once each, whose blocks no transfer writes any more."""
        ...

    def register_pool(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Takes the pool's memory: the KV of each layer, by layer name, in the model's order."""
        ...

    def sample(self, logits: torch.Tensor, request_ids: dict[int, str]) -> None:
        """Draws the next id of each row, and leaves in `logits` nothing else to choose.

        `logits` are float32 [rows, vocabulary]; `request_ids` say whose the rows are.
        """
        ...


#: The engines of this process, by name.
HOOKS: dict[str, VllmHooks] = {}


def hooks_of(vllm_config: Any) -> VllmHooks:
    """Returns the hooks of the engine that was started with this configuration."""
    return HOOKS[vllm_config.kv_transfer_config.kv_connector_extra_config[ENGINE_NAME]]
