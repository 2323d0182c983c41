"""The proof's own logic on a CPU: floors by hand, and each section on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from diptych.engine.gpu import bundle, prove, prove_attention, roofline
from diptych.engine.gpu.drawn import DrawnRows
from diptych.engine.gpu.prove_state import ProofState
from diptych.engine.gpu.report import markdown_table
from diptych.engine.gpu.roofline import (
    LLAMA_3_8B,
    DeviceCeilings,
    decode_floor,
    kv_token_bytes,
    prefill_flops,
)
from diptych.kv_transfer.errors import TransportUnavailable

H200 = DeviceCeilings(4.3e12, 790e12)
CPU = torch.device("cpu")
TINY = replace(
    LLAMA_3_8B,
    vocab=256,
    hidden=64,
    intermediate=64,
    layers=1,
    heads=4,
    kv_heads=2,
    head_dim=16,
    max_positions=512,
    windows=(None,),
    dtype="float32",
)


class Event:
    """A CUDA event on a device that is never ahead of the host."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) * 1e3


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.parametrize(
    ("batch", "context", "floor_ms"),
    [(1, 1024, 3.52), (32, 1024, 4.49), (128, 1024, 7.49), (256, 1024, 12.9), (32, 4096, 7.49)],
)
def test_floors_are_those_worked_out_by_hand(batch: int, context: int, floor_ms: float) -> None:
    found = decode_floor(LLAMA_3_8B, batch, context).seconds(H200) * 1e3
    assert found == pytest.approx(floor_ms, rel=0.005)


def test_sizes_of_llama_3_8b() -> None:
    assert kv_token_bytes(LLAMA_3_8B) == 128 << 10
    assert decode_floor(LLAMA_3_8B, 1, 1).weight_bytes == pytest.approx(15.0e9, rel=0.01)
    assert prefill_flops(LLAMA_3_8B, 2048) / 2048 == pytest.approx(14.5e9, rel=0.02)
    assert prefill_flops(LLAMA_3_8B, 32_768) / 32_768 == pytest.approx(22.5e9, rel=0.02)
    halved = decode_floor(LLAMA_3_8B, 32, 1024, weight_number_bytes=1, kv_number_bytes=1)
    assert halved.kv_bytes * 2 == decode_floor(LLAMA_3_8B, 32, 1024).kv_bytes


def test_a_table_is_markdown() -> None:
    assert markdown_table([["a", "b"], ["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_without_a_device_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["prove"])
    prove.main()
    assert "no CUDA device" in capsys.readouterr().out


@pytest.mark.long
def test_sections_of_a_model_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(roofline.PREDICTED_MS, (2, 128), 4.3)
    monkeypatch.setitem(roofline.PREDICTED_TOKENS_S, 64, 41_000)
    with torch.inference_mode():
        bench = prove.DecodeBench(TINY, CPU, 5, 5 * 256)
        decode = prove.decode_section(bench, H200, prove.BF16, ((2, 128),))
        assert "| 2 x 128 |" in decode.lines[-1]
        assert decode.lines[-1].endswith("| - |"), "the predictions are of another model"
        (prefill,) = prove.prefill_section(bench, H200, (64,)).lines
        assert "| 64 |" in prefill and prefill.endswith("| - |")
        assert not prove.graphs_section(bench).failed


@pytest.mark.long
def test_greedy_ids_of_a_right_model_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove, "SMALL", {"hidden": 64, "layers": 2, "intermediate": 64})
    with torch.inference_mode():
        assert not prove.greedy_section(TINY, CPU, 3).failed
        monkeypatch.setattr(prove, "on_cpu", lambda decoder: broken(decoder, on_cpu(decoder)))
        assert prove.greedy_section(TINY, CPU, 3).failed


on_cpu = prove.on_cpu


def broken(_: object, decoder):
    decoder.weights.embedding = -decoder.weights.embedding  # the other decoder keeps its own
    return decoder


def triton_error() -> float:
    """The error that the proof finds in our own attention, in float32 on the CPU."""
    return prove_attention.attention_error(
        "triton", "triton", CPU, block_tokens=64, head_dim=64, dtype=torch.float32
    )


@pytest.mark.long
def test_an_error_is_measured_and_a_wrong_backend_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert triton_error() < 1e-5
    from diptych.engine.gpu.paged import PagedAttention

    right = PagedAttention.__call__
    monkeypatch.setattr(
        PagedAttention, "__call__", lambda *args, **named: right(*args, **named) * 1.05
    )
    assert triton_error() > prove_attention.TOLERANCE


def test_ceilings_are_bytes_and_products_over_time() -> None:
    found = prove.measure_ceilings(CPU, 1 << 20, 64)
    assert 1e6 < found.copy_bytes_s < 1e13 and 1e5 < found.matmul_flops_s < 1e15


def test_a_section_that_breaks_leaves_the_others_to_be_made() -> None:
    def breaks() -> prove.ProofSection:
        raise RuntimeError("CUDA error")

    section = prove.attempt("Decode", breaks)
    assert section.failed and section.title == "Decode" and "CUDA error" in section.lines[0]
    whole = prove.ProofSection("Prefill", ["fine"])
    assert prove.attempt("Prefill", lambda: whole) is whole


@pytest.mark.parametrize(
    ("error", "failed"),
    [(TransportUnavailable("no NIXL here"), False), (TimeoutError("nothing arrived"), True)],
)
def test_a_handover_without_its_transport_is_left_out_and_one_that_hangs_fails(
    error: Exception, failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_error(*_: object) -> None:
        raise error

    monkeypatch.setattr(prove, "measure_handover", raise_error)
    section = prove.attempt("Handover", partial(prove.handover_section, CPU, blocks=8))
    assert section.failed is failed
    assert str(error) in section.lines[0]


class Runner:
    """A runner whose steps all give the same, and whose graphs cannot be captured."""

    graphs = True

    def capture(self) -> None:
        raise RuntimeError("capture failed")

    def launch(self, rows: list) -> Runner:
        return self

    def read(self) -> DrawnRows:
        numbers = np.array([0.5], np.float32)
        return DrawnRows([1], numbers, numbers, numbers, numbers, numbers)


class Bench:
    """A bench of that runner."""

    def __init__(self, *_: object) -> None:
        self.runner = Runner()

    def rows(self, *_: int) -> list:
        return []


def test_after_a_failed_capture_the_other_parts_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    monkeypatch.setattr(prove, "measure_ceilings", lambda device: H200)
    monkeypatch.setattr(prove, "DecodeBench", lambda *_: bench)
    titles = [title for title, _ in prove.device_parts(prove.ProofSize.small(), CPU)]
    assert "Capture" in titles and "Graphs" not in titles
    assert {"Greedy ids", "Sampling", "Ranks"} <= set(titles)


def fake_sections(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    """Two sections, of which the second has a part that breaks."""

    def part(name: str, *, breaks: bool = False) -> prove.ProofSection:
        calls.append(name)
        if breaks:
            raise RuntimeError("CUDA error")
        return prove.ProofSection(name, ["fine"])

    def first(size, device):
        yield "a", partial(part, "a")

    def second(size, device):
        yield "b", partial(part, "b", breaks=True)
        yield "c", partial(part, "c")
        raise RuntimeError("no model")

    monkeypatch.setattr(prove, "SECTIONS", {"first": first, "second": second})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(prove, "describe_machine", lambda device: {"device": "a fake"})


def run_cli(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["prove", *arguments])
    with pytest.raises(SystemExit) as ended:
        prove.main()
    return int(ended.value.code or 0)


def test_a_section_runs_alone_and_a_run_goes_on_where_it_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[str] = []
    fake_sections(monkeypatch, calls)
    state = tmp_path / "proof.json"
    assert run_cli(monkeypatch, "--state", str(state), "--section", "first") == 0
    assert calls == ["a"]
    assert run_cli(monkeypatch, "--state", str(state)) == 1
    assert calls == ["a", "b", "c"], "the first section was made again, or the second cut short"
    stored = json.loads(state.read_text())
    assert stored["machine"] == {"device": "a fake"}
    assert [part["title"] for part in stored["sections"]["second"]] == ["b", "c", "Preparation"]
    assert "## second: b - FAILED" in state.with_suffix(".md").read_text()
    assert run_cli(monkeypatch, "--state", str(state), "--again", "--section", "first") == 0
    assert calls[3:] == ["a"]


def test_what_has_no_time_left_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fake_sections(monkeypatch, calls)
    made = prove.make_section("second", prove.ProofSize.small(), CPU, deadline_s=-1)
    assert calls == [] and "time is over" in made[0].lines[0]


def test_results_of_another_machine_are_not_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "proof.json"
    state = ProofState({"device": "one"}, {"device": [prove.ProofSection("a", ["b"])]})
    state.write(path)
    assert ProofState.read(path, {"device": "one"}).sections == state.sections
    assert ProofState.read(path, {"device": "other"}).sections == {}


def test_attention_is_laid_out_for_what_is_served() -> None:
    served = prove.ProofSize.full().served()
    assert served.max_positions == 4096 + prove.BLOCK_TOKENS < LLAMA_3_8B.max_positions


@pytest.mark.slow
def test_the_device_samplers_section_compares_it_with_the_hosts() -> None:
    section = prove.sampling_section(CPU, vocab=300, rows=6)
    assert not section.failed and section.lines[0].startswith("6 of 6")


def wheel(name: str, folder: Path) -> str | None:
    """A wheel without a registry: one package has none, another is too large."""
    if name == "xxhash":
        return "no matching distribution"
    with zipfile.ZipFile(folder / f"{name}-1.0-cp312-none-any.whl", "w") as file:
        file.writestr(f"{name.replace('-', '_')}/__init__.py", "number = 7\n")
        if name.startswith("nixl"):
            file.writestr("large.so", os.urandom(1 << 16))
    return None


def test_a_bundle_is_importable_from_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "SIZE_LIMIT", 32 << 20)
    folder = tmp_path / "bundle"
    made = bundle.make_bundle(folder, wheel)
    assert "msgspec-1.0-cp312-none-any.whl" in made.packed
    assert made.missing == ["xxhash: no matching distribution"]
    code = "import diptych.engine.gpu.report, msgspec; print(diptych.__file__, msgspec.number)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(folder)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == [str(folder / "diptych" / "__init__.py"), "7"], done.stderr
    with pytest.raises(FileExistsError, match="not empty"):
        bundle.make_bundle(folder, wheel)


def test_what_is_too_large_for_a_machine_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "SIZE_LIMIT", 1 << 20)
    made = bundle.make_bundle(tmp_path / "bundle", wheel)
    assert made.packed == [] and len(made.missing) == len(bundle.REQUIRED + bundle.OPTIONAL)
    assert "what is left of 1 MiB" in (tmp_path / "bundle" / "MISSING.txt").read_text()


@pytest.mark.parametrize("graphs", [True, False])
def test_comparing_graphs_leaves_the_runner_as_it_was(graphs: bool) -> None:
    bench = Bench()
    bench.runner.graphs = graphs
    assert not prove.graphs_section(bench).failed  # type: ignore[arg-type]
    assert bench.runner.graphs is graphs
