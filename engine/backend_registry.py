"""The backends by name, and which one the options choose.

No other module of the core compares device names. A backend's module is imported when
`open_backend` first needs it, so a process that computes on a CPU imports no Triton.
"""

from __future__ import annotations

from collections.abc import Callable

from .backend import Backend
from .errors import KernelUnavailable
from .options import EngineOptions

#: settings of `attention` that a CPU computes; any other name is a library of `gpu.backends`
CPU_ATTENTION = ("auto", "cpp", "torch")


def _open_cpu() -> Backend:
    from .cpu_backend import CpuBackend

    return CpuBackend()


def _open_cuda() -> Backend:
    from .gpu_backend import CudaBackend

    return CudaBackend()


def _open_interpreter() -> Backend:
    from .gpu_backend import InterpretedBackend

    return InterpretedBackend()


#: name -> what makes the backend; `options.device` names the first two
BACKENDS: dict[str, Callable[[], Backend]] = {
    "cpu": _open_cpu,
    "cuda": _open_cuda,
    "interpreter": _open_interpreter,  #: a GPU's operations on a CPU, by Triton's interpreter
}


def open_backend(options: EngineOptions) -> Backend:
    """Returns the backend of these options. Raises KernelUnavailable for an unknown device."""
    name: str = options.device
    if name == "cpu" and options.attention not in CPU_ATTENTION:
        name = "interpreter"
    if name not in BACKENDS:
        raise KernelUnavailable(f"device {name!r}: expected one of {', '.join(BACKENDS)}")
    return BACKENDS[name]()
