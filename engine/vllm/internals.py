"""What the hosting reads of vLLM beyond its public names; `start.SUPPORTED_VERSION` bounds it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .start import check_version


def describe_attention(vllm_config: Any, layer_names: Iterable[str]) -> dict[str, str]:
    """Returns by name what decides how vLLM's attention orders the numbers inside of a block.

    That is vLLM's version, the type and layout of its KV cache, and of its layers the backends and,
    on a CPU, the instruction sets.
    """
    cache = vllm_config.cache_config
    layers = vllm_config.compilation_config.static_forward_context
    backends: set[str] = set()
    instruction_sets: set[str] = set()
    for name in layer_names:
        layer = layers[name]
        backends.add(layer.get_attn_backend().get_name())
        isa = getattr(layer, "isa", None) or _cpu_instruction_set(vllm_config, layer)
        instruction_sets.add(str(isa))
    return {
        "version of vLLM": check_version(),
        "type of the KV cache": str(cache.cache_dtype),
        "layout of the KV cache": str(cache.kv_cache_layout),
        "attention backend": ", ".join(sorted(backends)),
        "instruction set": ", ".join(sorted(instruction_sets)),
    }


def _cpu_instruction_set(vllm_config: Any, layer: Any) -> str:
    from vllm.v1.attention.backends import cpu_attn

    return str(
        cpu_attn._get_attn_isa(
            vllm_config.model_config.dtype,
            vllm_config.cache_config.block_size,
            getattr(layer, "head_size", None),
            vllm_config.cache_config.cache_dtype,
        )
    )


def is_preempted(vllm_request: Any) -> bool:
    """Returns whether vLLM has taken a request's blocks for others, and will compute it again."""
    from vllm.v1.request import RequestStatus

    return bool(vllm_request.status == RequestStatus.PREEMPTED)


def take_worker_connector() -> Any:
    """Takes the connector that vLLM made beside the model out of the global where it keeps it.

    So the next engine of this process gets one of its own; vLLM makes none while there is one.
    """
    from vllm.distributed.kv_transfer import kv_transfer_state

    connector = kv_transfer_state._KV_CONNECTOR_AGENT
    kv_transfer_state._KV_CONNECTOR_AGENT = None
    return connector


def give_worker_connector(connector: Any) -> None:
    """Has vLLM's next step use this connector, whichever engine of the process was made last."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    kv_transfer_state._KV_CONNECTOR_AGENT = connector
