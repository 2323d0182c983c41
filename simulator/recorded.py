"""Fits the costs of live workers to a router's log, and takes the recorded run out of it.

    prefill(u)   From the prompts that no other prompt overlapped: the seconds from arrival to first
                 token over their lengths. Arrival to first token holds more than the prefill, so
                 both factors are scaled to the mean seconds a token that prefill workers report.
                 With too few such prompts, the reports alone give the seconds a token.
    step(B, K)   From two reports in a row with about as many running sequences: seconds a step over
                 B rows (sequences that decode) that read K tokens of KV.
    transfer(t)  From what the decode workers measured of each transfer of t tokens.

The lines are fitted by `least_squares.py`. The fits take means, not bests, so what disturbed
the machine is in them. A recorded request is met by the rule of `router/goodput.py`.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import msgspec

from ..protos.frames import (
    AttemptOutcome,
    Coefficients,
    PlaceAttempt,
    RequestOutcome,
    WorkerCard,
    WorkerReport,
)
from ..protos.targets import TtftTarget
from ..router import RouterConfig
from ..router.goodput import judge
from ..router.replay import LogError
from .calibration import Calibration, MeasuredWorker, RecordedRequest, RecordedRun
from .errors import SimulationError
from .fleet import Split
from .least_squares import FittedLine, fit_factors, fit_line
from .metrics import Slo
from .router_log import LoggedRequest, RouterLog
from .trace import HASH_TOKENS

LOG_NAMES = ("router.old.jsonl", "router.jsonl")  #: in a log's folder, the older file first
LOG_START = b'{"at":'  #: how a router's log begins, and no calibration in JSON
CPU_MACHINE = re.compile(r"cpu-([1-9]\d*)t")  #: what the card of a CPU worker calls its machine
#: Fewer samples say more of chance than of the worker.
LONE_PROMPTS_MINIMUM = 12  #: with fewer of them, the prefill comes from reports alone
#: Under load only short prompts are alone. A line through them says little of long ones, so they
#: must have this share of the mean length of all prompts; else the prefill comes from reports alone.
LONE_LENGTH_SHARE = 0.5
TRANSFERS_MINIMUM = 12  #: with fewer of them, transfers count as free
#: Decoding is steady while so much of the sequences come or go between two reports, or a single one.
STEADY_CHANGE = 0.1
STEADY_REPORTS_MINIMUM = 8  #: with fewer of them, the step is not fitted


# ---- reading -------------------------------------------------------------------------------------


def read_calibration(path: Path) -> Calibration:
    """Read a router's log, a folder of it, or a calibration in JSON.

    With a log, the cores are those of this machine that this process may use, which may not be the
    cluster's. Raises SimulationError if the file cannot be read, or does not tell enough.
    """
    try:
        content = _read_log_folder(path) if path.is_dir() else path.read_bytes()
        if not content.startswith(LOG_START):
            return msgspec.json.decode(content, type=Calibration)
    except (OSError, msgspec.DecodeError) as error:
        raise SimulationError(f"calibration {path}: {error}") from None
    return calibrate_from_log(content.splitlines(), cores=len(os.sched_getaffinity(0)))


def _read_log_folder(folder: Path) -> bytes:
    paths = [folder / name for name in LOG_NAMES]
    return b"".join(path.read_bytes() for path in paths if path.exists())


def calibrate_from_log(lines: Iterable[bytes], cores: int) -> Calibration:
    """Return what a router's log tells of its workers, and its run.

    `cores` are the machine's. Raises SimulationError if the lines are no router's log, if the
    workers differ in kind or are no CPU workers, or if the log tells too little.
    """
    try:
        log = RouterLog.of(lines)
    except LogError as error:
        raise SimulationError(f"router's log: {error}") from None
    kinds = {(card.gpu, card.blocks, card.chunk_tokens) for card in log.cards.values()}
    if len(kinds) != 1:
        raise SimulationError(f"router's log: expected workers of one kind, found {len(kinds)}")

    card = next(iter(log.cards.values()))
    threads = _thread_count(card)
    cost = fit_coefficients(log)
    worker = MeasuredWorker(
        cost=cost,
        kv_tokens=card.blocks * card.block_tokens,
        threads=threads,
        chunk_tokens=card.chunk_tokens,
        max_running=card.max_running,
        itl_budget_ms=card.step_ms or None,
        planned_share=_planned_share(log, card.step_ms),
        cost_on_card=card.cost is not None,
        at_bounds=_at_bounds(cost),
    )
    return Calibration(
        model="recorded", workers=[worker], cores=cores, run=_recorded_run(log, threads, cost)
    )


def _thread_count(card: WorkerCard) -> int:
    """Return the threads of a CPU worker; its card calls the machine `cpu-<threads>t`.

    Raises SimulationError for a worker on a GPU.
    """
    machine = CPU_MACHINE.fullmatch(card.gpu)
    if not machine:
        raise SimulationError(
            f"router's log: its workers run on {card.gpu or 'an unknown machine'}; "
            "only those of CPU workers can be read"
        )
    return int(machine[1])


def _planned_share(log: RouterLog, budget_ms: float) -> float:
    """Return the mean step that decoding workers planned for, as a share of their budget.

    1: the reports do not say, or there is no budget.
    """
    planned_ms = [
        report.step_ms
        for report in itertools.chain(*log.reports.values())
        if report.running and report.step_ms
    ]
    if not planned_ms or not budget_ms:
        return 1.0
    return sum(planned_ms) / len(planned_ms) / budget_ms


# ---- the fits ------------------------------------------------------------------------------------


class StepFit(NamedTuple):
    """Seconds of a step: of each, of each row, and of each KV token that is read."""

    base: float
    row: float
    kv_token: float


class TransferFit(NamedTuple):
    """Seconds of a transfer by its tokens, and the share of it that a prefill does not hide."""

    line: FittedLine
    exposed_share: float


def fit_coefficients(log: RouterLog) -> Coefficients:
    """Return the closed form of the log's workers.

    Raises SimulationError if no worker reports a prefill, or too few steady steps are reported.
    """
    prefill = _fit_prefill(log)
    step = _fit_step(log)
    transfer = _fit_transfer(log)
    return Coefficients(
        prefill_base=prefill.base,
        prefill_token=prefill.slope,
        prefill_pair=0.0,
        step_base=step.base,
        step_row=step.row,
        step_weights=0.0,
        step_token=step.kv_token,
        transfer_base=transfer.line.base,
        transfer_token=transfer.line.slope,
        exposed_share=transfer.exposed_share,
    )


def _at_bounds(cost: Coefficients) -> tuple[str, ...]:
    """Return the fitted coefficients that are 0, which is the limit of their fits.

    `prefill_pair` and `step_weights` are not fitted. Where no transfer was fitted, none is named.
    """
    values = msgspec.structs.asdict(cost)
    names = ["prefill_base", "prefill_token", "step_base", "step_row", "step_token"]
    if cost.transfer_base or cost.transfer_token:
        names += ["transfer_base", "transfer_token"]
    return tuple(f"{name} 0" for name in names if values[name] == 0)


def _fit_prefill(log: RouterLog) -> FittedLine:
    prefill_workers = [
        name for name, card in log.cards.items() if (card.role or card.pool) == "prefill"
    ]
    reported_token_s = _reported_token_s(log, prefill_workers)
    line = _fit_lone_prompts(log, reported_token_s)
    if line is not None:
        return line
    token_s = reported_token_s or _reported_token_s(log, log.reports)
    if not token_s:
        raise SimulationError("router's log: no worker reports a prefill")
    return FittedLine(base=0.0, slope=token_s)


def _fit_lone_prompts(log: RouterLog, reported_token_s: float) -> FittedLine | None:
    """Return the prefill by what lone prompts took; None: too few are there to tell.

    What prefill workers report limits the mean seconds a token, if they report anything;
    `reported_token_s` is 0 if not.
    """
    lone_requests = _lone_requests(log)
    if len(lone_requests) < LONE_PROMPTS_MINIMUM:
        return None
    prompt_tokens = [request.place.prompt_tokens for request in lone_requests]
    all_tokens = [request.place.prompt_tokens for request in log.served_requests()]
    if mean(prompt_tokens) < LONE_LENGTH_SHARE * mean(all_tokens):
        return None
    seconds = [request.first_token_at - request.arrived_at for request in lone_requests]
    line = fit_line(prompt_tokens, seconds)
    if line.slope <= 0:
        return None
    # Over all these prompts, seconds by tokens: from arrival to first token, so too many.
    mean_token_s = line.slope + line.base / (sum(prompt_tokens) / len(prompt_tokens))
    prefill_share = min(reported_token_s / mean_token_s, 1.0) if reported_token_s else 1.0
    return FittedLine(base=line.base * prefill_share, slope=line.slope * prefill_share)


def _reported_token_s(log: RouterLog, workers: Iterable[str]) -> float:
    """Return the seconds of a prefilled token that these workers report; 0: they report none.

    Decode rows that ran in the same steps are in these seconds.
    """
    reports = [report for name in workers for report in log.reports.get(name, [])]
    tokens = sum(report.prefill_tokens for report in reports)
    return sum(report.prefill_seconds for report in reports) / tokens if tokens else 0.0


def _lone_requests(log: RouterLog) -> list[LoggedRequest]:
    """Return the served requests whose prompt was the only one, until its first token.

    Where workers are mixed, no other request may have been decoding either.
    """
    served = log.served_requests()
    mixed = log.head.config.disaggregate == "never"

    def overlap(request: LoggedRequest, other: LoggedRequest) -> bool:
        other_ends_at = other.ended_at if mixed else other.first_token_at
        return other.arrived_at < request.first_token_at and other_ends_at > request.arrived_at

    return [
        request
        for request in served
        if not any(other is not request and overlap(request, other) for other in served)
    ]


def _fit_step(log: RouterLog) -> StepFit:
    rows: list[list[float]] = []
    step_seconds: list[float] = []
    step_counts: list[float] = []
    for reports in log.reports.values():
        for previous_report, report in itertools.pairwise(reports):
            if not _decodes_steadily(previous_report, report):
                continue
            mean_kv_tokens = (previous_report.kv_tokens + report.kv_tokens) / 2
            mean_running = (previous_report.running + report.running) / 2
            rows.append([1.0, mean_running, mean_kv_tokens])
            step_seconds.append(report.step_seconds / report.steps)
            step_counts.append(report.steps)
    if len(rows) < STEADY_REPORTS_MINIMUM:
        raise SimulationError(f"router's log: {len(rows)} reports of steady decoding are too few")
    base, row, kv_token = fit_factors(rows, step_seconds, weights=step_counts)
    return StepFit(base, row, kv_token)


def _decodes_steadily(previous_report: WorkerReport, report: WorkerReport) -> bool:
    """Return whether the worker made steps between the reports, at an even number of sequences."""
    fewer_running = min(previous_report.running, report.running)
    difference = abs(previous_report.running - report.running)
    return (
        report.steps > 0
        and fewer_running > 0
        and difference <= max(1, fewer_running * STEADY_CHANGE)
    )


def _fit_transfer(log: RouterLog) -> TransferFit:
    tokens: list[float] = []
    transfer_ms: list[float] = []
    exposed_ms: list[float] = []
    for request in log.requests.values():
        if request.outcome is not None and request.outcome.transfer_ms:
            tokens.append(request.place.prompt_tokens)
            transfer_ms.append(request.outcome.transfer_ms)
            exposed_ms.append(request.outcome.exposed_ms or 0.0)
    if len(tokens) < TRANSFERS_MINIMUM:
        return TransferFit(FittedLine(base=0.0, slope=0.0), exposed_share=0.0)
    line = fit_line(tokens, [duration_ms / 1e3 for duration_ms in transfer_ms])
    return TransferFit(line, exposed_share=sum(exposed_ms) / sum(transfer_ms))


# ---- the run -------------------------------------------------------------------------------------


def _recorded_run(log: RouterLog, threads: int, cost: Coefficients) -> RecordedRun:
    config = log.head.config
    requests = sorted(log.requests.values(), key=lambda request: request.arrived_at)
    slo = _slo(config, [request.place for request in requests], cost)
    block_names: dict[bytes, int] = {}
    return RecordedRun(
        split=str(_split(log)),
        slo=str(slo),
        requests=[_recorded_request(request, slo, block_names) for request in requests],
        threads=threads,
        router=config,
    )


def _slo(config: RouterConfig, places: Sequence[PlaceAttempt], cost: Coefficients) -> Slo:
    """Return the targets of a run.

    A run has one pair of them: the first that a request names, else the configured ones. Isolated
    prefills are as long as the workers' fitted cost says, in the simulation too.
    """
    ttft = config.ttft_target
    for place in places:
        if place.ttft:
            ttft = TtftTarget.parse(place.ttft)
            break
        if place.ttft_s:
            ttft = TtftTarget.flat(place.ttft_s)
            break
    itl_targets = (place.itl_s for place in places if place.itl_s)
    return Slo(ttft, next(itl_targets, config.itl_s), (cost,))


def _split(log: RouterLog) -> Split:
    """Return the most workers that lived at once, by role.

    A worker that took the place of a lost one does not count beside it. Decode workers that compute
    all prompts themselves are mixed.
    """
    roles = [card.role or card.pool for card in log.most_living]
    split = Split(
        prefill=roles.count("prefill"), decode=roles.count("decode"), mixed=roles.count("mixed")
    )
    if log.head.config.disaggregate == "never" and not split.prefill:
        return Split(mixed=split.mixed + split.decode)
    return split


def _recorded_request(
    request: LoggedRequest, slo: Slo, block_names: dict[bytes, int]
) -> RecordedRequest:
    """Return one request of the run, judged by these targets.

    Of a request that was not served, the client's limit counts as the length of its answer.
    """
    place = request.place
    outcome = request.outcome or AttemptOutcome(place.attempt_key)
    output_tokens = outcome.tokens if request.served else place.max_tokens
    ttft_s = (outcome.ttft_ms or 0.0) / 1e3
    gaps = output_tokens - 1
    mean_gap_s = 0.0
    if request.served and gaps > 0:
        # The client's first token may have been held back (`router/first_token.py`).
        mean_gap_s = (request.ended_at - request.arrived_at - ttft_s) / gaps
    judged = RequestOutcome(
        tenant=place.tenant,
        slo_class=place.slo_class,
        reason=outcome.reason,
        waited_s=ttft_s,
        gaps=gaps,
        itl_mean_s=mean_gap_s,
        itl_p99_s=(outcome.itl_p99_ms or 0.0) / 1e3,
    )
    ttft_target_s = slo.ttft_target_s(place.prompt_tokens)
    return RecordedRequest(
        arrived_at=request.arrived_at,
        prompt_tokens=place.prompt_tokens,
        output_tokens=max(1, output_tokens),
        ttft_s=ttft_s,
        tpot_s=mean_gap_s,
        met=request.served and judge(judged, ttft_target_s, slo.itl_s) == "both",
        blocks=_number_blocks(place.hashes[: place.prompt_tokens // HASH_TOKENS], block_names),
        max_tokens=place.max_tokens,
    )


def _number_blocks(hashes: list[bytes], block_names: dict[bytes, int]) -> tuple[int, ...]:
    """Return a number for each hash; equal prefixes get equal numbers in all requests.

    The gateway sends only some hashes, and an empty one for each of the others. As hashes are
    chained, the next hash that was sent identifies an unsent one together with its position.
    """
    numbers: list[int] = []
    next_sent_hash = b""
    for position in range(len(hashes) - 1, -1, -1):
        name = hashes[position]
        if name:
            next_sent_hash = name
        else:
            name = next_sent_hash + position.to_bytes(4, "little")
        numbers.append(block_names.setdefault(name, len(block_names)))
    return tuple(reversed(numbers))
