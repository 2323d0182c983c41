"""Starts vLLM inside of this process, and checks that it is the one that the hosting was made for.

vLLM's `EngineCore` is stepped by our engine thread. Its settings come from `EngineOptions` and from
what operators set under `engine.vllm`, which are vLLM's own arguments by their own names. What the
hosting itself depends on is refused there, by name (`OWNED_ARGUMENTS`).
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from ..errors import EngineError, OutOfMemory, UnsupportedModel
from ..options import EngineOptions
from .arguments import OWNED_ARGUMENTS
from .hooks import ENGINE_NAME
from .models import attention_environment, check_model, describe_error

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

SUPPORTED_VERSION = "0.32."  #: Hooks and block pool change between minor versions of vLLM.
#: What must stand in the environment before vLLM is imported. One process for all; an OpenMP pool
#: that `engine.threads` and the thread's cores bound; hashes of blocks as bytes in its events.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
#: Names of vLLM that the hosting calls, with the parameters that it passes.
USED_SIGNATURES = {
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
        "post_step": ("model_executed",),
        "shutdown": (),
    },
    "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1": {
        "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
        "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
        "build_connector_meta": ("scheduler_output",),
        "save_kv_layer": ("layer_name", "kv_layer", "attn_metadata"),
        "get_transfer_results": ("finished_req_ids",),
    },
}
RESERVE_SLOTS = 2  #: vLLM may run so many times `max_running` requests: reserved ones come on top.


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
        owner = getattr(__import__(module, fromlist=[class_name]), class_name, None)
        for name, parameters in methods.items():
            method = getattr(owner, name, None)
            if method is None:
                missing.append(f"{class_name}.{name}")
                continue
            known = inspect.signature(method).parameters
            missing += [
                f"{class_name}.{name}({parameter})"
                for parameter in parameters
                if parameter not in known
            ]
    if missing:
        raise VllmUnavailable(
            f"this vLLM {check_version()} is not the one that the hosting was made for; it lacks "
            + ", ".join(missing)
        )


def check_arguments(arguments: dict[str, Any]) -> None:
    """Raises EngineError for arguments (`engine.vllm`) that the hosting owns.

    Names that vLLM does not know are found by `known_arguments`, which needs vLLM.
    """
    for name in arguments:
        if name in OWNED_ARGUMENTS:
            raise EngineError(f"engine.vllm.{name} cannot be set: {OWNED_ARGUMENTS[name]}")


def start_core(options: EngineOptions, engine_name: str) -> EngineCore:
    """Loads the model into a vLLM whose connector finds the hooks under `engine_name`.

    Raises VllmUnavailable, UnsupportedModel, OutOfMemory or EngineError; each says what to do.
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

    from vllm.config import KVEventsConfig, KVTransferConfig
    from vllm.distributed.kv_transfer import kv_transfer_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    known_arguments = {field.name for field in dataclasses.fields(EngineArgs)}
    for name in options.vllm_arguments:
        if name not in known_arguments:
            raise EngineError(f"engine.vllm.{name} is no argument of vLLM {check_version()}")
    limits = options.limits
    arguments = EngineArgs(
        model=str(options.model_folder),
        skip_tokenizer_init=True,
        dtype=options.dtype,
        # -1: what the model and the pool allow.
        max_model_len=options.max_model_len or -1,
        block_size=limits.block_tokens,
        kv_cache_memory_bytes=options.kv_bytes,
        max_num_seqs=RESERVE_SLOTS * limits.max_running,
        # A step's prefill, and beside it a token of each that decodes.
        max_num_batched_tokens=limits.max_step_tokens + RESERVE_SLOTS * limits.max_running,
        enable_prefix_caching=True,
        # Gateways refuse images, so nothing before the language model is loaded.
        language_model_only=True,
        scheduling_policy="priority",
        async_scheduling=False,
        seed=0,
        disable_log_stats=True,
        logits_processors=["diptych.engine.vllm.logits_processor:DiptychSampling"],
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="DiptychConnector",
            kv_connector_module_path="diptych.engine.vllm.connector",
            kv_role="kv_both",
            kv_load_failure_policy="fail",
            kv_connector_extra_config={ENGINE_NAME: engine_name},
        ),
        **{"enforce_eager": True, **options.vllm_arguments},
    )
    # vLLM keeps the connector of its model in a global, and makes none if there is one.
    kv_transfer_state._KV_CONNECTOR_AGENT = None
    try:
        config = arguments.create_engine_config()
        check_model(config, limits.block_tokens)
        return EngineCore(config, Executor.get_class(config), log_stats=False)
    except (ValueError, NotImplementedError) as error:
        text = describe_error(error)
        if "memory" in text:
            raise OutOfMemory(f"vLLM: {text}") from error
        raise UnsupportedModel(f"vLLM: {text}") from error
