"""Which backend the options choose, and that a CPU's needs nothing of a GPU's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from diptych.engine.backend_registry import BACKENDS, open_backend
from diptych.engine.errors import KernelUnavailable
from diptych.engine.options import EngineOptions

FOLDER = Path("checkpoint")


@pytest.mark.parametrize(
    ("device", "attention", "name"),
    [
        ("cpu", "auto", "CpuBackend"),
        ("cpu", "cpp", "CpuBackend"),
        ("cpu", "torch", "CpuBackend"),
        ("cpu", "triton", "InterpretedBackend"),
        ("cpu", "fa3", "InterpretedBackend"),
        ("cuda", "auto", "CudaBackend"),
        ("cuda", "triton", "CudaBackend"),
    ],
)
def test_device_and_attention_choose_the_backend(device: str, attention: str, name: str) -> None:
    options = EngineOptions(FOLDER, device=device, attention=attention)
    assert type(open_backend(options)).__name__ == name


def test_an_unknown_device_is_named_with_those_that_there_are() -> None:
    with pytest.raises(KernelUnavailable, match="device 'tpu': expected one of cpu, cuda"):
        open_backend(EngineOptions(FOLDER, device="tpu"))


def test_opening_the_cpu_s_backend_imports_nothing_of_a_gpu_s() -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from diptych.engine.backend_registry import open_backend\n"
        "from diptych.engine.options import EngineOptions\n"
        "open_backend(EngineOptions(Path('checkpoint')))\n"
        "print([name for name in ('triton', 'diptych.engine.gpu_backend') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"


def test_only_a_gpu_that_need_not_be_exact_sums_in_any_order() -> None:
    for name in BACKENDS:
        backend = BACKENDS[name]()
        exact = EngineOptions(FOLDER, device="cuda", exact=True)
        inexact = EngineOptions(FOLDER, device="cuda")
        assert not backend.sums_in_any_order(exact)
        assert backend.sums_in_any_order(inexact) == (name == "cuda")
