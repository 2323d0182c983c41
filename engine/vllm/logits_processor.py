"""The logits processor by which ids are drawn with our own sampler (`engine/sampler.py`).

Our draws are a function of ids, parameters, seed and position. vLLM's are not: its generator
restarts when an answer goes on elsewhere, and penalties, `min_tokens` and grammars would count from
there. So vLLM samples greedily from rows in which only the id that we drew is left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from .hooks import REQUEST_ID, hooks_of

if TYPE_CHECKING:
    import torch
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor import BatchUpdate


def _request_id(
    parameters: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
) -> str | None:
    return (parameters.extra_args or {}).get(REQUEST_ID)


class DiptychSampling(LogitsProcessor):
    """Has the hosting engine draw every row's next id."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._hooks = hooks_of(vllm_config)
        self._request_ids: dict[int, str] = {}  #: By row of vLLM's batch.

    def is_argmax_invariant(self) -> bool:
        return False  # or vLLM would not ask while all rows are greedy

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._request_ids, batch_update, _request_id)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        self._hooks.sample(logits, self._request_ids)
        return logits
