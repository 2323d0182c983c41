"""A router's log: what the workers cost is found in it, and its run replays as it was."""

import json
from dataclasses import replace

import msgspec
import pytest
from diptych.cluster.bench.live import simulated
from diptych.cluster.cli import app
from diptych.router import RouterConfig, replay
from diptych.simulator import recorded
from diptych.simulator.calibration import merge_calibrations
from diptych.simulator.case import Case, simulate_case
from diptych.simulator.errors import SimulationError
from diptych.simulator.exact import ExactSimulation
from diptych.simulator.fleet import Fleet, Split
from diptych.simulator.hardware import Hardware
from diptych.simulator.metrics import Slo
from diptych.simulator.sim import Simulation
from diptych.simulator.sources import load_trace
from diptych.simulator.trace import HASH_TOKENS, Trace, TraceRequest
from typer.testing import CliRunner

from .support import COST

HARDWARE = Hardware("cpu-1t", 1, COST, 64_000, 1, chunk_tokens=512, cost_on_card=False)
SLO = Slo.flat(1.5, 0.1)  # a block of 64 tokens fits beside decode


def log_of(
    split: str,
    rate: float,
    disaggregate: str = "auto",
    slo: Slo = SLO,
    trace: Trace | None = None,
):
    """(lines, share met) of a simulated life: the router's log as its service writes it."""
    trace = trace or load_trace("poisson:256-1024:64-128:150")
    fleet = Fleet(((HARDWARE, Split.parse(split).replicas),))
    config = RouterConfig(disaggregate=disaggregate, ttft_s=slo.ttft_s, itl_s=slo.itl_s)
    setting = Case(trace, fleet, slo, router_config=config).setting(Split.parse(split))
    lines: list[bytes] = []

    def told(simulation, event):
        if not lines:
            lines.append(replay.encode_head(simulation.router, simulation.now))
        line = replay.encode_event(event, simulation.now)
        if line is not None:
            lines.append(line)

    outcomes = Simulation(setting, trace, on_event=told).run(trace.workload(rate, 0))
    return lines, sum(one.targets_met for one in outcomes) / len(outcomes)


def test_the_log_tells_what_a_prefill_and_a_step_cost():
    found = recorded.calibrate_from_log(log_of("1P1D", 0.6, "always")[0], 2).workers[0].cost
    assert found.prefill_token == pytest.approx(COST.prefill_token, rel=0.05)
    for rows, tokens in ((1, 600), (4, 3000)):
        truth = COST.step_s(rows, tokens)
        assert found.step_s(rows, tokens) == pytest.approx(truth, rel=0.05)


def reports(lines, change):
    """The log with `change(report)` of each."""
    for line in lines:
        entry = json.loads(line)
        if entry["kind"] == "Reported":
            change(entry["event"]["report"])
        yield json.dumps(entry).encode()


def test_a_prefill_takes_as_long_as_the_prefill_workers_say():
    def quicker(report):
        report["prefill_seconds"] = 0.8 * report.get("prefill_seconds", 0.0)

    lines = log_of("1P1D", 0.6, "always")[0]
    found = recorded.calibrate_from_log(reports(lines, quicker), 2).workers[0].cost
    assert found.prefill_token == pytest.approx(0.8 * COST.prefill_token, rel=0.05)


def test_short_prompts_that_were_alone_do_not_tell_what_long_ones_take():
    def slower(report):
        report["prefill_seconds"] = 2.0 * report.get("prefill_seconds", 0.0)

    alone = [TraceRequest(4.0 * number, 64 + number, 2) for number in range(20)]
    together = [TraceRequest(100.0 + 0.2 * number, 1024, 64) for number in range(40)]
    trace = Trace("short ones first", alone + together, HASH_TOKENS)
    lines = log_of("1P1D", trace.rate, "always", trace=trace)[0]
    found = recorded.calibrate_from_log(reports(lines, slower), 2).workers[0].cost
    assert found.prefill_token == pytest.approx(2.0 * COST.prefill_token, rel=0.1)


def test_with_few_lone_prompts_decode_workers_do_not_tell_what_a_prefill_takes(monkeypatch):
    def beside(report):
        if report.get("running"):
            report.update(prefill_tokens=100, prefill_seconds=9.0)  # nearly all of it is decode

    monkeypatch.setattr(recorded, "LONE_PROMPTS_MINIMUM", 10**6)
    lines = list(reports(log_of("1P1D", 0.6, "always")[0], beside))
    found = recorded.calibrate_from_log(lines, 2).workers[0].cost
    assert found.prefill_token == pytest.approx(COST.prefill_token, rel=0.05)

    def idle(report):
        if not report.get("running"):
            report.update(prefill_tokens=0, prefill_seconds=0.0)

    found = recorded.calibrate_from_log(reports(lines, idle), 2).workers[0].cost
    assert found.prefill_token == pytest.approx(0.09, rel=0.05), "nobody else prefilled"


@pytest.mark.parametrize("kind", [Simulation, ExactSimulation])
def test_workers_that_plan_for_less_of_their_budget_prefill_later(kind):
    trace = load_trace("poisson:256-1024:64-128:60")
    config = RouterConfig(disaggregate="never", ttft_s=SLO.ttft_s, itl_s=0.5)
    means = []
    for planned in (1.0, 0.4):
        hardware = replace(HARDWARE, planned_share=planned, itl_budget_s=0.5)
        fleet = Fleet(((hardware, 2),))
        slo = Slo.flat(1.5, 0.5)
        setting = Case(trace, fleet, slo, router_config=config).setting(Split.parse("2M"))
        outcomes = kind(setting, trace).run(trace.workload(1.2, 0))
        means.append(sum(one.ttft_s for one in outcomes) / len(outcomes))
    assert means[1] > 1.01 * means[0]


def test_steps_take_what_the_workers_planned_of_their_budget():
    def planned(report):
        report["step_ms"] = 72.0 if report.get("running") else 90.0

    lines = log_of("2M", 1.6, "never")[0]
    kind = recorded.calibrate_from_log(reports(lines, planned), 2).workers[0]
    assert kind.itl_budget_ms == pytest.approx(90.0) and kind.planned_share == pytest.approx(0.8)
    assert recorded.calibrate_from_log(lines, 2).workers[0].planned_share == 1.0, "nobody said"


@pytest.mark.parametrize(
    ("split", "disaggregate", "rate"), [("1P1D", "always", 1.3), ("2M", "never", 1.6)]
)
def test_a_recorded_run_replays_as_it_was(split, disaggregate, rate):
    lines, met = log_of(split, rate, disaggregate)
    found = recorded.calibrate_from_log(lines, 2)
    run = found.run
    assert run.split == split and run.attainment == pytest.approx(met, abs=0.02)
    assert run.router.disaggregate == disaggregate
    fleet = found.fleet(1)
    trace = found.trace()
    case = Case(trace, fleet, Slo.parse(run.slo, fleet.costs), router_config=run.router)
    again = simulate_case(case, Split.parse(split), trace.rate / fleet.gpus, 0).outcomes
    assert [one.prompt_tokens for one in again] == [one.prompt_tokens for one in run.requests]
    assert 0.5 <= met <= 0.95
    assert sum(one.targets_met for one in again) / len(again) == pytest.approx(met, abs=0.05)


def test_of_several_logs_the_first_tells_a_workers_steps_and_who_saw_some_its_transfers():
    mixed, apart = (
        recorded.calibrate_from_log(log_of(split, rate, mode)[0], 2)
        for split, rate, mode in (("2M", 1.6, "never"), ("1P1D", 1.3, "always"))
    )
    assert not mixed.workers[0].cost.transfer_token
    moved = msgspec.structs.replace(
        apart.workers[0].cost, transfer_base=0.01, transfer_token=1e-5, exposed_share=0.2
    )
    apart = msgspec.structs.replace(
        apart, workers=[msgspec.structs.replace(apart.workers[0], cost=moved)]
    )
    (kind,) = merge_calibrations([mixed, apart]).workers
    assert kind.cost.step_base == mixed.workers[0].cost.step_base
    assert (kind.cost.transfer_base, kind.cost.transfer_token) == (0.01, 1e-5)
    assert kind.cost.exposed_share == 0.2


def test_simulate_reads_the_folder_of_a_router(tmp_path):
    lines, met = log_of("1P1D", 1.3, "always")
    half = len(lines) // 2
    (tmp_path / "router.old.jsonl").write_bytes(b"".join(lines[:half]))
    (tmp_path / "router.jsonl").write_bytes(lines[0] + b"".join(lines[half:]))
    given = ["simulate", "recorded", "--calibrate-from-live", str(tmp_path), "-o", "json"]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["requests"] == sum(b'"kind":"Asked"' in line for line in lines)
    assert found["live"]["attainment"] == pytest.approx(met, abs=0.02)
    assert found["live"]["points_apart"] <= 5


def test_a_log_with_nothing_in_it_is_refused(tmp_path):
    lines, _ = log_of("1P1D", 1.0)
    for kept, what in ((lines[:4], "no request"), (lines[1:], "head"), ([b"{}"], "line 1")):
        with pytest.raises(SimulationError, match=what):
            recorded.calibrate_from_log(kept, 2)
    several = merge_calibrations([recorded.calibrate_from_log(lines, 2)] * 2)
    assert [kind.threads for kind in several.workers] == [1]


def test_refused_and_failed_requests_are_misses():
    lines, _ = log_of("1P1D", 0.5, "always")
    cut = [line for line in lines if b'"Ended"' not in line or b'"7",0' not in line]
    run = recorded.calibrate_from_log(cut, 2).run
    assert len(cut) == len(lines) - 1
    assert [one.met for one in run.requests].count(False) >= 1


def entries(lines, change):
    """The log with `change(entry)` of each line, which may be several entries."""
    for line in lines:
        for entry in change(json.loads(line)):
            yield json.dumps(entry).encode()


def test_a_recorded_run_replays_with_its_own_workers_whatever_cores_are_here(tmp_path, monkeypatch):
    lines, _ = log_of("1P2D", 1.3, "always")
    (tmp_path / "router.jsonl").write_bytes(b"".join(lines))
    monkeypatch.setattr(recorded.os, "sched_getaffinity", lambda _: {0, 1})
    given = ["simulate", "recorded", "--calibrate-from-live", str(tmp_path), "-o", "json"]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    row = simulated.simulation_row("a cell", tmp_path)
    assert "error" not in row and 0 <= row["simulated"] <= 1


def test_a_worker_in_the_place_of_a_lost_one_does_not_count_beside_it():
    lines, _ = log_of("1P2D", 1.3, "always")
    joined = next(line for line in lines if b'"Joined"' in line and b"decode" in line)
    gone = json.loads(joined)["event"]["card"]["id"]

    def replaced(entry):
        yield entry
        if json.dumps(entry).encode() == json.dumps(json.loads(lines[-1])).encode():
            yield {"at": entry["at"], "kind": "Lost", "event": {"worker": gone}}
            again = json.loads(joined)
            again["at"] = entry["at"]
            again["event"]["card"]["id"] = "decode/again"
            yield again

    assert recorded.calibrate_from_log(lines, 2).run.split == "1P2D"
    assert recorded.calibrate_from_log(entries(lines, replaced), 2).run.split == "1P2D"


@pytest.mark.parametrize("gpu", ["NVIDIA H100", "", "cpu-0t"])
def test_workers_on_gpus_are_no_cpu_workers(gpu):
    def on_gpu(entry):
        if entry["kind"] == "Joined":
            entry["event"]["card"]["gpu"] = gpu
        yield entry

    lines, _ = log_of("1P1D", 0.6, "always")
    with pytest.raises(SimulationError, match="only those of CPU workers can be read"):
        recorded.calibrate_from_log(entries(lines, on_gpu), 2)
