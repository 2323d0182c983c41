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

#: Modules whose matrices vLLM pads, so that their sizes say nothing.
PADDED_MODULES = ("lm_head", "embed_tokens")


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
        if not module_name.endswith(PADDED_MODULES):
            sizes = _find_other_sizes(module, weights)
            if sizes:
                return f"its {module_name} {sizes}"
    return ""


def _find_other_sizes(module: Any, weights: Any) -> str:
    """Returns how an adapter's matrices of a module differ in size from the module's; empty: not.

    A module that is several of a checkpoint's has a list of matrices. vLLM copies smaller ones into
    the corner of the room for them. Matrices of experts (three dimensions) are not compared.
    """
    given_narrow = weights.lora_a if isinstance(weights.lora_a, list) else [weights.lora_a]
    given_wide = weights.lora_b if isinstance(weights.lora_b, list) else [weights.lora_b]
    stacked = zip(module.lora_a_stacked, module.lora_b_stacked, strict=True)
    for (narrow_room, wide_room), narrow, wide in zip_longest(
        stacked, given_narrow, given_wide, fillvalue=None
    ):
        if narrow is None or wide is None or narrow.dim() != 2 or narrow_room.dim() != 4:
            continue
        takes, gives = narrow_room.shape[-1], wide_room.shape[-2]
        if (narrow.shape[-1], wide.shape[0]) != (takes, gives):
            return (
                f"takes {narrow.shape[-1]} numbers and gives {wide.shape[0]}, and the model's takes "
                f"{takes} and gives {gives}"
            )
    return ""
