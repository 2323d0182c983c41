"""`diptych bench engine`: the real child for ours, a script that keeps to the protocol for vLLM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from diptych.cluster.cli import app
from diptych.engine.bench import overlap
from diptych.engine.bench.child import EngineBenchError, EngineProcess
from diptych.engine.bench.machine import waited_share
from diptych.engine.bench.models import SHAPES, write_checkpoint
from diptych.engine.bench.overlap import OverlapRig
from diptych.engine.bench.results import (
    CellWork,
    decode_work,
    geometric_mean_ratio,
    interquartile_range,
    prefill_work,
    summarize_cell,
)
from diptych.engine.spec import ExpertsSpec, read_spec
from diptych.kv_transfer.commands import PushEnded
from diptych.kv_transfer.ticket_speed import Received
from typer.testing import CliRunner

from tests.support.checkpoints import make

MACHINE = {"gb_per_s": 10.0, "tflops": 1.0}
WORK = CellWork(bytes=1e9, flops=1e11, tokens=8)
SMALL = ["--batch", "1,3", "--context", "70", "--prompt", "130", "--rounds", "1", "--threads", "1"]
#: says what vLLM's side would say; every step takes it 1000 ms. Its pid goes to the file `pid`
PEER = """
import json, os, pathlib, sys
pathlib.Path(__file__).with_name("pid").write_text(str(os.getpid()))
settings = json.loads(sys.argv[2])
assert sys.argv[1].endswith("peer.py") and settings["threads"] == 1
print(json.dumps({"ready": {"name": "fake", "missing": ["tcmalloc"]}}), flush=True)
for line in sys.stdin:
    times = json.loads(line).get("times", 0)
    print(json.dumps({"ms": [1000.0] * times}), flush=True)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("bench"), "llama")


def bench(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["bench", "engine", *arguments])
    return result.exit_code, result.stdout, result.stderr


def fake_python(folder: Path, script: str) -> Path:
    path = folder / "python"
    path.write_text(f"#!{sys.executable}\n{script}")
    path.chmod(0o755)
    return path


# ---- numbers -------------------------------------------------------------------------------------


def test_a_cell_holds_the_median_of_medians_and_the_rounds_ratios() -> None:
    ours = [[10.0, 12.0, 90.0], [10.0, 10.0, 10.0], [20.0, 20.0, 20.0]]  # medians 12, 10, 20
    peers = [[24.0], [30.0], [20.0]]  # ratios 2, 3, 1
    numbers = summarize_cell(ours, peers, WORK, MACHINE)
    assert (numbers["ms"], numbers["peer_ms"], numbers["ratio"]) == (12.0, 24.0, 2.0)
    assert numbers["iqr"] == 1.0  # quartiles of 1, 2, 3: 1.5 and 2.5
    assert numbers["tokens_per_s"] == pytest.approx(8 / 0.012, abs=0.1)


def test_shares_are_of_the_measured_machine() -> None:
    numbers = summarize_cell([[200.0]], [], WORK, MACHINE)  # 5 GB/s of 10, 0.5 TFLOP/s of 1
    assert (numbers["bandwidth_share"], numbers["flops_share"]) == (0.5, 0.5)


def test_without_a_peer_a_cell_claims_no_ratio() -> None:
    numbers = summarize_cell([[1.0], [2.0]], [], WORK, MACHINE)
    assert not {"ratio", "iqr", "peer_ms"} & set(numbers)
    assert geometric_mean_ratio([numbers]) is None


def test_geomean_of_twice_as_fast_and_twice_as_slow_is_one() -> None:
    assert geometric_mean_ratio([{"ratio": 2.0}, {"ratio": 0.5}]) == 1.0


def test_only_threads_that_compute_count_as_disturbed() -> None:
    before = {"main": (0, 0), "pool": (0, 0), "helper": (0, 0)}
    after = {"main": (90, 10), "pool": (80, 20), "helper": (1, 300), "new": (100, 100)}
    assert waited_share(before, after, span_ns=100) == 0.2


def test_the_spread_of_one_round_is_nothing() -> None:
    assert interquartile_range([3.0]) == 0.0


def test_work_of_a_step_and_of_a_prompt(checkpoint: Path) -> None:
    spec = read_spec(checkpoint)
    used = spec.parameters - spec.vocab * spec.hidden
    token = 2 * spec.layers * spec.kv_heads * spec.head_dim * 2  # bytes of KV
    assert decode_work(spec, 3, 70).bytes == used * 2 + token * 3 * 70
    one, two = prefill_work(spec, 100).flops, prefill_work(spec, 200).flops
    assert 2 * one < two < 4 * one  # linear layers, and attention


def test_of_a_mixture_only_the_experts_of_the_tokens_are_work(checkpoint: Path) -> None:
    plain = read_spec(checkpoint)
    mixture = ExpertsSpec(
        count=8,
        experts_per_token=2,
        intermediate=plain.intermediate,
        renormalize=True,
        layers=(True,) * plain.layers,
    )
    spec = replace(plain, experts=mixture)
    router = plain.layers * mixture.count * plain.hidden
    expert = plain.layers * 3 * plain.hidden * plain.intermediate
    for batch, read_experts in ((1, 2), (3, 6), (64, 8)):
        work, plain_work = decode_work(spec, batch, 70), decode_work(plain, batch, 70)
        more_weights = router + (read_experts - 1) * expert  # the plain model has one MLP
        assert work.bytes == plain_work.bytes + more_weights * 2
        assert work.flops == plain_work.flops + 2 * batch * (router + expert)
    work, plain_work = prefill_work(spec, 100), prefill_work(plain, 100)
    assert work.bytes == plain_work.bytes + (router + 7 * expert) * 2
    assert work.flops == plain_work.flops + 2 * 100 * (router + expert)


def test_behind_a_sliding_window_nothing_is_work(checkpoint: Path) -> None:
    plain = read_spec(checkpoint)
    assert plain.windows == (None,) * plain.layers
    short = replace(plain, windows=(32,) * plain.layers)
    assert decode_work(short, 3, 70) == decode_work(plain, 3, 32)
    assert decode_work(short, 3, 20) == decode_work(plain, 3, 20)
    half = replace(plain, windows=(32, *plain.windows[1:]))
    saved = decode_work(plain, 3, 70).bytes - decode_work(half, 3, 70).bytes
    assert saved == 2 * plain.kv_heads * plain.head_dim * 2 * 3 * (70 - 32)
    # A prompt's KV is written whole; each token but the first ones attends to 32.
    long = replace(plain, windows=(1000,) * plain.layers)
    assert prefill_work(long, 100) == prefill_work(plain, 100)
    assert prefill_work(short, 100).bytes == prefill_work(plain, 100).bytes
    pairs = plain.layers * (100 * 100 / 2 - (32 * 100 - 32 * 32 / 2))
    saved_flops = 4 * plain.heads * plain.head_dim * pairs
    assert prefill_work(plain, 100).flops - prefill_work(short, 100).flops == saved_flops


@pytest.mark.parametrize("name", ["205M", "7M"])
def test_a_shape_has_about_as_many_weights_as_its_name_says(name: str) -> None:
    shape = SHAPES[name]
    hidden, dim = shape["hidden_size"], shape["head_dim"]
    heads = shape["num_attention_heads"] + shape["num_key_value_heads"]
    layer = 2 * hidden * dim * heads + 3 * hidden * shape["intermediate_size"]
    weights = shape["num_hidden_layers"] * layer + 2 * shape["vocab_size"] * hidden
    assert round(weights / 1e6) == pytest.approx(int(name[:-1]), abs=1)


def test_a_random_checkpoint_is_one_that_the_engine_reads(tmp_path: Path) -> None:
    spec = read_spec(write_checkpoint("7M", tmp_path))
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size == pytest.approx(2 * spec.parameters, rel=0.01)


# ---- the command ---------------------------------------------------------------------------------


@pytest.mark.long
def test_measures_every_cell(checkpoint: Path) -> None:
    code, out, err = bench("--model", str(checkpoint), *SMALL, "-o", "json")
    assert code == 0, err
    result: dict[str, Any] = json.loads(out)
    where = [
        (c["phase"], c.get("batch"), c.get("context"), c.get("prompt")) for c in result["cells"]
    ]
    assert where == [
        ("decode", 1, 70, None),
        ("decode", 3, 70, None),
        ("prefill", None, None, 130),
    ]
    needed = {"ms", "ms_iqr", "tokens_per_s", "bandwidth_share", "flops_share", "waited"}
    assert all(needed <= set(c) and c["ms"] > 0 for c in result["cells"])
    assert (result["geomean_ratio"], result["peer_setup"]) == (None, None)
    assert result["machine"]["gb_per_s"] > 0 and result["machine"]["tflops"] > 0
    assert "decode batch 3, context 70" in err


@pytest.mark.slow
def test_alternates_with_a_peer_and_leaves_no_process(checkpoint: Path, tmp_path: Path) -> None:
    against = ["--against", "vllm", "--vllm-python", str(fake_python(tmp_path, PEER))]
    arguments = ["--model", str(checkpoint), *SMALL, *against]
    code, out, err = bench(*arguments, "-o", "json")
    assert code == 0, err
    result = json.loads(out)
    for numbers in result["cells"]:
        assert numbers["peer_ms"] == 1000.0
        assert numbers["ratio"] == pytest.approx(1000 / numbers["ms"], rel=0.01)
        assert numbers["iqr"] == 0.0
    assert result["geomean_ratio"] == pytest.approx(geometric_mean_ratio(result["cells"]))
    assert result["peer_setup"]["name"] == "fake"
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()


@pytest.mark.long
def test_the_table_names_what_the_peer_lacks(checkpoint: Path, tmp_path: Path) -> None:
    against = ["--against", "vllm", "--vllm-python", str(fake_python(tmp_path, PEER))]
    code, out, err = bench("--model", str(checkpoint), *SMALL, "--prompt", "", *against)
    assert code == 0, err
    assert "against fake, without tcmalloc" in out and "VLLM MS" in out and "prefill" not in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--against", "sglang"], "expected vllm"),
        (["--against", "vllm"], "needs --vllm-python"),
        (["--against", "vllm", "--vllm-python", "no/such/python"], "no such program"),
        (["--batch", "1,x"], "numbers above 0"),
        (["--context", "0"], "numbers above 0"),
        (["--batch", "", "--prompt", ""], "nothing to measure"),
        (["--threads", "9999"], "this process has"),
        (["--model", "no-such-model"], "205M, 7M"),
        (["-o", "xml"], "expected table or json"),
    ],
)
def test_bad_usage_is_exit_code_2_and_says_why(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.delenv("DIPTYCH_VLLM_PYTHON", raising=False)
    code, _, err = bench(*arguments)
    assert code == 2 and says in err


def test_lengths_beyond_the_models_limit_are_refused(checkpoint: Path) -> None:
    code, _, err = bench("--model", str(checkpoint), "--prompt", "4096", "--batch", "")
    assert code == 1 and "the model's limit is 2048" in err


def test_a_python_without_vllm_is_named(checkpoint: Path) -> None:
    against = ["--against", "vllm", "--vllm-python", sys.executable]
    code, _, err = bench("--model", str(checkpoint), *SMALL, *against)
    assert code == 1 and "cannot import vLLM" in err


# ---- children ------------------------------------------------------------------------------------


def child(script: str) -> EngineProcess:
    return EngineProcess("the engine", [sys.executable, "-c", script], dict(os.environ))


def is_alive(pid: int) -> bool:
    """False for a zombie too: whoever adopted it may not have collected it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_child_that_dies_is_reported_with_its_last_words() -> None:
    broken = child("import sys; sys.exit('out of luck')")
    with pytest.raises(EngineBenchError, match=r"the engine ended \(exit code 1\)[^$]*out of luck"):
        broken.answer()
    broken.close()


def test_an_error_of_a_child_is_reported() -> None:
    broken = child("""print('{"error": "no model"}')""")
    with pytest.raises(EngineBenchError, match="the engine: no model"):
        broken.answer()
    broken.close()


def test_outside_its_turn_a_child_is_frozen_and_closing_ends_it() -> None:
    echo = child("import sys\nfor line in sys.stdin: print('{}', flush=True)")
    with echo.turn():
        assert echo.command("step") == {}
    deadline = time.monotonic() + 30  # a signal takes its time on a busy machine
    while Path(f"/proc/{echo.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "Tt":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with echo.turn(urgent=True):
        assert echo.command("step") == {}
    assert os.sched_getscheduler(echo.pid) == os.SCHED_OTHER
    echo.close()
    assert not Path(f"/proc/{echo.pid}").exists()


def test_closing_ends_what_a_dead_child_has_started() -> None:
    starter = child(
        "import json, subprocess\n"
        "other = subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL)\n"
        "print(json.dumps({'pid': other.pid}))\n"
    )
    other_pid = starter.answer()["pid"]
    with pytest.raises(EngineBenchError, match="the engine ended"):
        starter.answer()
    assert is_alive(other_pid)
    starter.close()
    deadline = time.monotonic() + 30
    while is_alive(other_pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_frozen_child_ends_with_its_parent() -> None:
    script = (
        "import sys, os, signal\n"
        "from diptych.engine.bench.child import EngineProcess\n"
        "child = EngineProcess('x', [sys.executable, '-c', 'import time; time.sleep(600)'], {})\n"
        "child.freeze()\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    deadline = time.monotonic() + 30
    while is_alive(int(done.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_commands_start_without_torch() -> None:
    script = "import sys, diptych.cluster.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


# ---- the transfer behind a prefill ---------------------------------------------------------------


class StubRig(OverlapRig):
    """A rig whose prefill takes no time, and whose receiver takes `RECEIVE_S` behind the prefill."""

    RECEIVE_S = 0.05

    def __init__(self, outcomes: list[PushEnded]) -> None:
        self._throttle = SimpleNamespace()  # type: ignore[assignment]
        self._receiver = SimpleNamespace(received=self._receive)  # type: ignore[assignment]
        self._ended = SimpleQueue()
        for outcome in outcomes:
            self._ended.put(outcome)
        self.engine = SimpleNamespace(release=lambda key: None)  # type: ignore[assignment]
        self._prompt_count = 0

    def _prefill(self) -> float:
        return 1.0

    def _finish_push(self) -> None:
        """The transfer's thread has no core yet, so it hears of the prefill's end later."""

    def _receive(self) -> Received:
        time.sleep(self.RECEIVE_S)
        return Received(seconds=1.0, cpu_s=0.1, busy_s=0.5, exposed_s=0.001)


def test_a_transfer_is_exposed_from_the_prefills_end_whenever_its_thread_runs() -> None:
    measured = StubRig([PushEnded("bench0#0", ok=True)]).measure(bytes_s=1e9)
    assert measured.exposed_s >= StubRig.RECEIVE_S and measured.busy_s == 0.5


def test_a_transfer_without_an_end_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "WAIT_S", 0.01)
    with pytest.raises(TimeoutError, match="does not come"):
        StubRig([]).measure(bytes_s=1e9)


@pytest.mark.slow
def test_an_interrupt_ends_the_children_and_is_exit_code_130(checkpoint: Path) -> None:
    command = [sys.executable, "-c", "from diptych.cluster.cli import main; main()"]
    arguments = ["bench", "engine", "--model", str(checkpoint), *SMALL, "--rounds", "50"]
    process = subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while "this machine" not in process.stderr.readline():
        assert process.poll() is None
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in said
    assert children and not any(Path("/proc", pid).exists() for pid in children)
