"""A router's log of a live run -> what its workers cost, and the run itself (`Calibration`).

    prefill(u)  from the prompts that nobody else's prompt overlapped: asked -> first token, as
                much shorter as prefill workers report; where the worker decoded beside, its
                reports' seconds a token instead
    step(B, K)  from the reports of two moments with equally many running sequences
    transfer(t) from what the decode workers measured of each

by least squares without negative factors; means, not bests: what disturbed the machine is in them.
A request is met by the rule of `metrics`; its gaps' p99 is the gateway's, from `Over`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import nnls

from ..protos.frames import (
    AttemptKey,
    AttemptOutcome,
    Coefficients,
    PlaceAttempt,
    WorkerCard,
    WorkerReport,
)
from ..router import events as e
from ..router.goodput import GAPS_FOR_P99
from ..router.replay import LogError, LogHead, read
from .calibrate import Calibration, Kind, Run, Seen
from .errors import SimulationError
from .trace import HASH_TOKENS

ENOUGH = 12  #: lone prompts that a fit of the prefill needs; with fewer, reports alone
SHORT = 8  #: reports that a fit of the step needs
FULL = ("stop", "length")


@dataclass(slots=True)
class Life:
    """One client's request over all its attempts. Times by the router's clock."""

    place: PlaceAttempt
    asked: float
    first: float = 0.0
    ended: float = 0.0
    over: AttemptOutcome | None = None

    @property
    def served(self) -> bool:
        return self.first > 0 and self.over is not None and self.over.reason in FULL


@dataclass(slots=True)
class Log:
    """What the log says, by worker and by request; of the last life of the router only."""

    head: LogHead
    cards: dict[str, WorkerCard] = field(default_factory=dict)
    lives: dict[str, Life] = field(default_factory=dict)
    reports: dict[str, list[WorkerReport]] = field(default_factory=dict)

    @staticmethod
    def of(lines: Iterable[bytes]) -> Log:
        found: Log | None = None
        for at, event in read(lines):
            if isinstance(event, LogHead):
                if found is None or event.term != found.head.term:
                    found = Log(event)  # else only the next file of the same life
            elif found is None:
                raise LogError("line 1: expected the head of a router's log")
            else:
                found._take(event, at)
        if found is None or not any(life.served for life in found.lives.values()):
            raise LogError("no request in it was served")
        return found

    def _take(self, event: e.RouterEvent, at: float) -> None:
        match event:
            case e.WorkerJoined(card):
                self.cards[card.id] = card
            case e.WorkerReported(worker, report):
                self.reports.setdefault(worker, []).append(report)
            case e.PlacementRequested(_, place):
                self.lives.setdefault(place.attempt_key[0], Life(place, at - place.waited_s))
            case e.FirstTokenSent(key):
                life = self._life(key)
                if life is not None and not life.first:
                    life.first = at
            case e.AttemptEnded(key, over):
                life = self._life(key)
                if life is not None:
                    life.ended, life.over = at, over

    def _life(self, key: AttemptKey) -> Life | None:
        return self.lives.get(key[0])


def calibration(lines: Iterable[bytes], cores: int) -> Calibration:
    """Raises SimulationError: not such a log, workers of several kinds, too little in it."""
    try:
        log = Log.of(lines)
    except LogError as error:
        raise SimulationError(f"router's log: {error}") from None
    kinds = {(card.gpu, card.blocks, card.chunk_tokens) for card in log.cards.values()}
    if len(kinds) != 1:
        raise SimulationError(f"router's log: expected workers of one kind, found {len(kinds)}")
    card = next(iter(log.cards.values()))
    threads = _threads(card)
    kind = Kind(
        cost=fit(log),
        kv_tokens=card.blocks * card.block_tokens,
        threads=threads,
        chunk_tokens=card.chunk_tokens,
        max_running=card.max_running,
        itl_budget_ms=card.step_ms or None,
        planned=_planned(log, card.step_ms),
        known=card.cost is not None,
    )
    return Calibration(model="recorded", workers=[kind], cores=cores, run=_run(log, threads))


def _threads(card: WorkerCard) -> int:
    name = card.gpu.removeprefix("cpu-").removesuffix("t")
    return int(name) if name.isdigit() else 1


# ---- fit -----------------------------------------------------------------------------------------


def fit(log: Log) -> Coefficients:
    base, token = _prefill(log)
    step, row, read_s = _step(log)
    transfer, moved, exposed = _transfer(log)
    return Coefficients(
        prefill_base=base,
        prefill_token=token,
        prefill_pair=0.0,
        step_base=step,
        step_row=row,
        step_weights=0.0,
        step_token=read_s,
        transfer_base=transfer,
        transfer_token=moved,
        exposed_share=exposed,
    )


def _prefill(log: Log) -> tuple[float, float]:
    """(base, seconds a token)"""
    names = [name for name, card in log.cards.items() if (card.role or card.pool) == "prefill"]
    apart = _reported(log, names)
    mixed = log.head.config.disaggregate == "never"
    lone = _lone([life for life in log.lives.values() if life.served], mixed)
    if len(lone) >= ENOUGH:
        tokens = [life.place.prompt_tokens for life in lone]
        base, token = _least([[1.0, n] for n in tokens], [life.first - life.asked for life in lone])
        if token > 0:
            mean = token + base / (sum(tokens) / len(tokens))
            share = min(apart / mean, 1.0) if apart else 1.0
            return base * share, token * share
    found = apart or _reported(log, log.reports)
    if not found:
        raise SimulationError("router's log: no worker reports a prefill")
    return 0.0, found


def _reported(log: Log, names: Iterable[str]) -> float:
    """Seconds a prefilled token that these workers report, decode in the same steps included; 0:
    they prefilled nothing."""
    seen = [report for name in names for report in log.reports.get(name, [])]
    computed = sum(report.prefill_tokens for report in seen)
    return sum(report.prefill_seconds for report in seen) / computed if computed else 0.0


def _planned(log: Log, step_ms: float) -> float:
    """What workers that decoded planned a step for, as a share of their budget, in the mean."""
    seen = [report for reports in log.reports.values() for report in reports]
    planned = [report.step_ms for report in seen if report.running and report.step_ms]
    return sum(planned) / len(planned) / step_ms if planned and step_ms else 1.0


def _lone(lives: list[Life], mixed: bool) -> list[Life]:
    """Those whose prompt was the only one; `mixed`: with nobody decoding either."""

    def busy(life: Life) -> tuple[float, float]:
        return life.asked, life.ended if mixed else life.first

    return [
        one
        for one in lives
        if not any(
            start < one.first and end > one.asked
            for start, end in (busy(other) for other in lives if other is not one)
        )
    ]


def _step(log: Log) -> tuple[float, float, float]:
    """(base, seconds a row, seconds a token read)"""
    rows: list[list[float]] = []
    seconds: list[float] = []
    weights: list[float] = []
    for reports in log.reports.values():
        for before, report in itertools.pairwise(reports):
            if report.steps and report.running and report.running == before.running:
                rows.append([1.0, report.running, (before.kv_tokens + report.kv_tokens) / 2])
                seconds.append(report.step_seconds / report.steps)
                weights.append(report.steps)
    if len(rows) < SHORT:
        raise SimulationError(f"router's log: {len(rows)} reports of steady decoding are too few")
    base, row, token = _least(rows, seconds, weights)
    return base, row, token


def _transfer(log: Log) -> tuple[float, float, float]:
    """(base, seconds a token, share that is not hidden)"""
    seen = [
        (life.place.prompt_tokens, life.over.transfer_ms, life.over.exposed_ms or 0.0)
        for life in log.lives.values()
        if life.over is not None and life.over.transfer_ms
    ]
    if len(seen) < ENOUGH:
        return 0.0, 0.0, 0.0
    base, token = _least([[1.0, n] for n, _, _ in seen], [ms / 1e3 for _, ms, _ in seen])
    return base, token, sum(ms for _, _, ms in seen) / sum(ms for _, ms, _ in seen)


def _least(rows: list[list[float]], values: list[float], weights: list[float] | None = None):
    """Factors >= 0 that minimise the weighted squares."""
    root = np.sqrt(np.array(weights if weights is not None else [1.0] * len(rows)))
    matrix = np.array(rows, dtype=float)
    scale = np.maximum(matrix.max(axis=0), 1e-12)
    found, _ = nnls(matrix / scale * root[:, None], np.array(values) * root)
    return [float(value) for value in found / scale]


# ---- the run -------------------------------------------------------------------------------------


def _run(log: Log, threads: int) -> Run:
    config = log.head.config
    roles = [card.role or card.pool for card in log.cards.values()]
    prefill, decode = roles.count("prefill"), roles.count("decode")
    mixed = roles.count("mixed")
    if config.disaggregate == "never" and not prefill:
        decode, mixed = 0, mixed + decode
    split = "".join(f"{n}{kind}" for n, kind in ((prefill, "P"), (decode, "D"), (mixed, "M")) if n)
    lives = sorted(log.lives.values(), key=lambda life: life.asked)
    places = [life.place for life in lives]
    ttft = next((place.ttft_s for place in places if place.ttft_s), config.ttft_s)
    itl = next((place.itl_s for place in places if place.itl_s), config.itl_s)
    ids: dict[bytes, int] = {}
    return Run(
        split=split,
        slo=f"ttft={ttft * 1e3:g}ms,itl={itl * 1e3:g}ms",
        requests=[_seen(life, ttft, itl, ids) for life in lives],
        threads=threads,
        router=config,
    )


def _seen(life: Life, ttft_s: float, itl_s: float, ids: dict[bytes, int]) -> Seen:
    place, over = life.place, life.over
    output = over.tokens if over is not None and life.served else place.max_tokens
    ttft = (over.ttft_ms or 0.0) / 1e3 if over is not None else 0.0
    tpot = (life.ended - life.first) / (output - 1) if life.served and output > 1 else 0.0
    tail = (over.itl_p99_ms or 0.0) / 1e3 if over is not None else 0.0
    late = output - 1 >= GAPS_FOR_P99 and tail > itl_s
    return Seen(
        at=life.asked,
        prompt=place.prompt_tokens,
        output=max(1, output),
        ttft=ttft,
        tpot=tpot,
        met=life.served and ttft <= ttft_s and tpot <= itl_s and not late,
        blocks=_blocks(place.hashes[: place.prompt_tokens // HASH_TOKENS], ids),
        most=place.max_tokens,
    )


def _blocks(hashes: list[bytes], ids: dict[bytes, int]) -> tuple[int, ...]:
    """Numbers for the hashes; one that was not sent is known by the next one that was."""
    found: list[int] = []
    after = b""
    for position in range(len(hashes) - 1, -1, -1):
        after = hashes[position] or after
        name = hashes[position] or after + position.to_bytes(4, "little")
        found.append(ids.setdefault(name, len(ids)))
    return tuple(reversed(found))
