"""A run inside Locust: its metrics, its web page, its master and workers, its end.

Every process but a master has a `LoadRun`. A worker sends its outcomes with Locust's own reports.
The master (or the only process) collects them in a `Collector`, writes the document, and sets the
exit code: 4 if a gate does not hold. What is logged in Locust's statistics, in ms:

    HTTP or gRPC  each request, whole; failures are those of the request (in `Aggregated` too), and
                  count without a time
    TTFT, ITL     times to first tokens; every gap between tokens, the one to the second included
    SLO           each request; its failures missed a target, so 1 - failures is goodput

Locust has users, of which each runs in a greenlet, and calls this file by events: `test_start`,
`test_stopping`, `test_stop`, `quitting`, and the reports from workers to the master every few
seconds.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections import Counter, deque
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import gevent
import msgspec
import numpy as np
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import MasterRunner, WorkerRunner
from locust.stats import StatsError
from locust.user import User

from . import echo, machine, server
from .arrivals import RateStage, planned_arrivals, rate_stages
from .endpoint import EndpointFacts, probe_endpoint
from .errors import LoadError
from .outcomes import LoadOutcome
from .plan import LoadPlan
from .result import ClientCost, assemble
from .run import LoadRun, ProcessShare
from .sse import HttpConnection, ProtocolError

ROUND_TRIP_EVERY_S = 0.25  #: between two requests that measure the way to the server
PROGRESS_EVERY_S = 2.0  #: between two lines of progress
RECENT_LIMIT = 500  #: requests that live figures are of
RECENT_GAP_REQUESTS = 20  #: the latest of these, whose gaps are live figures
#: A Diptych cluster of this machine that has its default ports: host and port, and its admin API.
DEFAULT_ADDRESS = ("127.0.0.1", 8000)
DEFAULT_ADMIN = "http://127.0.0.1:8001"
LAST_REPORT_S = 15.0  #: after the run's end, for a worker's last report; then it counts as silent
#: By what `LoadOutcome.missed` returns: the words for people.
MISSED = {"ttft": "first token too late", "itl": "gaps too long", "error": "failed"}
#: Columns of the web page's goodput tab.
GOODPUT_COLUMNS = {
    "name": "Stage",
    "requests": "# Requests",
    "met": "# Met",
    "ttft": "# Missed TTFT",
    "itl": "# Missed ITL",
    "error": "# Failed",
    "goodput": "Goodput",
    "good_per_s": "Met/s",
}


class TargetMissed(Exception):
    """A missed target, as Locust's list of failures shows it."""

    def __repr__(self) -> str:
        return f"Missed({str(self)!r})"


class RequestFailed(Exception):
    """A failed request, as Locust's list of failures shows it."""

    def __repr__(self) -> str:
        return f"Failed({str(self)!r})"


class Collector:
    """Outcomes of all processes, and live figures of the last ones.

    The master has one for each run, or the only process.
    """

    def __init__(self, plan: LoadPlan) -> None:
        self.plan = plan
        self.stages: list[RateStage] = rate_stages(plan)
        self.outcomes: list[LoadOutcome] = []
        self.client = ClientCost()  #: what the load cost this client's own processes
        self.finished: set[str] = set()  #: processes that have ended their part
        self._targets = plan.targets
        #: By the stage's index: requests by what they missed first, or "met".
        self._verdicts: dict[int, Counter[str]] = {}
        self._recent: deque[LoadOutcome] = deque(maxlen=RECENT_LIMIT)

    def add(self, process: str, outcomes: list[LoadOutcome], usage: tuple[float, float]) -> None:
        """Takes a process's new outcomes, and its `usage`: CPU and wall seconds so far."""
        self.client.processes[process] = usage
        self.outcomes += outcomes
        self._recent += outcomes
        for outcome in outcomes:
            verdict = outcome.missed(self._targets) or "met"
            self._verdicts.setdefault(outcome.stage_index, Counter())[verdict] += 1

    def table(self) -> list[dict[str, Any]]:
        """Returns the rows of the web page's goodput tab."""
        rows: list[dict[str, Any]] = []
        for stage_index, verdicts in sorted(self._verdicts.items()):
            stage = self.stages[stage_index]
            requests = verdicts.total()
            met = verdicts["met"]
            rows.append(
                {
                    "name": stage.label,
                    "requests": requests,
                    "met": met,
                    **{target: verdicts[target] for target in MISSED},
                    "goodput": f"{met / requests:.1%}",
                    "good_per_s": round(met / (stage.end_s - stage.begin_s), 3),
                }
            )
        return rows

    def line(self, now: float, under_way: int) -> str:
        """Returns the progress in one line; `now` is in seconds since the start.

        `under_way` are this process's requests: 0 on a master, which does not know the workers'.
        Goodput is of all requests so far; times are of the latest ones.
        """
        verdicts = sum(self._verdicts.values(), Counter[str]())
        ended = len(self.outcomes)
        served = [outcome for outcome in self._recent if not outcome.error]
        gaps_s = [gap for outcome in served[-RECENT_GAP_REQUESTS:] for gap in outcome.gaps_s]
        parts = [f"{now:5.0f} of {self.plan.duration:.0f} s", f"{ended} ended"]
        if under_way:
            parts.append(f"{under_way} under way")
        if ended:
            parts.append(f"goodput {verdicts['met'] / ended:.1%}")
        if served:
            ttft_s = float(np.median([outcome.ttft_s for outcome in served]))
            parts.append(f"TTFT p50 {ttft_s * 1e3:.0f} ms")
        if gaps_s:
            parts.append(f"ITL p50 {np.median(gaps_s) * 1e3:.1f} ms")
        if verdicts["error"]:
            parts.append(f"{verdicts['error']} failed")
        return "  ".join(parts)


class Swarm:
    """This process's part in Locust's run, and the whole run's end where it is decided.

    One object lives as long as the process. In Locust's web page runs follow each other.
    """

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        #: None on a master, which offers nothing, and on a worker that has no run.
        self.run: LoadRun | None = None
        self.collector: Collector | None = None  #: None on a worker, and before and after a run
        self.facts: EndpointFacts | None = None
        self._plan = LoadPlan()
        self._about: dict[str, Any] = {}  #: what the document says besides figures
        self._counters_before: dict[str, float] = {}  #: the server's
        self._began = 0.0  #: when the run began, on the monotonic clock
        self._is_stopping = False  #: True once Locust has begun to stop the run
        self._ended_by_itself = False  #: True if the run was not stopped by somebody
        events = environment.events
        events.test_start.add_listener(self._on_start)
        events.test_stopping.add_listener(self._on_stopping)
        events.test_stop.add_listener(self._on_stop)
        events.report_to_master.add_listener(self._on_report_to_master)
        events.worker_report.add_listener(self._on_worker_report)
        events.quitting.add_listener(self._on_quitting)
        if environment.web_ui:
            self._extend_page(environment.web_ui)

    @property
    def _is_worker(self) -> bool:
        return isinstance(self.environment.runner, WorkerRunner)

    @property
    def _is_master(self) -> bool:
        return isinstance(self.environment.runner, MasterRunner)

    @property
    def _headless(self) -> bool:
        return bool(getattr(self.environment.parsed_options, "headless", False))

    # ---- begin -----------------------------------------------------------------------------------

    def _on_start(self, **_: Any) -> None:
        options: Any = self.environment.parsed_options
        self.environment.process_exit_code = None  # of an earlier run of the web page
        try:
            self._plan = LoadPlan.of(options)
            if self._is_worker:
                self.facts = msgspec.json.decode(options.plan_facts, type=EndpointFacts)
            else:
                self._prepare(options)
        except LoadError as error:
            print(f"diptych loadtest: {error}", file=sys.stderr, flush=True)
            self.environment.process_exit_code = 1
            gevent.spawn_later(0.5, self._leave)  # Locust has to finish its start first
            return

        assert self.facts is not None
        if not self._is_master:
            self.run = LoadRun(
                self._plan,
                self.facts,
                share=self._share(options),
                key=api_key(),
                on_end=self._log,
                name=f"load-{options.plan_run}",
            )
        if not self._is_worker:
            self._began = time.monotonic()
            self._is_stopping = False
            self._ended_by_itself = False
            gevent.spawn(self._watch)
            gevent.spawn(self._measure_path, self.facts.url)

    def _prepare(self, options: Any) -> None:
        """Asks the endpoint and measures this client, once for all processes. Raises LoadError.

        What workers need of it travels to them in Locust's options: `plan_facts` and `plan_run`, a
        random name of the run.
        """
        plan = self._plan
        if plan.load != "chat":
            planned_arrivals(plan)  # what is wrong with the plan is reported now
        url = self.environment.host or ""
        self.facts = probe_endpoint(url, api_key(), model=plan.model, grpc=plan.grpc)
        self._check_first_turn(self.facts.context)
        options.plan_facts = msgspec.json.encode(self.facts).decode()
        options.plan_run = secrets.token_hex(4)

        self.collector = Collector(plan)
        self.collector.client.calibration = echo.measure()
        self._counters_before = self._read_counters()
        started = datetime.now(UTC).isoformat(timespec="seconds")
        self._about = {"started": started, **machine.describe()}
        if plan.load != "chat":
            context = self.facts.context
            self._about["skipped"] = sum(a.exceeds(context) for a in planned_arrivals(plan))

    def _check_first_turn(self, context: int) -> None:
        """Raises LoadError if not even the shortest first turn of a chat fits into the context."""
        plan = self._plan
        shortest_tokens = plan.shared + plan.prompts.low + plan.outputs.low
        if plan.load == "chat" and shortest_tokens > context:
            raise LoadError(
                f"a first turn has {shortest_tokens} tokens and more with its answer, the model's "
                f"context is {context}: ask for shorter prompts, answers or system prompts"
            )

    def _share(self, options: Any) -> ProcessShare:
        """Returns which part of the load is this process's."""
        if not self._is_worker:
            return ProcessShare()
        index = self.environment.runner.worker_index  # type: ignore[union-attr]
        return ProcessShare(index, max(1, options.expect_workers or 1))

    # ---- users and metrics -----------------------------------------------------------------------

    def act(self, user: User) -> None:
        """Does all that a user of Locust does in a run, and ends the user.

        In a chat load each user converses. In an open loop a process has one user, which offers all
        of the process's arrivals.
        """
        run = self.run
        if run is not None:

            def stopping() -> bool:
                return user._state == "stopping"

            if run.plan.load == "chat":
                run.converse(stopping)
            else:
                run.offer(stopping)
        raise StopUser

    def _log(self, outcome: LoadOutcome, stage: RateStage) -> None:
        """Puts a request that has ended into Locust's statistics."""
        e2e_ms = None if outcome.error else outcome.e2e_s * 1e3
        self.environment.events.request.fire(
            request_type="gRPC" if self._plan.grpc else "HTTP",
            name=stage.label,
            response_time=e2e_ms,
            response_length=outcome.output_tokens,
            exception=RequestFailed(outcome.error) if outcome.error else None,
            context={},
        )
        # Not by events: these would count the request once more in Locust's `Aggregated`.
        stats: Any = self.environment.stats
        stats.get(stage.label, "SLO").log(e2e_ms, 0)
        missed = outcome.missed(self._plan.targets)
        if missed:
            reason = TargetMissed(MISSED[missed])
            stats.get(stage.label, "SLO").log_error(reason)
            key = StatsError.create_key("SLO", stage.label, reason)
            stats.errors.setdefault(key, StatsError("SLO", stage.label, reason)).occurred()
        if not outcome.error:
            stats.get(stage.label, "TTFT").log(outcome.ttft_s * 1e3, 0)
            gap_stats = stats.get(stage.label, "ITL")
            for gap_s in outcome.gaps_s:
                gap_stats.log(gap_s * 1e3, 0)

    # ---- workers and master ----------------------------------------------------------------------

    def _on_report_to_master(self, client_id: str, data: dict[str, Any]) -> None:
        """Puts a worker's new outcomes into `data`, the report that Locust is about to send."""
        if self.run is not None:
            outcomes = [outcome.packed() for outcome in self.run.fetch()]
            data["diptych"] = (outcomes, self.run.usage, self.run.done)

    def _on_worker_report(self, client_id: str, data: dict[str, Any]) -> None:
        if self.collector is None or "diptych" not in data:
            return
        outcomes, usage, done = data["diptych"]
        self.collector.add(client_id, [LoadOutcome(**packed) for packed in outcomes], tuple(usage))
        if done:
            self.collector.finished.add(client_id)

    # ---- end -------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Prints progress; ends the run when every process has ended its part.

        Where somebody stops the run, processes end their parts too: then `_on_stop` does the rest.
        """
        collector = self.collector
        assert collector is not None
        began = self._began
        limit_s = self._plan.duration + self._plan.drain + LAST_REPORT_S
        last_line_s = 0.0
        while not self._all_done(collector) and time.monotonic() - began < limit_s:
            gevent.sleep(0.1)
            if self._is_stopping:
                return
            self._gather_own(collector)
            now_s = time.monotonic() - began
            if self._headless and now_s - last_line_s >= PROGRESS_EVERY_S:
                last_line_s = now_s
                under_way = len(self.run.under_way) if self.run else 0
                print(collector.line(now_s, under_way), file=sys.stderr, flush=True)
        self._ended_by_itself = True
        self._leave()

    def _measure_path(self, url: str) -> None:
        """Measures round trips through whatever stands before the server, under the same load.

        They tell the way's share of the times that the client sees and the server does not.
        """
        collector = self.collector
        connection: HttpConnection | None = None
        while collector is not None and collector is self.collector:  # until the run is written
            gevent.sleep(ROUND_TRIP_EVERY_S)
            try:
                connection = connection or HttpConnection(url, 10.0)
                collector.client.path_s.append(connection.measure_round_trip("/health"))
            except (OSError, ProtocolError):
                connection = None

    def _gather_own(self, collector: Collector) -> None:
        """Takes the outcomes of this process, if it offers load itself."""
        if self.run is not None:
            collector.add("local", self.run.fetch(), self.run.usage)

    def _all_done(self, collector: Collector) -> bool:
        if self.run is not None:
            return self.run.done
        return len(collector.finished) >= self._worker_count

    @property
    def _worker_count(self) -> int:
        options = self.environment.parsed_options
        return max(1, getattr(options, "expect_workers", 1) or 1)

    def _leave(self) -> None:
        """Ends Locust; with a web page only the run ends, and the page stays."""
        runner = self.environment.runner
        if runner is None:
            return
        if self._headless:
            runner.quit()
        else:
            runner.stop()

    def _on_stopping(self, **_: Any) -> None:
        self._is_stopping = True

    def _on_stop(self, **_: Any) -> None:
        """Cuts what is under way; with a web page, writes the document when workers have stopped.

        A headless master stops before its workers do, and hears from them while it quits.
        """
        if self.run is not None:
            self.run.cut()
        runner = self.environment.runner
        if isinstance(runner, WorkerRunner):
            # Locust's next report may be seconds away, and the master writes as soon as it hears
            # that all workers have stopped.
            runner._send_stats()
            # Workers report between runs too. A later report that this run is done would count for
            # the next one.
            self.run = None
        elif not self._headless:
            self._write()

    def _on_quitting(self, **_: Any) -> None:
        runner = self.environment.runner
        if self._headless and not self._is_worker and runner is not None:
            # After ^C Locust comes here first, and stops the run only then: what is under way would
            # be cut, and workers would report, after the document was written. A runner that has
            # ended may quit once more.
            runner.quit()
            self._write()

    def _write(self) -> None:
        """Writes the document of the run and decides the exit code. A second call does nothing."""
        collector = self.collector
        self.collector = None
        if collector is None or self.facts is None:
            return
        self._gather_own(collector)
        plan = self._plan
        if not self._ended_by_itself:
            ended_s = max(0.1, round(time.monotonic() - self._began, 1))
            self._about["ended_s"] = min(ended_s, plan.duration)
        elif self._is_master:  # a process that never said it was done
            self._about["silent"] = self._worker_count - len(collector.finished)

        counters = server.difference(self._counters_before, self._read_counters())
        document = assemble(
            plan,
            self.facts,
            collector.outcomes,
            client=collector.client,
            counters=counters,
            about=self._about,
        )
        if plan.out:  # without spaces: a run has a row for each request
            Path(plan.out).write_text(json.dumps(document, separators=(",", ":")))
        missed_gates = [gate["gate"] for gate in document["gates"] if not gate["holds"]]
        for gate in missed_gates:
            print(f"missed: {gate}", file=sys.stderr)
        if self.environment.process_exit_code is None:
            self.environment.process_exit_code = self._exit_code(missed_gates)

    def _exit_code(self, missed_gates: list[str]) -> int:
        """Returns 4 for a missed gate, 1 where a process's outcomes are missing, else 0."""
        if missed_gates:
            return 4
        return 1 if self._about.get("silent") else 0

    def _read_counters(self) -> dict[str, float]:
        """Reads what the server has counted.

        A Diptych cluster of this machine is asked without being told where, if its endpoint is at
        the default address.
        """
        assert self.facts is not None
        admin = self._plan.admin
        url = urlsplit(self.facts.url)
        is_default = (url.hostname, url.port) == DEFAULT_ADDRESS
        if not admin and self.facts.server == "diptych" and is_default:
            admin = DEFAULT_ADMIN
        token = os.environ.get("DIPTYCH_ADMIN_TOKEN", "")
        return server.read_counters(self._plan.metrics, admin, token)

    # ---- web page --------------------------------------------------------------------------------

    def _extend_page(self, web_ui: Any) -> None:
        """Adds a tab with live goodput to Locust's own page."""
        structure = [{"key": key, "title": title} for key, title in GOODPUT_COLUMNS.items()]
        web_ui.template_args |= {
            "extended_tabs": [{"title": "Goodput", "key": "goodput"}],
            "extended_tables": [{"key": "goodput", "structure": structure}],
        }

        # The page asks for this path again and again, and shows the tables that it finds there.
        @web_ui.app.after_request
        def extend(response: Any) -> Any:
            from flask import request

            if request.path == "/stats/requests" and self.collector is not None:
                body = response.json | {
                    "extended_stats": [{"key": "goodput", "data": self.collector.table()}]
                }
                response.set_data(json.dumps(body))
            return response


def api_key() -> str:
    """Returns the endpoint's key, which is never an option, because options are shown."""
    names = ("DIPTYCH_API_KEY", "DIPTYCH_TOKEN", "OPENAI_API_KEY")
    return next((os.environ[name] for name in names if os.environ.get(name)), "")
