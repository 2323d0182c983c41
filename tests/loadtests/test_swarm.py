"""What a process of a distributed run tells the master, without a server and without Locust's users."""

from __future__ import annotations

import time
from typing import Any

import pytest
from diptych.loadtests.outcomes import LoadOutcome


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
