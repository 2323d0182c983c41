"""Layouts, the verdict, and what is written down."""

import json

import msgspec
import pytest
import yaml
from diptych.cluster.config import load_config
from diptych.simulator.errors import SimulationError
from diptych.simulator.fleet import Fleet, Split
from diptych.simulator.plan import (
    FleetLayout,
    FleetOption,
    PlanDemand,
    choose_layout,
    cluster_yaml,
    describe_verdict,
    format_plan,
    plan_layouts,
)
from diptych.simulator.recorded import read_calibration
from diptych.simulator.search import split_text
from diptych.simulator.sources import load_trace

from .support import COST, MODEL, SIMPLE


def planned(fleets, demand):
    said = []
    return plan_layouts(
        [FleetOption(name, fleet) for name, fleet in fleets], demand, 1, said.append
    ), said


def test_long_prompts_and_a_tight_itl_make_disaggregation_pay():
    trace = load_trace("poisson:1000-1001:200-201:100")
    fleets = [("simple:4", Fleet(((SIMPLE, 4),)))]
    # a step takes 11 ms and more: 12 ms leave a mixed worker next to nothing for prompts of 1 s
    found, _ = planned(fleets, PlanDemand(trace, "ttft=5s,itl=13ms", 0.9))
    assert found["verdict"].startswith("Disaggregation pays") and not found["best"]["mixed"]
    assert found["cluster"]["pools"]["prefill"]["replicas"] > 0


def test_short_prompts_and_a_loose_itl_do_not(tmp_path):
    trace = load_trace("poisson:5-6:300-301:30")  # all decode: a prefill worker would idle
    found, _ = planned([("s", Fleet(((SIMPLE, 2),)))], PlanDemand(trace, "ttft=1s,itl=30ms", 0.9))
    assert found["verdict"].startswith("Disaggregation does not pay") and found["best"]["mixed"]
    path = tmp_path / "cluster.yaml"
    path.write_text(cluster_yaml(found))
    config = load_config(path, {})
    assert config.router.disaggregate == "never"
    assert (config.pools.prefill.replicas, config.pools.decode.replicas) == (0, 2)
    assert config.slo.itl_ms == 30.0
    assert "does not pay" in format_plan(found) and "&id" not in path.read_text()


def test_a_rate_is_served_by_the_fewest_gpus_that_can():
    trace = load_trace("poisson:100-101:20-30:150")
    fleets = [(f"s:{n}", Fleet(((SIMPLE, n),))) for n in (4, 2, 3)]
    found, _ = planned(fleets, PlanDemand(trace, "ttft=2s,itl=50ms", 0.9, rate=2.0))
    assert found["best"]["gpus"] == 2 and found["best"]["attainment"] >= 0.9


def layout(name, attainment, gpus=2):
    split = Split.parse(name)
    return FleetLayout(fleet_name="s", gpus=gpus, splits=(split,), rate=1.0, attainment=attainment)


@pytest.mark.parametrize(
    ("mixed", "apart", "best", "said"),
    [
        (0.950, 0.967, "1P1D", "pays"),  # neither serves the share: fewer misses
        (0.950, 0.950, "2M", "does not pay"),
        (0.992, 0.999, "2M", "does not pay"),  # both do: the simpler one
        (0.980, 0.995, "1P1D", "pays"),
        (0.000, 0.100, "1P1D", "pays"),
        (0.000, 0.000, "2M", "does not pay"),
    ],
)
def test_at_a_rate_the_verdict_is_that_of_the_choice(mixed, apart, best, said):
    demand = PlanDemand(load_trace("poisson:8-9:8-9:8"), "ttft=1s,itl=50ms", 0.99, rate=1.0)
    both = [layout("2M", mixed), layout("1P1D", apart)]
    assert split_text(choose_layout(both, demand).splits) == best
    assert f"Disaggregation {said}" in describe_verdict(both[:1], both[1:], demand)
    smaller = layout("1M", 0.992, gpus=1)
    assert choose_layout([*both, smaller], demand) is smaller


@pytest.mark.parametrize(("requests", "known"), [(60, False), (600, True)])
def test_it_says_when_too_few_requests_tell_nothing(requests, known):
    demand = PlanDemand(
        load_trace(f"poisson:8-9:8-9:{requests}"), "ttft=1s,itl=50ms", rate=1.0, seeds=3
    )
    said = describe_verdict([layout("2M", 0.95)], [layout("1P1D", 0.915)], demand)
    assert (f"{requests} requests do not tell them apart" in said) == (not known)


def test_pools_of_two_gpu_types_get_a_split_each():
    fleet = Fleet.parse("H100:4,H200:4", MODEL, 4)
    found, _ = planned(
        [("both", fleet)], PlanDemand(load_trace("synthetic:40"), "ttft=max(1s,3x),itl=50ms", 0.9)
    )
    splits = {row["split"] for row in found["layouts"]}
    assert {"1M+1M", "1P+1D", "1D+1P"} <= splits


def live(tmp_path, **changes):
    cost = msgspec.to_builtins(COST)
    kinds = [{"threads": n, "kv_tokens": 9000, "cost": cost, "itl_budget_ms": 45} for n in (1, 2)]
    run = {
        "split": "1P1D",
        "slo": "ttft=2s,itl=50ms",
        "requests": [{"at": 5.0 + i, "prompt": 100, "output": 9, "met": i > 0} for i in range(4)],
    }
    path = tmp_path / "live.json"
    path.write_text(json.dumps({"model": "m", "cores": 2, "workers": kinds, "run": run} | changes))
    return path


def test_a_calibration_gives_fleets_of_as_many_workers_as_there_are_cores(tmp_path):
    found = read_calibration(live(tmp_path))
    assert [found.fleet(n).replicas for n in (1, 2)] == [2, 1]
    assert found.fleet(2).gpus == 2 and found.fleet(1).reference.itl_budget_s == 0.045
    trace = found.trace()
    assert [item.arrival_s for item in trace.requests] == [0.0, 1.0, 2.0, 3.0]
    assert found.run.attainment == 0.75
    with pytest.raises(SimulationError):
        found.fleet(3)


def test_a_wrong_calibration_is_said(tmp_path):
    path = tmp_path / "live.json"
    path.write_text("{}")
    with pytest.raises(SimulationError, match="calibration"):
        read_calibration(path)
    with pytest.raises(SimulationError, match="recorded"):
        read_calibration(live(tmp_path, run=None)).trace()


def test_the_plan_of_a_cpu_machine_names_threads(tmp_path):
    calibration = read_calibration(live(tmp_path))
    fleets = [(f"{threads}t", calibration.fleet(threads)) for threads in (1, 2)]
    trace = load_trace("poisson:100-200:16-32:100")
    found, _ = planned(fleets, PlanDemand(trace, "ttft=2s,itl=50ms", 0.9, rate=1.0))
    settings = cluster_yaml(found)
    assert yaml.safe_load(settings)["pools"]["decode"]["engine"]["threads"] in (1, 2)
    assert "&id" not in settings
