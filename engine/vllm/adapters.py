"""LoRA adapters in vLLM: room for them, and loading all of them at the start.

What vLLM would leave out of an adapter without an error is an error here: requests for the adapter
would be answered by the model itself, or by a part of the adapter.
"""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..adapters import read_adapter
from ..errors import UnsupportedModel
from .models import describe_error

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.core import EngineCore


def adapter_arguments(adapters: dict[str, Path]) -> dict[str, Any]:
    """Returns the arguments with which vLLM has room for all adapters at a time.

    The last slot for an adapter stays empty. On a CPU, vLLM's kernels take the weights of a request
    without an adapter from slot -1, which for torch is the last one: in a batch with others such a
    request would be answered by the last adapter. Raises what `read_adapter` raises.
    """
    if not adapters:
        return {}
    return {
        "enable_lora": True,
        "max_loras": len(adapters) + 1,
        "max_lora_rank": max(read_adapter(folder).room_rank for folder in adapters.values()),
    }


def load_adapters(core: EngineCore, adapters: dict[str, Path]) -> dict[str, LoRARequest]:
    """Has vLLM load all adapters; returns by name what a request for one carries.

    Raises UnsupportedModel for one that vLLM cannot compute with this model, also where vLLM itself
    would leave a part of it out.
    """
    if not adapters:
        return {}
    from vllm.lora.request import LoRARequest

    requests: dict[str, LoRARequest] = {}
    for number, (name, folder) in enumerate(adapters.items(), 1):
        requests[name] = LoRARequest(name, number, str(folder))
        try:
            core.add_lora(requests[name])
        except Exception as error:  # of vLLM's loader, in many classes
            reason = describe_error(error) or type(error).__name__
            raise UnsupportedModel(f"vLLM cannot load the adapter {name}: {reason}") from error
        misfit = _find_misfit(core, number)
        if misfit:
            raise UnsupportedModel(
                f"the adapter {name} is not one of this model: {misfit}; give the model that it was "
                "trained on"
            )
    return requests


def _find_misfit(core: Any, number: int) -> str:
    """Returns what of a loaded adapter does not fit the model; empty if all of it fits."""
    runner = core.model_executor.driver_worker.worker.model_runner
    manager = runner.lora_manager._adapter_manager
    matrices = manager.get_adapter(number).loras
    if not matrices:
        return "none of its weights has a name that this model knows"
    for module_name, weights in matrices.items():
        module = manager.modules.get(module_name)
        if module is None:
            return f"it has weights for {module_name}, which this model has not"
        flaw = _find_flaw(module, weights)
        if flaw:
            return f"its {module_name} {flaw}"
    return ""


def _find_flaw(module: Any, weights: Any) -> str:
    """Returns why an adapter's matrices of a module are not the module's; empty if they are.

    A module that is several of a checkpoint's has a list of matrices, of which some may be missing.
    vLLM copies smaller ones into the corner of the room for them, and nothing of one without its
    partner. The room has four dimensions but for embeddings, whose sizes vLLM compares itself.
    """
    given = zip_longest(_as_list(weights.lora_a), _as_list(weights.lora_b))
    rooms = zip(_as_list(module.lora_a_stacked), _as_list(module.lora_b_stacked), strict=True)
    for (narrow, wide), (narrow_room, wide_room) in zip(given, rooms, strict=False):
        if narrow is None and wide is None:
            continue
        if narrow is None or wide is None:
            return "has one of two matrices only"
        if narrow_room.dim() != 4:
            continue
        takes, gives = narrow_room.shape[-1], wide_room.shape[-2]
        if (narrow.shape[-1], wide.shape[0]) != (takes, gives):
            return (
                f"takes {narrow.shape[-1]} numbers and gives {wide.shape[0]}, and the model's takes "
                f"{takes} and gives {gives}"
            )
    return ""


def _as_list(matrices: Any) -> list[Any]:
    """Returns the matrices of a module, which vLLM has as one tensor where there is one."""
    return list(matrices) if isinstance(matrices, list | tuple) else [matrices]
