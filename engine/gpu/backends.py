"""Which attention library computes on this GPU: what is installed, what cannot run, what is taken.

The choice is pure: `choose_backend` compares a `GpuEnvironment` with `AttentionNeeds`. Only
`probe_environment` looks at the device and imports what it finds.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import KernelUnavailable

log = logging.getLogger(__name__)

#: backend -> the modules that bring it, the preferred one first.
MODULES = {
    "fa3": ("flash_attn_interface", "sgl_kernel.flash_attn"),
    "fa2": ("flash_attn",),
    "fa4": ("flash_attn.cute",),
    "flashinfer": ("flashinfer",),
    "triton": ("triton",),
}

#: major compute capability -> backends in order of speed there; other GPUs have Triton alone.
#: FlashInfer is in no order until it has run here: it is taken if it is asked for by name.
ORDER = {
    8: ("fa2", "triton"),
    9: ("fa3", "fa2", "triton"),
    10: ("fa4", "triton"),
}

#: backend -> the major compute capabilities that its kernels know. Triton knows all of them.
CAPABILITIES = {
    "fa3": (9,),
    "fa2": (8, 9, 10),
    "fa4": (9, 10, 11),
    "flashinfer": (8, 9, 10, 12),
}

#: flash-attn 2.8 reads blocks of a multiple of so many tokens.
FA2_PAGE = 256

#: The name of the one type of FP8 that a KV cache may have.
FP8 = "float8_e4m3fn"

#: The first compute capability that has FP8.
FP8_CAPABILITY = (8, 9)

#: What the setting `attention` may be on a GPU.
NAMES = ("auto", *MODULES)


@dataclass(frozen=True, slots=True)
class GpuEnvironment:
    """What a process finds on its machine."""

    capability: tuple[int, int] | None  #: Compute capability of the GPU; None on a CPU.
    modules: dict[str, str | None]  #: module -> None if it can be imported, else why not.


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What attention has to compute."""

    dtype: str  #: Of the model.
    kv_dtype: str  #: Of the numbers in the KV cache.
    block_tokens: int  #: Tokens of a block of the KV cache.
    head_dim: int  #: Numbers of a head.
    exact: bool  #: True: a row's bits must not depend on the batch.


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The backend that is taken, and those that were passed over."""

    name: str
    module: str  #: Brings the backend.
    passed_over: tuple[tuple[str, str], ...]  #: Backends tried before, each with its obstacle.


def choose_backend(
    environment: GpuEnvironment, needs: AttentionNeeds, setting: str = "auto"
) -> BackendChoice:
    """Return the first backend that can compute this here, or the one that `setting` names.

    Raises KernelUnavailable, which names the obstacle of each backend that was tried.
    """
    if setting not in NAMES:
        raise KernelUnavailable(f"attention {setting!r}: expected one of {', '.join(NAMES)}")
    if setting == "auto":
        major = environment.capability[0] if environment.capability else 0
        candidates = ORDER.get(major, ("triton",))
    else:
        candidates = (setting,)
    passed_over: list[tuple[str, str]] = []
    for name in candidates:
        reason = obstacle(name, environment, needs)
        if reason is None:
            module = next(
                module for module in MODULES[name] if environment.modules.get(module) is None
            )
            return BackendChoice(name, module, tuple(passed_over))
        passed_over.append((name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in passed_over)
    raise KernelUnavailable(f"no attention backend can be used here: {reasons}")


def obstacle(name: str, environment: GpuEnvironment, needs: AttentionNeeds) -> str | None:
    """Return why a backend cannot compute this here, or None if it can."""
    reason = _environment_obstacle(name, environment)
    if reason is not None:
        return reason
    if needs.kv_dtype == FP8 and not supports_fp8(environment):
        return "FP8 needs compute capability 8.9"
    if not _is_power_of_two(needs.head_dim):
        # Whichever library attention has, `elementwise.rope_store` is our own.
        return f"heads of {needs.head_dim} numbers: rope knows powers of two only"
    if name == "triton":
        return _triton_obstacle(needs)
    return _library_obstacle(name, needs)


def _environment_obstacle(name: str, environment: GpuEnvironment) -> str | None:
    """Return why a backend cannot run on this GPU with what is installed, or None."""
    supported_majors = CAPABILITIES.get(name)
    if supported_majors and environment.capability is None:
        return "there is no GPU"
    if (
        supported_majors
        and environment.capability
        and environment.capability[0] not in supported_majors
    ):
        major, minor = environment.capability
        return f"its kernels do not know compute capability {major}.{minor}"
    import_errors = [environment.modules.get(module) for module in MODULES[name]]
    if None not in import_errors:
        return "; ".join(str(error) for error in import_errors)
    return None


def _library_obstacle(name: str, needs: AttentionNeeds) -> str | None:
    """Return why a library that is not Triton cannot compute this, or None."""
    if needs.exact:
        return "its splits depend on the batch, and exact was asked for"
    if needs.dtype not in ("bfloat16", "float16"):
        return f"it does not compute in {needs.dtype}"
    if needs.kv_dtype != needs.dtype:
        return f"a KV cache of {needs.kv_dtype} is read by our Triton kernel only"
    if name == "fa2" and needs.block_tokens % FA2_PAGE:
        return f"blocks of {needs.block_tokens} tokens are no multiple of {FA2_PAGE}"
    return None


def _triton_obstacle(needs: AttentionNeeds) -> str | None:
    """Return which size our Triton kernels do not know, or None."""
    sizes = {
        f"blocks of {needs.block_tokens} tokens": needs.block_tokens,
        f"heads of {needs.head_dim} numbers": needs.head_dim,
    }
    for description, size in sizes.items():
        if size < 16 or not _is_power_of_two(size):
            return f"{description}: it knows powers of two from 16 on"
    return None


def _is_power_of_two(size: int) -> bool:
    return size > 0 and not size & (size - 1)


def supports_fp8(environment: GpuEnvironment) -> bool:
    """Return whether FP8 can be computed. A CPU can, by Triton's interpreter."""
    return environment.capability is None or environment.capability >= FP8_CAPABILITY


def probe_environment(
    device: torch.device, load: Callable[[str], object] = importlib.import_module
) -> GpuEnvironment:
    """Look for everything that may be of use on `device`.

    A module that breaks while `load` imports it counts as one that is missing.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    modules: dict[str, str | None] = {}
    for names in MODULES.values():
        for name in names:
            try:
                load(name)
                modules[name] = None
            except Exception as error:  # an extension built for another torch raises anything
                lines = str(error).strip().splitlines() or [type(error).__name__]
                modules[name] = f"import {name}: {lines[0]}"
    return GpuEnvironment(capability, modules)


def log_choice(choice: BackendChoice) -> None:
    """Log which backend was taken, and why those before it were not."""
    for name, reason in choice.passed_over:
        log.info("attention: not %s: %s", name, reason)
    log.info("attention: %s (%s)", choice.name, choice.module)
