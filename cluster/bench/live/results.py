"""What a cell measured, as its JSON file holds it, and what one request came to (pure).

A cell is one measurement of the comparison: one layout of servers under one load.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec
import numpy as np

from ....loadtests.outcomes import LoadOutcome
from ....protos.targets import TargetError, TtftTarget, parse_time
from ....simulator.errors import SimulationError
from ....simulator.metrics import Slo, isolated_cost
from .errors import LiveBenchError


class ItlJudge(StrEnum):
    """Which figure of a request is compared with the ITL target."""

    TPOT = "tpot"  #: mean seconds of a token after the first
    #: 99th percentile of the gaps between pieces of the stream, interpolated between ranks
    GAP_P99 = "gap_p99"


class LiveSlo(msgspec.Struct, frozen=True):
    """Targets of a request: `2s:50ms`, or `max(1s, 3x):50ms`."""

    targets: Slo  #: TTFT from sending; gaps between tokens, judged as `ItlJudge` says

    @staticmethod
    def parse(text: str, isolated: str = "") -> LiveSlo:
        """Return the targets of a text like `2s:50ms`.

        A multiple of a prompt's time alone on the server needs that time: `isolated`, as in
        `20ms + 150ms/1k`. Raises LiveBenchError.
        """
        ttft, _, itl = text.rpartition(":")
        try:
            costs = (isolated_cost(isolated),) if isolated else ()
            slo = Slo(TtftTarget.parse(ttft), parse_time(itl), costs)
        except TargetError:
            raise LiveBenchError(f"--slo {text}: expected TTFT:ITL, as in 2s:50ms") from None
        except SimulationError as error:
            raise LiveBenchError(str(error)) from None
        if slo.ttft.needs_isolated and not costs:
            raise LiveBenchError(f"--slo {text}: 3x needs --isolated, as in 20ms + 150ms/1k")
        return LiveSlo(slo)

    @property
    def itl_s(self) -> float:
        """Limit of the gaps between tokens."""
        return self.targets.itl_s

    def ttft_s(self, prompt_tokens: int) -> float:
        """Return the limit of the time from sending to the first token."""
        return self.targets.ttft_target_s(prompt_tokens)

    def __str__(self) -> str:
        return f"{self.targets.ttft}:{self.itl_s * 1e3:g}ms"


class MeasuredAnswer(msgspec.Struct, frozen=True):
    """One request of a cell, as its client saw it. Latencies count from `sent_s`."""

    #: Seconds from the load's start at which the request was sent, or was to be sent if the client
    #: had as many under way as it may, or did not come to send it.
    sent_s: float
    prompt_tokens: int
    output_tokens: int
    error: str = ""  #: "": the answer is complete
    cached_tokens: int = 0  #: as the server says
    ttft_s: float = 0.0  #: until the first piece with text
    e2e_s: float = 0.0  #: until the last piece with text; of a failed request until the failure
    gaps_ms: list[float] = []  #: between pieces that brought text
    turn: int = 0  #: of a chat, from 0

    @staticmethod
    def of(outcome: LoadOutcome, *, ended_s: float, turn: int = 0) -> MeasuredAnswer:
        """Return what is kept of a load test's outcome; latencies count from its `arrival_s`.

        Of a failed one all latencies are dropped but the end, at `ended_s` after the load's start.
        """
        waited_s = outcome.sent_s - outcome.arrival_s
        if outcome.error:
            return MeasuredAnswer(
                sent_s=outcome.arrival_s,
                prompt_tokens=outcome.prompt_tokens,
                output_tokens=0,
                error=outcome.error,
                e2e_s=ended_s - outcome.arrival_s,
                turn=turn,
            )
        return MeasuredAnswer(
            sent_s=outcome.arrival_s,
            prompt_tokens=outcome.prompt_tokens,
            output_tokens=outcome.output_tokens,
            cached_tokens=outcome.cached_tokens,
            ttft_s=waited_s + outcome.ttft_s,
            e2e_s=waited_s + outcome.e2e_s,
            gaps_ms=[round(gap_s * 1e3, 2) for gap_s in outcome.gaps_s],
            turn=turn,
        )

    @property
    def tpot_s(self) -> float:
        """Mean seconds of a token after the first; 0 if there is none."""
        # A piece may bring several tokens. More gaps than tokens show that not all were counted.
        tokens = max(self.output_tokens - 1, len(self.gaps_ms))
        return sum(self.gaps_ms) / 1e3 / tokens if tokens else 0.0

    @property
    def gap_p99_s(self) -> float:
        """The 99th percentile of the request's own gaps; 0 if there are none."""
        return float(np.percentile(self.gaps_ms, 99)) / 1e3 if self.gaps_ms else 0.0

    def met(self, slo: LiveSlo, judge: ItlJudge) -> bool:
        """Return whether the answer is complete and within its targets."""
        if self.error or self.ttft_s > slo.ttft_s(self.prompt_tokens):
            return False
        itl_s = self.tpot_s if judge == ItlJudge.TPOT else self.gap_p99_s
        return itl_s <= slo.itl_s


class ClientReport(msgspec.Struct):
    """What the client process says when a load is over."""

    digest: str  #: of what was sent (`loads.digest`)
    span_s: float  #: from the load's start to the end of the last request, served or failed
    cpu_s: float  #: of the client itself
    #: Of all planned requests, by the time of sending: also those that failed, or were not sent.
    answers: list[MeasuredAnswer]
    model: str = ""  #: as the server calls it
    goes_first: bool = False  #: The kernel ran the client before ordinary processes.


class CellResult(msgspec.Struct, frozen=True):
    """The content of one cell's file: what one layout of servers did under one load."""

    key: str  #: names the cell (`cells`)
    layout: str  #: name of the layout
    #: Model, load and settings (`cells.cell_setup`). A file is used again only if these are equal.
    setup: dict[str, Any]
    started_s: float  #: a duration: how long the servers took to start
    wall_s: float  #: how long the whole cell took
    report: ClientReport
    server: dict[str, Any] = {}  #: versions, and what the server counted itself

    @property
    def done(self) -> list[MeasuredAnswer]:
        """The answers that are complete, in time or not."""
        return [answer for answer in self.report.answers if not answer.error]

    @property
    def done_per_s(self) -> float:
        """Complete answers a second."""
        return len(self.done) / self.report.span_s
