"""Which backend is taken, and what is said about the others."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diptych.engine.errors import KernelUnavailable
from diptych.engine.gpu.backends import (
    MODULES,
    AttentionNeeds,
    GpuEnvironment,
    choose_backend,
    log_choice,
    probe_environment,
)

ALL = {name: None for names in MODULES.values() for name in names}
NEED = AttentionNeeds("bfloat16", "bfloat16", 64, 128, exact=False)
WIDE = replace(NEED, block_tokens=256)


def found(major: int, *missing: str) -> GpuEnvironment:
    return GpuEnvironment((major, 0), ALL | {name: f"import {name}: not here" for name in missing})


FA3 = MODULES["fa3"]


@pytest.mark.parametrize(
    ("here", "need", "name"),
    [
        (found(9), NEED, "fa3"),
        (found(9, *FA3), WIDE, "fa2"),
        (found(9, *FA3), NEED, "triton"),
        (found(9, *FA3, "flash_attn"), WIDE, "triton"),
        (found(10), NEED, "fa4"),
        (found(10, "flash_attn.cute"), NEED, "triton"),
        (found(8), WIDE, "fa2"),
        (found(8), NEED, "triton"),
        (found(12), NEED, "triton"),
    ],
)
def test_the_first_that_can_is_taken(here: GpuEnvironment, need: AttentionNeeds, name: str) -> None:
    assert choose_backend(here, need).name == name


def test_the_second_module_of_a_backend_will_do() -> None:
    assert choose_backend(found(9, "flash_attn_interface"), NEED).module == "sgl_kernel.flash_attn"


@pytest.mark.parametrize(
    ("need", "word"),
    [
        (replace(NEED, exact=True), "exact"),
        (replace(NEED, dtype="float32", kv_dtype="float32"), "float32"),
        (replace(NEED, kv_dtype="float8_e4m3fn"), "float8_e4m3fn"),
    ],
)
def test_what_libraries_cannot_falls_to_triton(need: AttentionNeeds, word: str) -> None:
    choice = choose_backend(found(9), need)
    assert choice.name == "triton"
    assert word in dict(choice.passed_over)["fa3"]


def test_fp8_is_refused_where_the_gpu_has_none() -> None:
    need = replace(NEED, kv_dtype="float8_e4m3fn")
    with pytest.raises(KernelUnavailable, match=r"triton: FP8 needs compute capability 8\.9"):
        choose_backend(found(8), need)
    assert choose_backend(GpuEnvironment((8, 9), ALL), need).name == "triton"


def test_each_one_passed_over_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log_choice(choose_backend(found(9, *FA3), NEED))
    first, second, last = caplog.messages
    assert "not fa3: import flash_attn_interface: not here; import sgl_kernel" in first
    assert "not fa2: blocks of 64 tokens are no multiple of 256" in second
    assert last == "attention: triton (triton)"


@pytest.mark.parametrize(
    ("wanted", "here", "message"),
    [
        ("fa3", found(10), "compute capability 10.0"),
        ("fa2", found(9), "multiple of 256"),
        ("fa4", GpuEnvironment(None, ALL), "there is no GPU"),
        ("flashinfer", found(10, "flashinfer"), "import flashinfer: not here"),
        ("fa5", found(9), "expected one of auto, fa3"),
    ],
)
def test_what_was_asked_for_is_taken_or_refused(
    wanted: str, here: GpuEnvironment, message: str
) -> None:
    with pytest.raises(KernelUnavailable, match=message):
        choose_backend(here, NEED, wanted)
    assert choose_backend(found(10), NEED, "triton").name == "triton"


def test_no_backend_at_all_names_each_obstacle() -> None:
    with pytest.raises(KernelUnavailable, match=r"fa2: .*; triton: heads of 96 numbers"):
        choose_backend(found(8), replace(NEED, head_dim=96))


def test_heads_that_our_own_kernels_do_not_know_are_refused_with_any_library() -> None:
    """Rope and the store of K and V are Triton's, whichever library computes attention."""
    with pytest.raises(KernelUnavailable, match=r"fa3: heads of 80 numbers.*; triton: heads of 80"):
        choose_backend(found(9), replace(NEED, head_dim=80))
    assert choose_backend(found(9), replace(NEED, head_dim=64)).name == "fa3"


def test_a_module_that_breaks_is_missing() -> None:
    def load(name: str) -> object:
        if name == "flash_attn":
            raise RuntimeError("undefined symbol: _ZN3c10\nmore")
        if name == "triton":
            return object()
        raise ImportError(f"No module named {name!r}")

    here = probe_environment(torch.device("cpu"), load)
    assert here.capability is None
    assert here.modules["triton"] is None
    assert here.modules["flash_attn"] == "import flash_attn: undefined symbol: _ZN3c10"


def test_an_engine_without_a_gpu_needs_no_triton() -> None:
    """It is an extra, and it has no wheel for some platforms."""
    code = "import sys; sys.modules['triton'] = None; import diptych.engine.engine"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_readme_says_of_each_backend_whether_it_ran() -> None:
    page = (Path(__file__).parents[3] / "engine/gpu/README.md").read_text()
    section = page.split("## On a GPU")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:2] == "| "]
    (_, heading), *lines = rows
    assert heading == "on a GPU" and len(lines) > 10
    for what, ran in lines:
        assert ran == "never ran" or re.fullmatch(r"ran on .+, 20\d\d-\d\d-\d\d", ran), what
    for name in MODULES:
        assert sum(f"Attention by `{name}`" in what for what, _ in lines) == 1, name
