"""The arguments of vLLM that operators may not set (pure: nothing here imports vLLM).

Diptych hosts vLLM's engine in its own workers. It sets these arguments itself (`start.start_core`),
or cannot serve with them. `engine.vllm` of cluster.yaml passes all others on to vLLM by their own
names.
"""

from __future__ import annotations

from typing import Final

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
    "enable_lora": (
        "adapters are not served yet; merge the adapter into its model's weights (merge_and_unload "
        "of PEFT) and serve the result"
    ),
    "language_model_only": "gateways refuse images, so only the language model is loaded",
    "seed": "each request has its own",
    "disable_log_stats": "metrics come from Diptych",
}
