"""Which attention library computes here: what is found, what stands against it, what is taken.

Pure but for `probe`, which looks at the device and imports what it finds.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import KernelUnavailable

log = logging.getLogger(__name__)

#: backend -> modules that bring it, the preferred one first
MODULES = {
    "fa3": ("flash_attn_interface", "sgl_kernel.flash_attn"),
    "fa2": ("flash_attn",),
    "fa4": ("flash_attn.cute",),
    "flashinfer": ("flashinfer",),
    "triton": ("triton",),
}
#: major compute capability -> backends in order of speed there; others have Triton alone
ORDER = {
    8: ("fa2", "triton"),
    9: ("fa3", "fa2", "triton"),
    10: ("fa4", "flashinfer", "triton"),
}
#: major compute capabilities that a backend's kernels know
CAPABILITIES = {
    "fa3": (9,),
    "fa2": (8, 9, 10),
    "fa4": (9, 10, 11),
    "flashinfer": (8, 9, 10, 12),
}
FA2_PAGE = 256  #: what flash-attn 2.8 wants a block to be a multiple of
FP8 = "float8_e4m3fn"
NAMES = ("auto", *MODULES)


@dataclass(frozen=True, slots=True)
class Found:
    """What is here. `modules`: name -> None if it can be imported, else why not."""

    capability: tuple[int, int] | None  #: of the GPU; None: a CPU
    modules: dict[str, str | None]


@dataclass(frozen=True, slots=True)
class Need:
    """What attention has to compute."""

    dtype: str  #: of the model
    kv_dtype: str
    block_tokens: int
    head_dim: int
    exact: bool  #: a row's bits must not depend on the batch


@dataclass(frozen=True, slots=True)
class Choice:
    """`module` brings backend `name`; `passed`: those before it, with what stands against each."""

    name: str
    module: str
    passed: tuple[tuple[str, str], ...]


def choose(found: Found, need: Need, wanted: str = "auto") -> Choice:
    """The first backend that can compute this here, or `wanted`.

    Raises KernelUnavailable, naming what stands against it.
    """
    if wanted not in NAMES:
        raise KernelUnavailable(f"attention {wanted!r}: expected one of {', '.join(NAMES)}")
    major = found.capability[0] if found.capability else 0
    order = ORDER.get(major, ("triton",)) if wanted == "auto" else (wanted,)
    passed: list[tuple[str, str]] = []
    for name in order:
        against = obstacle(name, found, need)
        if against is None:
            module = next(one for one in MODULES[name] if found.modules.get(one) is None)
            return Choice(name, module, tuple(passed))
        passed.append((name, against))
    said = "; ".join(f"{name}: {against}" for name, against in passed)
    raise KernelUnavailable(f"no attention backend for this GPU: {said}")


def obstacle(name: str, found: Found, need: Need) -> str | None:
    """What stands against a backend, None if nothing does."""
    knows = CAPABILITIES.get(name)
    if knows and found.capability is None:
        return "there is no GPU"
    if knows and found.capability and found.capability[0] not in knows:
        major, minor = found.capability
        return f"its kernels do not know compute capability {major}.{minor}"
    missing = [found.modules.get(one) for one in MODULES[name]]
    if None not in missing:
        return "; ".join(str(one) for one in missing)
    if need.kv_dtype == FP8 and not knows_fp8(found):
        return "FP8 needs compute capability 8.9"
    if name == "triton":
        return _triton_obstacle(need)
    if need.exact:
        return "its splits depend on the batch, and exact was asked for"
    if need.dtype not in ("bfloat16", "float16"):
        return f"it does not compute in {need.dtype}"
    if need.kv_dtype != need.dtype:
        return f"a KV cache of {need.kv_dtype} is read by our Triton kernel only"
    if name == "fa2" and need.block_tokens % FA2_PAGE:
        return f"blocks of {need.block_tokens} tokens are no multiple of {FA2_PAGE}"
    return None


def knows_fp8(found: Found) -> bool:
    """A CPU does, by Triton's interpreter."""
    return found.capability is None or found.capability >= (8, 9)


def _triton_obstacle(need: Need) -> str | None:
    sizes = {"blocks of %d tokens": need.block_tokens, "heads of %d numbers": need.head_dim}
    for what, size in sizes.items():
        if size < 16 or size & (size - 1):
            return f"{what % size}: it knows powers of two from 16 on"
    return None


def probe(device: torch.device, load: Callable[[str], object] = importlib.import_module) -> Found:
    """Looks for all that may be of use on `device`. A module that breaks is one that is missing."""
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
    return Found(capability, modules)


def report(choice: Choice) -> None:
    """Logs what was taken, and why what comes before it was not."""
    for name, against in choice.passed:
        log.info("attention: not %s: %s", name, against)
    log.info("attention: %s (%s)", choice.name, choice.module)
