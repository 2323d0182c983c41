"""Which of vLLM's arguments operators may not set, as the hosting sets them (pure).

`engine.vllm` of cluster.yaml passes all others on to vLLM by their own names.
"""

from __future__ import annotations

from typing import Final

#: Arguments of vLLM that the hosting sets itself, with what to do instead.
OWNED_ARGUMENTS: Final = {
    "model": "it is the model that is served",
    "tokenizer": "text belongs to the gateway",
    "skip_tokenizer_init": "text belongs to the gateway",
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
    "kv_transfer_config": "transfers are Diptych's",
    "kv_events_config": "the prefix index is Diptych's",
    "scheduling_policy": "requests go by their deadline",
    "async_scheduling": "a step must have ended before its blocks are sent",
    "enable_prefix_caching": "the router counts on it",
    "logits_processors": "sampling is Diptych's",
    "speculative_config": "vLLM refuses it beside Diptych's sampling",
    "enable_lora": (
        "adapters are not served yet; merge the adapter into its model's weights (merge_and_unload "
        "of PEFT) and serve the result"
    ),
    "language_model_only": "gateways refuse images, so only the language model is loaded",
    "seed": "each request has its own",
    "disable_log_stats": "metrics come from Diptych",
}
