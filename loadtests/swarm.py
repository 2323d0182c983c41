"""A run inside Locust: its metrics, its web page, its master and workers, its end.

Every process has a `Run`; a worker sends its outcomes with Locust's own reports, the master (or the
only process) collects them in a `Collector`, writes the document, and sets the exit code: 4 if a
gate does not hold. What is logged in Locust's statistics, in ms:

    HTTP or gRPC  each request, whole; failures are those of the request (in `Aggregated` too)
    TTFT, ITL     first tokens; every gap, the one to the second token included
    SLO           each request; its failures missed a target, so 1 - failures is goodput
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections import deque
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import gevent
import msgspec
import numpy as np
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import MasterRunner, WorkerRunner
from locust.stats import StatsError
from locust.user import User

from . import echo, machine, server
from .arrivals import Stage, arrivals, stages
from .endpoint import Facts, ask
from .errors import LoadError
from .outcomes import Outcome
from .plan import Plan
from .result import Client, assemble
from .run import Run, Share
from .sse import Connection, ProtocolError

PING_S = 0.25  #: between two round trips
TELL_S = 2.0  #: between two lines of progress
RECENT = 500  #: requests and gaps that live figures are of
DEFAULT_ADMIN = "http://127.0.0.1:8001"
LAST_REPORT_S = 15.0  #: for a worker's last report
MISSED = {"ttft": "first token too late", "itl": "gaps too long", "error": "failed"}


class Missed(Exception):
    """A target, as Locust's list of failures shows it."""


class Failed(Exception):
    """A request, as Locust's list of failures shows it."""


class Collector:
    """Outcomes of all processes, and live figures of the last ones."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self._slo = plan, plan.targets
        self.stages: list[Stage] = stages(plan)
        self.outcomes: list[Outcome] = []
        self.client = Client()
        self.finished: set[str] = set()  #: processes
        self._cells: dict[int, dict[str, int]] = {}
        self._recent: deque[Outcome] = deque(maxlen=RECENT)

    def add(self, process: str, found: list[Outcome], usage: tuple[float, float]) -> None:
        self.client.processes[process] = usage
        self.outcomes += found
        self._recent += found
        for one in found:
            cell = self._cells.setdefault(
                one.stage, {"requests": 0, "met": 0, **dict.fromkeys(MISSED, 0)}
            )
            cell["requests"] += 1
            cell[one.missed(self._slo) or "met"] += 1

    def table(self) -> list[dict[str, Any]]:
        """Rows of the web page's goodput tab."""
        rows = []
        for number, cell in sorted(self._cells.items()):
            stage = self.stages[number]
            share = cell["met"] / cell["requests"]
            span = stage.end_s - stage.begin_s
            rows.append(
                {
                    "name": stage.label,
                    "safe_name": stage.label,
                    **cell,
                    "goodput": f"{share:.1%}",
                    "good_per_s": round(cell["met"] / span, 3),
                }
            )
        return rows

    def line(self, now: float, under_way: int) -> str:
        """Progress, in one line."""
        met = sum(cell["met"] for cell in self._cells.values())
        ended = len(self.outcomes)
        served = [one for one in self._recent if not one.error]
        gaps = [gap for one in list(served)[-20:] for gap in one.gaps_s]
        parts = [f"{min(now, 1e5):5.0f} of {self.plan.duration:.0f} s", f"{ended} ended"]
        if under_way:
            parts.append(f"{under_way} under way")
        if ended:
            parts.append(f"goodput {met / ended:.1%}")
        if served:
            parts.append(f"TTFT p50 {np.median([o.ttft_s for o in served]) * 1e3:.0f} ms")
        if gaps:
            parts.append(f"ITL p50 {np.median(gaps) * 1e3:.1f} ms")
        failed = sum(cell["error"] for cell in self._cells.values())
        if failed:
            parts.append(f"{failed} failed")
        return "  ".join(parts)


class Swarm:
    """This process's part in Locust's run, and the whole run's end where it is decided."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.run: Run | None = None
        self.collector: Collector | None = None
        self.facts: Facts | None = None
        self._before: dict[str, float] = {}
        self._about: dict[str, Any] = {}
        self._plan = Plan()
        self._begun, self._ended = 0.0, False  #: when; by itself
        events = environment.events
        events.test_start.add_listener(self._start)
        events.test_stop.add_listener(self._stop)
        events.report_to_master.add_listener(self._report)
        events.worker_report.add_listener(self._reported)
        events.quitting.add_listener(self._quitting)
        if environment.web_ui:
            self._page(environment.web_ui)

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

    def _start(self, **_: Any) -> None:
        options: Any = self.environment.parsed_options
        try:
            self._plan = plan = Plan.of(options)
            if self._is_worker:
                self.facts = msgspec.json.decode(options.plan_facts, type=Facts)
            else:
                self._prepare(plan, options)
        except LoadError as error:
            print(f"diptych loadtest: {error}", file=sys.stderr, flush=True)
            self.environment.process_exit_code = 1
            gevent.spawn_later(0.5, self._leave)
            return
        assert self.facts is not None
        if not self._is_master:
            share = self._share(options)
            name = f"load-{options.plan_run}"
            self.run = Run(plan, self.facts, share, api_key(), self._log, name)
        if not self._is_worker:
            self._begun, self._ended = time.monotonic(), False
            gevent.spawn(self._watch)
            gevent.spawn(self._ping, self.facts.url)

    def _prepare(self, plan: Plan, options: Any) -> None:
        """Asks the endpoint and measures this client, once for all processes."""
        if plan.load != "chat":
            arrivals(plan)  # what is wrong with it is told now
        url = self.environment.host or ""
        self.facts = ask(url, api_key(), plan.model, plan.grpc, plan.seed)
        least = plan.shared + plan.prompts[0] + plan.outputs[0]
        if plan.load == "chat" and least > self.facts.context:
            raise LoadError(
                f"a first turn has {least} tokens and more with its answer, the model's context is "
                f"{self.facts.context}: ask for shorter prompts, answers or system prompts"
            )
        options.plan_facts = msgspec.json.encode(self.facts).decode()
        options.plan_run = secrets.token_hex(4)
        self.collector = Collector(plan)
        self.collector.client.calibration = echo.measure()
        self._before = self._counted()
        started = datetime.now(UTC).isoformat(timespec="seconds")
        self._about = {"started": started, **machine.describe()}
        if plan.load != "chat":
            long = [a for a in arrivals(plan) if a.prompt + a.output > self.facts.context]
            self._about["skipped"] = len(long)

    def _share(self, options: Any) -> Share:
        if not self._is_worker:
            return Share()
        index = self.environment.runner.worker_index  # type: ignore[union-attr]
        return Share(index, max(1, options.expect_workers or 1))

    # ---- users and metrics -----------------------------------------------------------------------

    def act(self, user: User) -> None:
        """What a user does, whole."""
        run = self.run
        if run is not None:

            def stopping() -> bool:
                return user._state == "stopping"

            if run.plan.load == "chat":
                run.converse(stopping)
            else:
                run.offer(stopping)
        raise StopUser

    def _log(self, outcome: Outcome, stage: Stage) -> None:
        kind = "gRPC" if self._plan.grpc else "HTTP"
        whole = 0.0 if outcome.error else outcome.e2e_s * 1e3
        self.environment.events.request.fire(
            request_type=kind,
            name=stage.label,
            response_time=whole,
            response_length=outcome.output,
            exception=Failed(outcome.error) if outcome.error else None,
            context={},
        )
        stats = self.environment.stats
        missed = outcome.missed(self._plan.targets)
        stats.get(stage.label, "SLO").log(whole, 0)  # type: ignore[arg-type]
        if missed:
            reason = Missed(MISSED[missed])
            stats.get(stage.label, "SLO").log_error(reason)
            key = StatsError.create_key("SLO", stage.label, reason)
            stats.errors.setdefault(key, StatsError("SLO", stage.label, reason)).occurred()
        if not outcome.error:
            stats.get(stage.label, "TTFT").log(outcome.ttft_s * 1e3, 0)  # type: ignore[arg-type]
            gaps = stats.get(stage.label, "ITL")
            for gap in outcome.gaps_s:
                gaps.log(gap * 1e3, 0)  # type: ignore[arg-type]

    # ---- workers and master ----------------------------------------------------------------------

    def _report(self, client_id: str, data: dict[str, Any]) -> None:
        if self.run is not None:
            found = [one.packed() for one in self.run.fetch()]
            data["diptych"] = (found, self.run.usage, len(self.run.under_way), self.run.done)

    def _reported(self, client_id: str, data: dict[str, Any]) -> None:
        if self.collector is None or "diptych" not in data:
            return
        found, usage, _, done = data["diptych"]
        self.collector.add(client_id, [Outcome(**one) for one in found], tuple(usage))
        if done:
            self.collector.finished.add(client_id)

    # ---- end -------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Tells progress; ends the run when every process has ended its part."""
        collector, plan = self.collector, self._plan
        assert collector is not None
        begun, told = self._begun, 0.0
        latest = plan.duration + plan.drain + LAST_REPORT_S
        while not self._over(collector) and time.monotonic() - begun < latest:
            gevent.sleep(0.1)
            self._gather(collector)
            now = time.monotonic() - begun
            if self._headless and now - told >= TELL_S:
                told = now
                under_way = len(self.run.under_way) if self.run else 0
                print(collector.line(now, under_way), file=sys.stderr, flush=True)
        self._ended = True
        self._leave()

    def _ping(self, url: str) -> None:
        """Round trips through whatever stands before the server, under the same load."""
        collector = self.collector
        connection = None
        while collector is not None and collector is self.collector:
            gevent.sleep(PING_S)
            try:
                connection = connection or Connection(url, 10.0)
                sent = connection.send("GET", "/health", b"", {})
                arrived = [stamp for stamp, _ in connection.pieces()]
            except (OSError, ProtocolError):
                connection = None
                continue
            collector.client.path_s.append(arrived[0] - sent if arrived else 0.0)

    def _gather(self, collector: Collector) -> None:
        if self.run is not None:
            collector.add("local", self.run.fetch(), self.run.usage)

    def _over(self, collector: Collector) -> bool:
        if self.run is not None:
            return self.run.done
        return len(collector.finished) >= self._processes

    @property
    def _processes(self) -> int:
        options = self.environment.parsed_options
        return max(1, getattr(options, "expect_workers", 1) or 1)

    def _leave(self) -> None:
        runner = self.environment.runner
        if runner is not None:
            runner.quit() if self._headless else runner.stop()

    def _stop(self, **_: Any) -> None:
        if self.run is not None:
            self.run.cut()
        if not self._headless:
            self._write()

    def _quitting(self, **_: Any) -> None:
        if self._headless and not self._is_worker:
            self._write()

    def _write(self) -> None:
        collector, self.collector = self.collector, None
        if collector is None or self.facts is None:
            return
        self._gather(collector)
        plan = self._plan
        if not self._ended:
            self._about["ended_s"] = min(
                max(0.1, round(time.monotonic() - self._begun, 1)), plan.duration
            )
        elif self._is_master:  # who never said it was done
            self._about["silent"] = self._processes - len(collector.finished)
        told = server.difference(self._before, self._counted())
        document = assemble(
            plan, self.facts, collector.outcomes, collector.client, told, self._about
        )
        if plan.out:
            Path(plan.out).write_text(json.dumps(document, separators=(",", ":")))
        lost = [gate["gate"] for gate in document["gates"] if not gate["holds"]]
        for gate in lost:
            print(f"missed: {gate}", file=sys.stderr)
        if self.environment.process_exit_code is None:
            gone = 1 if self._about.get("silent") else 0
            self.environment.process_exit_code = 4 if lost else gone

    def _counted(self) -> dict[str, float]:
        """A Diptych cluster of this machine is asked without being told where."""
        assert self.facts is not None
        admin = self._plan.admin
        if not admin and self.facts.server == "diptych" and "//127.0.0.1" in self.facts.url:
            admin = DEFAULT_ADMIN
        return server.counted(self._plan.metrics, admin, os.environ.get("DIPTYCH_ADMIN_TOKEN", ""))

    # ---- web page --------------------------------------------------------------------------------

    def _page(self, web_ui: Any) -> None:
        """A tab with live goodput in Locust's own page."""
        columns = {
            "name": "Stage",
            "requests": "# Requests",
            "met": "# Met",
            "ttft": "# Missed TTFT",
            "itl": "# Missed ITL",
            "error": "# Failed",
            "goodput": "Goodput",
            "good_per_s": "Met/s",
        }
        structure = [{"key": key, "title": title} for key, title in columns.items()]
        web_ui.template_args |= {
            "extended_tabs": [{"title": "Goodput", "key": "goodput"}],
            "extended_tables": [{"key": "goodput", "structure": structure}],
        }

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
    """Never an option: options are shown."""
    return os.environ.get("DIPTYCH_API_KEY") or os.environ.get("OPENAI_API_KEY", "")
