"""What the hosting reads of vLLM beyond its public names; `start.SUPPORTED_VERSION` bounds it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .start import check_version


def describe_attention(vllm_config: Any, layer_names: Iterable[str]) -> list[str]:
    """Returns what decides how vLLM's attention orders the numbers inside of a block.

    That is vLLM's version, the type and layout of its KV cache, and for each kind of layer the
    backend and, on a CPU, the instruction set.
    """
    cache = vllm_config.cache_config
    parts = {check_version(), str(cache.cache_dtype), str(cache.kv_cache_layout)}
    layers = vllm_config.compilation_config.static_forward_context
    for name in layer_names:
        layer = layers[name]
        backend = layer.get_attn_backend().get_name()
        instruction_set = getattr(layer, "isa", None) or _cpu_instruction_set(vllm_config, layer)
        parts.add(f"{backend}:{instruction_set}")
    return sorted(parts)


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
