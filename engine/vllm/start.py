"""Starts vLLM inside of this process, and checks that it is the one that the hosting was made for.

vLLM's `EngineCore` is stepped by our engine thread. Its settings come from `EngineOptions` and from
what operators set under `engine.vllm`, which are vLLM's own arguments by their own names. Arguments
that the hosting sets itself, or cannot serve with, are refused there (`arguments.find_refusal`).
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from ..errors import EngineError, OutOfMemory, UnsupportedModel
from ..options import EngineOptions
from .adapters import adapter_arguments
from .arguments import find_refusal
from .hooks import ENGINE_NAME
from .models import attention_environment, check_model, describe_error

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

SUPPORTED_VERSION = "0.32."  #: Hooks and block pool change between minor versions of vLLM.
#: What must stand in the environment before vLLM is imported. One process for all; an OpenMP pool
#: that `engine.threads` and the thread's cores bound; hashes of blocks as bytes in its events; no
#: compiler, which would stop the engine for seconds at the first request for a prompt's logprobs.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
#: Names of vLLM that the hosting calls or overrides, with the parameters that it passes or gets.
USED_SIGNATURES: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm.v1.core.block_pool.BlockPool": {
        "touch": ("blocks",),
        "free_blocks": ("ordered_blocks",),
        "get_new_blocks": ("num_blocks",),
        "get_cached_block": ("block_hash", "kv_cache_group_ids"),
        "get_num_free_blocks": (),
        "cache_full_blocks": ("request", "blocks", "num_cached_blocks", "num_full_blocks"),
    },
    "vllm.v1.core.kv_cache_manager.KVCacheManager": {
        "get_block_ids": ("request_id",),
        "take_events": (),
    },
    "vllm.v1.engine.core.EngineCore": {
        "preprocess_add_request": ("request",),
        "add_request": ("request",),
        "abort_requests": ("request_ids",),
        "add_lora": ("lora_request",),
        "post_step": ("model_executed",),
        "shutdown": (),
    },
    "vllm.v1.request.Request": {
        "__init__": (
            "request_id",
            "prompt_token_ids",
            "sampling_params",
            "pooling_params",
            "lora_request",
            "cache_salt",
            "block_hasher",
        ),
    },
    "vllm.v1.kv_cache_interface.FullAttentionSpec": {},
    "vllm.v1.engine.EngineCoreRequest": {
        "__init__": ("request_id", "prompt_token_ids", "lora_request", "cache_salt", "priority"),
    },
    "vllm.lora.request.LoRARequest": {
        "__init__": ("lora_name", "lora_int_id", "lora_path"),
    },
    "vllm.v1.sample.logits_processor.LogitsProcessor": {
        "__init__": ("vllm_config", "device", "is_pin_memory"),
        "is_argmax_invariant": (),
        "update_state": ("batch_update",),
        "apply": ("logits",),
    },
    "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorTransferResults": {
        "__init__": ("finished_recving",),
    },
    "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1": {
        "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
        "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
        "build_connector_meta": ("scheduler_output",),
        "save_kv_layer": ("layer_name", "kv_layer", "attn_metadata"),
        "get_transfer_results": ("finished_req_ids",),
    },
}
#: What the hosting reads of vLLM's core and its scheduler once they have started.
USED_ATTRIBUTES = {
    "core": ("step_fn", "request_block_hasher", "scheduler", "vllm_config"),
    "core.scheduler": (
        "kv_event_publisher",
        "finished_req_ids",
        "kv_cache_manager",
        "has_requests",
        "kv_cache_config",
        "max_num_scheduled_tokens",
    ),
    "core.scheduler.kv_cache_manager": ("reset_prefix_cache", "take_events"),
    "core.scheduler.kv_cache_manager.block_pool": ("blocks", "num_gpu_blocks"),
}
#: vLLM may run this many times `max_running` requests at a time. It looks at reservations only
#: while it runs fewer than it may, so `max_running` answers never keep a reservation waiting.
RESERVE_SLOTS = 2


class VllmUnavailable(EngineError):
    """vLLM is not installed in the worker's environment, or is another version than supported."""


def check_version() -> str:
    """Returns vLLM's version. Raises VllmUnavailable where it is missing or not supported."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            installed = version(distribution)
        except PackageNotFoundError:
            continue
        if not installed.startswith(SUPPORTED_VERSION):
            raise VllmUnavailable(
                f"vLLM {installed} is installed, and {SUPPORTED_VERSION}* is needed: its hooks "
                "change between minor versions; make the engine's environment anew with "
                "`diptych install-engine vllm`"
            )
        return installed
    raise VllmUnavailable(
        "engine.kind is vllm, and vLLM is not installed where the worker runs: make an environment "
        "for it with `diptych install-engine vllm`, and name its python as engine.python"
    )


def check_signatures() -> None:
    """Raises VllmUnavailable where vLLM lacks a name or a parameter that the hosting uses."""
    missing: list[str] = []
    for path, methods in USED_SIGNATURES.items():
        module, _, class_name = path.rpartition(".")
        try:
            owner: Any = getattr(import_module(module), class_name, None)
        except ImportError as error:
            missing.append(f"{path} ({error})")
            continue
        if owner is None:
            missing.append(path)
            continue
        for name, parameters in methods.items():
            method = getattr(owner, name, None)
            if method is None:
                missing.append(f"{class_name}.{name}")
                continue
            # Constructors that are not written in Python have a signature as classes only.
            callee = owner if name == "__init__" else method
            parameter_names = inspect.signature(callee).parameters
            missing += [
                f"{class_name}.{name}({parameter})"
                for parameter in parameters
                if parameter not in parameter_names
            ]
    _refuse_missing(missing)


def check_attributes(core: EngineCore) -> None:
    """Raises VllmUnavailable where a started core lacks something that the hosting reads."""
    missing: list[str] = []
    for path, names in USED_ATTRIBUTES.items():
        owner: Any = core
        place = "core"
        for part in path.split(".")[1:]:
            owner = getattr(owner, part, None)
            place += f".{part}"
            if owner is None:
                missing.append(place)
                break
        else:
            missing += [f"{path}.{name}" for name in names if not hasattr(owner, name)]
    _refuse_missing(list(dict.fromkeys(missing)))


def _refuse_missing(missing: list[str]) -> None:
    if missing:
        raise VllmUnavailable(
            f"this vLLM {check_version()} is not the one that the hosting was made for; it lacks "
            + ", ".join(missing)
        )


def check_arguments(arguments: dict[str, Any]) -> None:
    """Raises EngineError for arguments (`engine.vllm`) that the hosting owns.

    Names that vLLM does not know are found by `start_core`, which needs vLLM.
    """
    refusal = find_refusal(arguments)
    if refusal is not None:
        raise EngineError(refusal)


def start_core(options: EngineOptions, engine_name: str | None) -> EngineCore:
    """Loads the model into a vLLM whose connector finds the hooks under `engine_name`.

    With None it is vLLM alone, to compare with: the same arguments, and no hooks.
    Raises EngineError, whose message says what to do; it is a VllmUnavailable, UnsupportedModel or
    OutOfMemory where the reason is one of these. Other errors of vLLM are passed on.
    """
    check_version()
    check_arguments(options.vllm_arguments)
    if options.tensor_parallel != 1:
        raise UnsupportedModel(
            "vLLM behind Diptych runs on one rank only so far: set pools.*.tensor_parallel to 1"
        )
    if options.device != "cpu":
        raise UnsupportedModel(
            "vLLM behind Diptych runs on a CPU only so far: moving blocks out of its GPU memory "
            "has not been proven; set pools.*.engine.device to cpu, or engine.kind to diptych"
        )
    os.environ.update(ENVIRONMENT | attention_environment())
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    check_signatures()

    from vllm.distributed.kv_transfer import kv_transfer_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    known_arguments = {field.name for field in dataclasses.fields(EngineArgs)}
    for name in options.vllm_arguments:
        if name not in known_arguments:
            raise EngineError(f"engine.vllm.{name} is no argument of vLLM {check_version()}")
    arguments = EngineArgs(
        **_engine_arguments(options), **(_hosting_arguments(engine_name) if engine_name else {})
    )
    # vLLM keeps the connector of its model in a global, and makes none if there is one.
    kv_transfer_state._KV_CONNECTOR_AGENT = None
    try:
        config = arguments.create_engine_config()
        check_model(config, options.limits.block_tokens, has_adapters=bool(options.adapters))
        core = EngineCore(config, Executor.get_class(config), log_stats=True)
    except (ValueError, NotImplementedError) as error:
        text = describe_error(error)
        if "memory" in text:
            raise OutOfMemory(f"vLLM: {text}") from error
        raise UnsupportedModel(f"vLLM: {text}") from error
    check_attributes(core)
    return core


def _engine_arguments(options: EngineOptions) -> dict[str, Any]:
    """Returns vLLM's arguments as the worker's options say, and the operator's own ones."""
    limits = options.limits
    return {
        "model": str(options.model_folder),
        "skip_tokenizer_init": True,
        "dtype": options.dtype,
        # -1: what the model and the pool allow.
        "max_model_len": options.max_model_len or -1,
        "block_size": limits.block_tokens,
        "kv_cache_memory_bytes": options.kv_bytes,
        "max_num_seqs": RESERVE_SLOTS * limits.max_running,
        # A step's prefill, and beside it a token of each that decodes: the room for them. How much
        # of it a step may use is said before each (`VllmEngine._step_budget`).
        "max_num_batched_tokens": limits.max_step_tokens + RESERVE_SLOTS * limits.max_running,
        "enable_prefix_caching": True,
        # Gateways refuse images, so nothing before the language model is loaded.
        "language_model_only": True,
        "scheduling_policy": "priority",
        "async_scheduling": False,
        "seed": 0,
        "disable_log_stats": False,
        "enforce_eager": True,
        **adapter_arguments(options.adapters),
        **options.vllm_arguments,
    }


def _hosting_arguments(engine_name: str) -> dict[str, Any]:
    """Returns the arguments by which vLLM calls the hooks of the engine of this name."""
    from vllm.config import KVEventsConfig, KVTransferConfig

    return {
        "logits_processors": ["diptych.engine.vllm.logits_processor:DiptychSampling"],
        "kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        "kv_transfer_config": KVTransferConfig(
            kv_connector="DiptychConnector",
            kv_connector_module_path="diptych.engine.vllm.connector",
            kv_role="kv_both",
            kv_load_failure_policy="fail",
            kv_connector_extra_config={ENGINE_NAME: engine_name},
        ),
    }
