"""What a process of a distributed run tells the master, without a server and without Locust's users."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from diptych.loadtests.endpoint import EndpointFacts
from diptych.loadtests.outcomes import LoadOutcome

FACTS = EndpointFacts("http://127.0.0.1:9", "m", 100, ("a", "b"), 3, True, True, "diptych")


class StoppedRun:
    """A `LoadRun` with one request under way."""

    usage = (0.5, 2.0)
    done = True

    def __init__(self) -> None:
        self.outcomes: list[LoadOutcome] = []

    def cut(self) -> None:
        self.outcomes.append(LoadOutcome("x", 0.0, 0.0, error="unfinished"))

    def fetch(self) -> list[LoadOutcome]:
        fetched = self.outcomes
        self.outcomes = []
        return fetched


@pytest.fixture(autouse=True)
def _no_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locust must not replace this process's sockets and threads by gevent's."""
    monkeypatch.setenv("LOCUST_SKIP_MONKEY_PATCH", "1")


def test_a_worker_reports_what_was_cut_before_the_master_hears_that_it_stopped() -> None:
    from diptych.loadtests.swarm import Swarm
    from locust.env import Environment
    from locust.runners import WorkerRunner

    class Worker(WorkerRunner):
        def __init__(self, environment: Environment) -> None:
            self.environment = environment
            self.greenlet = None  # type: ignore[assignment]
            self.reports: list[dict[str, Any]] = []

        def _send_stats(self) -> None:
            report: dict[str, Any] = {}
            self.environment.events.report_to_master.fire(client_id="worker", data=report)
            self.reports.append(report)

    environment = Environment()
    swarm = Swarm(environment)
    environment.runner = worker = Worker(environment)
    swarm.run = StoppedRun()  # type: ignore[assignment]
    environment.events.test_stop.fire(environment=environment)
    (report,) = worker.reports
    outcomes, _, done = report["diptych"]
    assert done and [outcome["error"] for outcome in outcomes] == ["unfinished"]
    # Workers report between runs too: the next run must not hear that the worker has ended it.
    worker._send_stats()
    assert "diptych" not in worker.reports[-1]


def test_a_failed_request_counts_and_leaves_response_times_alone() -> None:
    from diptych.loadtests.arrivals import RateStage
    from diptych.loadtests.swarm import Swarm
    from locust.env import Environment

    environment = Environment()
    environment.create_local_runner()  # it listens to the requests
    swarm = Swarm(environment)
    stage = RateStage("s", 0.0, 1.0, 1.0)
    swarm._log(LoadOutcome("failed", 0.0, 0.0, error="refused"), stage)
    for kind in ("HTTP", "SLO"):
        entry = environment.stats.get("s", kind)
        assert (entry.num_requests, entry.num_failures) == (1, 1)
        assert entry.to_dict()["median_response_time"] == 0.0, "no request has a time yet"

    swarm._log(LoadOutcome("served", 0.0, 0.0, ttft_s=0.1, e2e_s=2.0), stage)
    for kind in ("HTTP", "SLO"):
        entry = environment.stats.get("s", kind)
        assert (entry.num_requests, entry.num_failures) == (2, 1)
        assert entry.min_response_time == entry.median_response_time == 2000.0


@pytest.mark.parametrize("stopped", [False, True])
def test_a_run_that_is_being_stopped_does_not_count_as_ended_by_itself(
    monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    from diptych.loadtests import swarm as swarm_module
    from diptych.loadtests.plan import LoadPlan
    from locust.env import Environment

    environment = Environment()
    swarm = swarm_module.Swarm(environment)
    collector = swarm.collector = swarm_module.Collector(LoadPlan())
    swarm._began = time.monotonic()

    def worker_ends(_: float) -> None:
        if stopped:
            environment.events.test_stopping.fire(environment=environment)
        collector.finished.add("worker")

    monkeypatch.setattr(swarm_module.gevent, "sleep", worker_ends)
    swarm._watch()
    assert swarm._ended_by_itself is not stopped


@pytest.mark.parametrize("distributed", [False, True])
def test_what_is_under_way_at_an_interrupt_is_in_the_document(
    tmp_path: Path, distributed: bool
) -> None:
    """Locust says that it is quitting before it stops the run."""
    from diptych.loadtests.plan import LoadPlan
    from diptych.loadtests.swarm import Collector, Swarm
    from locust.env import Environment
    from locust.runners import MasterRunner

    class Master(MasterRunner):
        """Hears from its one worker what the worker has cut, as it quits."""

        def __init__(self, environment: Environment) -> None:
            self.environment = environment
            self.greenlet = None  # type: ignore[assignment]

        def quit(self) -> None:
            run = StoppedRun()
            run.cut()
            report = ([outcome.packed() for outcome in run.fetch()], run.usage, run.done)
            self.environment.events.worker_report.fire(client_id="w", data={"diptych": report})

    environment = Environment(parsed_options=Namespace(headless=True, expect_workers=1))
    if distributed:
        environment.runner = Master(environment)
    else:
        environment.create_local_runner()
    swarm = Swarm(environment)
    swarm._plan = LoadPlan(out=str(tmp_path / "run.json"))
    swarm.facts = FACTS
    swarm.collector = Collector(swarm._plan)
    if not distributed:
        swarm.run = StoppedRun()  # type: ignore[assignment]
    environment.events.quitting.fire(environment=environment, reverse=True)
    document = json.loads((tmp_path / "run.json").read_text())
    assert document["summary"]["errors"] == {"unfinished": 1}


@pytest.mark.parametrize(
    ("url", "server_name", "admin"),
    [
        ("http://127.0.0.1:8000", "diptych", "http://127.0.0.1:8001"),
        ("http://127.0.0.1:9000", "diptych", ""),
        ("http://127.0.0.10:8000", "diptych", ""),
        ("http://127.0.0.1:8000", "vllm", ""),
    ],
)
def test_the_admin_api_of_the_default_ports_is_of_the_cluster_at_them_alone(
    monkeypatch: pytest.MonkeyPatch, url: str, server_name: str, admin: str
) -> None:
    import msgspec
    from diptych.loadtests import swarm as swarm_module
    from locust.env import Environment

    asked: list[str] = []

    def read_counters(metrics: str, admin: str, key: str) -> dict[str, float]:
        asked.append(admin)
        return {}

    monkeypatch.setattr(swarm_module.server, "read_counters", read_counters)
    swarm = swarm_module.Swarm(Environment())
    swarm.facts = msgspec.structs.replace(FACTS, url=url, server=server_name)
    swarm._read_counters()
    assert asked == [admin]


def test_the_exit_code_is_of_the_last_run_of_a_web_page(monkeypatch: pytest.MonkeyPatch) -> None:
    from diptych.loadtests import swarm as swarm_module
    from diptych.loadtests.plan import LoadPlan
    from locust.env import Environment

    options = Namespace(plan_gate="goodput>=0.5", plan_run="r", headless=False)
    environment = Environment(parsed_options=options)
    environment.create_local_runner()
    swarm = swarm_module.Swarm(environment)

    def prepare(_: Any) -> None:
        swarm.facts = FACTS
        swarm.collector = swarm_module.Collector(LoadPlan())

    monkeypatch.setattr(swarm, "_prepare", prepare)
    monkeypatch.setattr(swarm_module, "LoadRun", lambda *_, **__: StoppedRun())
    monkeypatch.setattr(swarm_module.gevent, "spawn", lambda *_: None)
    codes = []
    for ttft_s in (0.1, 9.0, 0.1):
        environment.events.test_start.fire(environment=environment)
        served = LoadOutcome("x", 0.0, 0.0, prompt_tokens=9, ttft_s=ttft_s, e2e_s=ttft_s)
        assert swarm.run is not None
        swarm.run.outcomes.append(served)
        swarm._write()
        codes.append(environment.process_exit_code)
    assert codes == [0, 4, 0]
