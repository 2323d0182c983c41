"""The arguments of vLLM that operators may not set (pure: nothing here imports vLLM).

Diptych hosts vLLM's engine in its own workers. It sets these arguments itself (`start.start_core`),
or cannot serve with them. `engine.vllm` of cluster.yaml passes all others on to vLLM by their own
names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

#: Argument -> the setting of cluster.yaml to use instead, or why there is none. The text ends the
#: error "engine.vllm.NAME cannot be set: TEXT".
OWNED_ARGUMENTS: Final = {
    "model": "set model.path",
    "tokenizer": "gateways turn text into token ids and back, workers have ids alone",
    "skip_tokenizer_init": "gateways turn text into token ids and back, workers have ids alone",
    "dtype": "set model.dtype",
    "max_model_len": "set model.max_model_len",
    "block_size": "set model.block_tokens",
    "kv_cache_memory_bytes": "set pools.*.engine.kv_mib",
    "num_gpu_blocks_override": "set pools.*.engine.kv_mib",
    "gpu_memory_utilization": "set pools.*.engine.kv_mib",
    "max_num_seqs": "set pools.*.engine.max_running",
    "max_num_batched_tokens": "set pools.*.engine.max_step_tokens",
    "tensor_parallel_size": "set pools.*.tensor_parallel",
    "pipeline_parallel_size": "pipelines over workers are not supported",
    "data_parallel_size": "set pools.*.replicas",
    "kv_transfer_config": "Diptych transfers the KV itself",
    "kv_events_config": "Diptych's router has its own index of prefixes",
    "scheduling_policy": "steps take requests by their deadline",
    "async_scheduling": "it is off, as a step must have ended before its blocks are sent",
    "enable_prefix_caching": "it is on, as the router counts on it",
    "logits_processors": "Diptych samples by a processor of its own",
    "speculative_config": "vLLM refuses it beside Diptych's sampling",
    "spec_method": "vLLM refuses speculation beside Diptych's sampling",
    "spec_model": "vLLM refuses speculation beside Diptych's sampling",
    "spec_tokens": "vLLM refuses speculation beside Diptych's sampling",
    "enable_lora": "set model.adapters",
    "max_loras": "all of model.adapters are loaded",
    "max_lora_rank": "it is that of model.adapters",
    "max_cpu_loras": "all of model.adapters are loaded",
    "default_mm_loras": "gateways refuse images",
    "distributed_executor_backend": "the engine runs in the worker's own process",
    "worker_cls": "the engine runs in the worker's own process",
    "worker_extension_cls": "the engine runs in the worker's own process",
    "scheduler_cls": "Diptych depends on the scheduler of vLLM that it was made for",
    "decode_context_parallel_size": "vLLM behind Diptych runs on one rank only so far",
    "prefill_context_parallel_size": "vLLM behind Diptych runs on one rank only so far",
    "nnodes": "vLLM behind Diptych runs on one rank only so far",
    "kv_offloading_size": "tiers below vLLM's pool are not supported",
    "kv_offloading_backend": "tiers below vLLM's pool are not supported",
    "ec_transfer_config": "gateways refuse images, so there is nothing to transfer",
    "enable_chunked_prefill": "it is on: set pools.*.engine.max_step_tokens",
    "max_num_scheduled_tokens": "set pools.*.engine.max_step_tokens",
    "max_num_active_seqs": "set pools.*.engine.max_running",
    "max_num_queued_reqs": "set router.queue_max",
    "max_num_queued_tokens": "set router.queue_max",
    "enable_sleep_mode": "workers are started and stopped instead: diptych scale",
    "language_model_only": "gateways refuse images, so only the language model is loaded",
    "seed": "each request has its own",
    "disable_log_stats": "it is off, as the worker exports vLLM's numbers",
}
#: Why `enforce_eager` may be true only.
GRAPHS_REFUSED: Final = (
    "engine.vllm.enforce_eager can only be true: compiled graphs skip the calls by which layers "
    "tell that their KV is complete"
)
#: Arguments that peers may differ in: they change neither the weights nor what is computed.
NEUTRAL_ARGUMENTS: Final = frozenset(
    {
        "served_model_name",
        "download_dir",
        "use_tqdm_on_load",
        "max_parallel_loading_workers",
        "safetensors_load_strategy",
        "enforce_eager",
        "max_logprobs",
        "long_prefill_token_threshold",
        "watermark",
        "shutdown_timeout",
        "log_level",
    }
)


#: Ways to read the same weights. Any other `load_format` may give other ones: `dummy` makes them
#: up.
NEUTRAL_LOAD_FORMATS: Final = frozenset({"auto", "safetensors", "pt"})


def is_neutral(name: str, value: Any) -> bool:
    """Returns whether peers may differ in an argument that has this value here."""
    if name == "load_format":
        return value is None or value in NEUTRAL_LOAD_FORMATS
    return name in NEUTRAL_ARGUMENTS


def find_refusal(arguments: Mapping[str, Any]) -> str | None:
    """Returns why one of an operator's arguments (`engine.vllm`) cannot be set, or None."""
    for name in arguments:
        if name in OWNED_ARGUMENTS:
            return f"engine.vllm.{name} cannot be set: {OWNED_ARGUMENTS[name]}"
    if not arguments.get("enforce_eager", True):
        return GRAPHS_REFUSED
    return None
