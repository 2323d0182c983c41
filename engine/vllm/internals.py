"""What the hosting reads of vLLM beyond its public names; `start.SUPPORTED_VERSION` bounds it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .start import check_version

#: A window of no tokens: that of layers of which nobody knows here what vLLM keeps.
DROPS_ANYTHING = 0


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


def find_window(kv_cache_config: Any) -> int | None:
    """Returns the tokens at the end of a sequence whose KV vLLM keeps, or None if it keeps all.

    `kv_cache_config` is that of vLLM's scheduler. Where every layer has a sliding window, or
    attends to chunks, vLLM puts its null block in the place of the blocks before. Of layers with a
    window beside layers without one it keeps all, and makes their specs a `FullAttentionSpec`.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    windows: list[int] = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        # A group of layers that differ in their sizes has the spec of each.
        layer_specs = getattr(spec, "kv_cache_specs", {"all layers": spec})
        for layer_spec in layer_specs.values():
            # vLLM derives specs of windows from the one of full attention, too (`RSWASpec`).
            window = getattr(layer_spec, "rswa_window", None)
            if window is not None or not isinstance(layer_spec, FullAttentionSpec):
                window = window or getattr(layer_spec, "sliding_window", None)
                chunk = getattr(layer_spec, "attention_chunk_size", None)
                windows.append(int(window or chunk or DROPS_ANYTHING))
    return min(windows, default=None)


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
