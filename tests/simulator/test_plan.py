"""Layouts, the verdict, and what is written down."""

import json
import random
from dataclasses import replace

import msgspec
import pytest
import yaml
from diptych.cluster.config import ClusterConfig, load_config
from diptych.simulator.bound import classify_requests, mean_request_seconds
from diptych.simulator.case import InlineExecutor
from diptych.simulator.entry import plan, simulate
from diptych.simulator.errors import SimulationError
from diptych.simulator.fleet import Fleet, Split
from diptych.simulator.intervals import share_interval
from diptych.simulator.metrics import Slo
from diptych.simulator.plan import (
    Contest,
    _fluid_rate,
    choose_layout,
    cluster_yaml,
    compare_layouts,
    describe_verdict,
    format_plan,
    plan_layouts,
)
from diptych.simulator.planned_layout import FleetLayout, FleetOption, PlanDemand, simulate_at
from diptych.simulator.reach import ReachStudy, find_reach, target_curve
from diptych.simulator.recorded import read_calibration
from diptych.simulator.search import split_text
from diptych.simulator.sources import load_trace

from .support import COST, MODEL, SIMPLE


def planned(fleets, demand):
    said = []
    return plan_layouts(
        [FleetOption(name, fleet) for name, fleet in fleets], demand, 1, said.append
    ), said


def test_answers_of_one_token_leave_the_rate_to_prefill():
    load = classify_requests(load_trace("poisson:100-200:1-1:20"))
    fleet, slo = Fleet(((SIMPLE, 2),)), Slo.parse("ttft=5s,itl=50ms")
    prefill_s = mean_request_seconds(SIMPLE, load, slo.itl_s).prefill_s
    assert _fluid_rate(fleet, (Split.parse("1P1D"),), load, slo) == 1 / prefill_s


@pytest.mark.slow
def test_long_prompts_and_a_tight_itl_make_disaggregation_pay():
    trace = load_trace("poisson:1000-1001:200-201:100")
    fleets = [("simple:4", Fleet(((SIMPLE, 4),)))]
    # a step takes 11 ms and more: 12 ms leave a mixed worker next to nothing for prompts of 1 s
    found, _ = planned(fleets, PlanDemand(trace, "ttft=5s,itl=13ms", 0.9))
    assert found["verdict"].startswith("Disaggregation pays") and not found["best"]["mixed"]
    assert found["cluster"]["pools"]["prefill"]["replicas"] > 0


@pytest.mark.slow
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
    assert config.slo.ttft == "1s"
    assert "does not pay" in format_plan(found) and "&id" not in path.read_text()


@pytest.mark.slow
def test_a_plan_says_whose_engine_its_times_are() -> None:
    """Ours was timed on one GPU only; workers that were measured speak for themselves."""
    trace = load_trace("synthetic:40")
    cpu = replace(SIMPLE, gpu="a CPU", threads=2)
    fleets = [("gpus", Fleet.parse("H200:2", MODEL, 1)), ("cpus", Fleet(((cpu, 2),)))]
    found, _ = planned(fleets, PlanDemand(trace, "ttft=5s,itl=50ms", 0.9))
    of_gpus, measured = sorted(found["engines"], key=lambda line: "measured (" in line)
    assert "those of vLLM" in of_gpus and "on one H200" in of_gpus
    assert measured == "times are those of the workers that were measured (a CPU)"
    text = format_plan(found)
    assert of_gpus in text and measured in text


def test_a_rate_is_served_by_the_fewest_gpus_that_can():
    trace = load_trace("poisson:100-101:20-30:150")
    fleets = [(f"s:{n}", Fleet(((SIMPLE, n),))) for n in (4, 2, 3)]
    found, _ = planned(fleets, PlanDemand(trace, "ttft=2s,itl=50ms", 0.9, rate=2.0))
    assert found["best"]["gpus"] == 2 and found["best"]["attainment"] >= 0.9


def layout(name, attainment, gpus=2, requests=1000):
    """A layout that serves this share in time; what a worse layout serves, a better one does too."""
    split = Split.parse(name)
    order = random.Random(0).sample(range(requests), requests)
    in_time = round(attainment * requests)
    return FleetLayout(
        fleet_name="s",
        gpus=gpus,
        splits=(split,),
        rate=1.0,
        attainment=attainment,
        met=([place < in_time for place in order],),
    )


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
    contest = Contest(separated=both[1], mixed=both[0])
    verdict = describe_verdict(contest, compare_layouts(contest), demand)
    assert verdict.startswith(f"Disaggregation {said}")
    smaller = layout("1M", 0.992, gpus=1)
    assert choose_layout([*both, smaller], demand) is smaller


def test_with_prices_the_cheapest_sufficient_fleet_is_the_best():
    demand = PlanDemand(load_trace("poisson:8-9:8-9:8"), "ttft=1s,itl=50ms", 0.99, rate=1.0)
    few_dear = replace(layout("2M", 0.995, gpus=2), hour_price=8.0)
    many_cheap = replace(layout("4M", 0.995, gpus=4), hour_price=6.0)
    assert choose_layout([few_dear, many_cheap], demand) is many_cheap


@pytest.mark.slow
def test_a_plan_says_what_an_answered_token_costs_and_takes():
    trace = load_trace("poisson:100-100:20-20:100")
    given = {"rate": 2.0, "slo": "ttft=9s,itl=99ms", "jobs": 1}
    found = plan(trace, model="llama3.1-8b-fp8", tp=1, fleet="H200:2", price="H200=3.5", **given)
    # Two GPUs of 700 W and 3.5 an hour answer 2 * 20 tokens a second.
    assert found.best["joules_per_token"] == pytest.approx(2 * 700 / 40)
    assert found.best["price_per_million_tokens"] == pytest.approx(7 / (40 * 3600) * 1e6, rel=1e-4)
    assert "J/TOKEN  PRICE/M" in repr(found)
    unpriced = plan(trace, model="llama3.1-8b-fp8", tp=1, fleet="H200:2", **given)
    assert unpriced.best["price_per_million_tokens"] is None
    assert "PRICE/M" not in repr(unpriced)


def test_a_study_says_it_too():
    study = simulate(
        "poisson:100-100:20-20:100",
        model="llama3.1-8b-fp8",
        tp=1,
        fleet="H200:2",
        split="2M",
        rate=2.0,
        seeds=1,
        price="H200=3.5",
        jobs=1,
    )
    [entry] = study.document["policies"]
    assert entry["joules_per_token"] == pytest.approx(2 * 700 / 40)
    assert "diptych policy-only: 35 J, 48.6 for a million" in repr(study)


@pytest.mark.parametrize(
    ("price", "said"),
    [
        ("H100=2", "price: none is stated for H200"),
        ("A100=2", "GPU A100: expected one of"),
        ("H200", "price H200: expected GPU=PRICE, as in H200=3.5 for an hour of one"),
        ("H200=-1", "price H200=-1: expected GPU=PRICE"),
        ("H200=0", "price H200=0: expected one price, more than 0"),
        ("H200=3,H200=2", "price H200=2: expected one price, more than 0"),
    ],
)
def test_a_price_that_is_none_is_one_sentence(price, said):
    with pytest.raises(SimulationError, match=said):
        plan("poisson:100-101:20-21:10", tp=4, fleet="H200:8", price=price, jobs=1)


@pytest.mark.parametrize(("requests", "said"), [(20, "may pay"), (4000, "pays:")])
def test_it_pays_only_where_the_interval_excludes_one(requests, said):
    demand = PlanDemand(load_trace("poisson:8-9:8-9:8"), "ttft=1s,itl=50ms", rate=1.0)
    mixed = layout("2M", 0.90, requests=requests)
    separated = layout("1P1D", 0.95, requests=requests)
    contest = Contest(separated, mixed)
    comparison = compare_layouts(contest)
    assert comparison.ratio == pytest.approx(0.95 / 0.90)
    assert comparison.pays == (said == "pays:")
    assert f"Disaggregation {said}" in describe_verdict(contest, comparison, demand)


def test_an_interval_holds_its_share_and_narrows_with_more_requests():
    few, many = layout("2M", 0.7, requests=100), layout("2M", 0.7, requests=10_000)
    for one in (few, many):
        assert one.interval.low < 0.7 < one.interval.high
    assert few.interval.high - few.interval.low > 3 * (many.interval.high - many.interval.low)
    queued = [False] * 50 + [True] * 50  # who comes together waits together
    low, high = share_interval([queued])
    assert high - low > 0.3


# ---- targets within reach ------------------------------------------------------------------------

LONG = "poisson:1000-1001:200-201:60"  # prompts of 1 s, steps of 10 ms


def reach_of(itl, rate, ttft="4s"):
    fleets = [("simple:2", Fleet(((SIMPLE, 2),)))]
    demand = PlanDemand(load_trace(LONG), f"ttft={ttft},itl={itl}", 0.9, rate=rate)
    found, _ = planned(fleets, demand)
    return found


def test_a_target_within_reach_is_said_to_be():
    found = reach_of("30ms", 0.2)
    assert found["reach"]["within_reach"] and found["reach"]["reachable"] is None
    assert "is within reach at 0.2 requests/s" in found["reach"]["sentence"]


def test_an_itl_out_of_reach_is_named_with_what_is_reachable():
    found = reach_of("5ms", 0.2)
    reach = found["reach"]
    assert not reach["within_reach"] and reach["reachable"]["target"] == "itl"
    # A step takes 10 ms and 1 us for each of about 1,100 tokens that it reads.
    assert 10.5 < reach["reachable"]["itl_ms"] < 30
    assert "A gap p99 of 5 ms is out of reach at 0.2 requests/s" in reach["sentence"]
    assert "is what 90% of the requests can get with" in reach["sentence"]
    again = reach_of(f"{reach['reachable']['itl_ms'] * 1.02:.2f}ms", 0.2)
    assert again["reach"]["within_reach"], "what it promises, it can do"


@pytest.mark.slow
def test_a_ttft_out_of_reach_is_named():
    reach = reach_of("60ms", 0.1, ttft="500ms")["reach"]
    assert reach["reachable"]["target"] == "ttft" and 0.9 < reach["reachable"]["ttft_s"] < 4
    assert "A TTFT of 500ms is out of reach" in reach["sentence"]


@pytest.mark.slow
def test_a_load_beyond_the_fleet_has_nothing_within_reach():
    reach = reach_of("20ms", 20.0, ttft="100ms")["reach"]
    assert not reach["within_reach"] and reach["reachable"] is None
    assert "more than the fleet can do" in reach["sentence"]


class HardlyInTime(InlineExecutor):
    """Every layout that can be simulated serves a tenth of the requests in time."""

    def map(self, fn, tasks, rates):
        assert fn is simulate_at and len(tasks) == len(rates)
        for task in tasks:
            gpus = task.case().fleet.gpus
            yield FleetLayout(task.option.name, gpus, task.splits, 1.0, 0.1)


def test_what_no_target_can_say_is_not_reached():
    """Sixteen times 100x is more than any target."""
    option = FleetOption("simple:2", Fleet(((SIMPLE, 2),)))
    layouts = [FleetLayout("simple:2", 2, (Split(1, 1),), 1.0, 0.1)]
    demand = PlanDemand(load_trace(LONG), "ttft=100x,itl=1ms")
    study = ReachStudy({"simple:2": option}, demand, 1.0, HardlyInTime())
    reach = find_reach(study, layouts)
    assert not reach["within_reach"] and reach["reachable"] is None
    assert [point["itl_ms"] for point in target_curve(study, layouts)][-1] == 4.0


def test_the_curve_rises_with_the_target_and_has_intervals():
    found = reach_of("20ms", 0.4)
    by_split = {}
    for point in found["curve"]:
        by_split.setdefault(point["split"], []).append(point)
        low, high = point["interval"]
        assert low <= point["attainment"] <= high
        assert point["goodput"] == pytest.approx(point["attainment"] * 0.4, abs=1e-3)
    assert len(by_split) == 2
    for points in by_split.values():
        assert [point["itl_ms"] for point in points] == [10, 14, 20, 28, 40, 56, 80]
        assert points[0]["attainment"] == 0.0 < points[-1]["attainment"]
    text = format_plan(found)
    assert "goodput at 0.4 requests/s by ITL target" in text and found["reach"]["sentence"] in text
    assert found["reach"]["sentence"] in cluster_yaml(found)


@pytest.mark.slow
def test_pools_of_two_gpu_types_get_a_split_each():
    fleet = Fleet.parse("H100:4,H200:4", MODEL, 4)
    found, _ = planned(
        [("both", fleet)], PlanDemand(load_trace("synthetic:40"), "ttft=max(1s,3x),itl=50ms", 0.9)
    )
    splits = {row["split"] for row in found["layouts"]}
    assert {"1M+1M", "1P+1D", "1D+1P"} <= splits
    # The plan has the targets that it was made for, as a cluster reads and prints them.
    config = ClusterConfig.model_validate(found["cluster"])
    assert config.slo.ttft == "max(1s, 3x)" and config.slo.itl_ms == 50.0
    assert "for synthetic-40, ttft=max(1s, 3x),itl=50ms" in cluster_yaml(found)


def test_a_plan_says_what_all_offered_requests_got_and_which_fits_sit_on_their_limits():
    fleets = [("h200:8", Fleet.parse("H200:8", MODEL, 4))]
    demand = PlanDemand(load_trace("synthetic:40"), "ttft=3s,itl=50ms", 0.9, rate=0.5)
    found, _ = planned(fleets, demand)
    reach = found["reach"]
    assert reach["requests"] == 40 and reach["refused"] == 0
    assert 0 < reach["ttft_offered"]["p95"] <= reach["ttft_offered"]["p99"]
    text = format_plan(found)
    assert "TTFT of all offered requests p95 " in text and "; 0 of 40 refused" in text
    assert "the fit of vllm on H200 has values on their limits" in text and "prompt_s 0.01" in text


def live(tmp_path, **changes):
    cost = msgspec.to_builtins(COST)
    kinds = [{"threads": n, "kv_tokens": 9000, "cost": cost, "itl_budget_ms": 45} for n in (1, 2)]
    kinds = [{**kind, "max_running": 48} for kind in kinds]
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
    engine = yaml.safe_load(settings)["pools"]["decode"]["engine"]
    assert engine["threads"] in (1, 2)
    assert (engine["max_step_tokens"], engine["max_running"]) == (512, 48)
    assert "&id" not in settings
