"""Which cell serves a request, in a fleet that is too large for one router.

A cell is a part of the fleet with a router and a queue of its own. `CellSplitter` stands before the
cells. It has neither clock nor socket: callers give it the time, what cells report of themselves
(`CellReport`), and the requests. Each request goes to the cell with the lowest price, in seconds:

    price  = prefill + sent + delay of the queue + delay of the answer
    prefill: of the part of the prompt that the cell was not sent before
    sent   : prefill that the cell was sent lately for prompts of about this length, divided by its
             workers for prefill; half of it is forgotten in `SENT_HALF_LIFE_S`
    delay  : max(0, the time there - `BOUND` x the mean time of all cells), of the wait in the queue
             and of the mean answer's steps

What was sent is the largest term where the load is even: a new conversation goes to the cell that
was sent least. The half-life says how much of an uneven past is made up for.
A later turn of a conversation costs less prefill where its prefix is. It stays there as long as the
cell was not sent more than another by as much as that prefix saves.

The sum over all lengths would not do. Cells of equal sums came to have few long prompts here and
many short ones there; where the short ones were many, they missed their targets, and the long ones
elsewhere had time to spare.

The bound is that of consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam,
"Consistent Hashing with Bounded Loads", 2018): a cell may be somewhat behind the mean before
requests leave it. Nothing else of that is here; nothing is hashed to a cell.

Of a prompt the splitter keeps few prefixes: those of 1, 2, 4, 8, ... blocks (*marks*). So it takes
the common prefix of two prompts for half as long as it is, at worst.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean as mean

from ..protos.frames import Coefficients
from .core import Router
from .fleet import TYPICAL_PROMPT_TOKENS, TYPICAL_UNCACHED_TOKENS
from .index import BLOCK_TOKENS, PrefixIndex
from .worker_state import WorkerState

LENGTH_CLASSES = 25  #: the last one is of prompts of 2^23 tokens and more
SENT_HALF_LIFE_S = 20.0  #: in which half of the prefill that a cell was sent is forgotten
FORGET_EVERY_S = 0.5  #: how often that is worked out, to save time
#: Times the mean over cells: as long as a queue, or an answer, takes no more, there is no price on
#: it. With a smaller bound requests would follow the noise of the reports.
BOUND = 1.25
#: Seconds for which a cell is believed to have the prefix of a prompt that was sent there. Nobody
#: says when it is evicted. Each request of this time takes memory, beside the marks.
PREFIX_TTL_S = 300.0
#: Marks that are kept, of all cells together; one that two cells have counts twice.
MARKS_MAX = 4_000_000


@dataclass(frozen=True, slots=True)
class CellReport:
    """What a cell says of itself. Times are in seconds. A mixed worker counts for both phases."""

    prefill_workers: int  #: how many compute prompts, 1 at least
    decode_workers: int  #: how many take answers, 1 at least
    #: Sum of the prefill that its workers and its queue have left of urgent requests, by
    #: prediction. Requests that can no longer be in time are not in it under a policy that lets
    #: urgent ones pass them.
    backlog_s: float
    #: What the router counts for a decode step with one more answer, on average over the workers:
    #: the step itself, and a price on KV pools that are nearly full.
    step_s: float
    answer_step_s: float  #: by how much one more answer lengthens a step of its worker, on average
    answer_tokens: float  #: mean length of an answer, as the cell's router expects it
    cost: Coefficients  #: speed of a worker that computes prompts; of several, a middling one


class SplitCell:
    """A cell as the splitter knows it."""

    def __init__(self) -> None:
        self.report: CellReport | None = None  #: the last one; None: nothing is served there
        self.unreported_s = 0.0  #: seconds of prefill that were sent there since the report
        self.unreported_requests = 0  #: that were sent there since the report
        #: By `length_class` of the prompt: seconds of prefill that were sent there lately, divided
        #: by the workers for prefill that it had then.
        self.sent_s = [0.0] * LENGTH_CLASSES

    def queue_s(self, report: CellReport) -> float:
        """Return the wait for a prefill there, as if all its workers shared the work evenly.

        What was worked off since the report is not taken away: it is the same in all cells.
        """
        return (report.backlog_s + self.unreported_s) / report.prefill_workers

    def answer_s(self, report: CellReport, answer_tokens: float) -> float:
        """Return the seconds of the steps of an answer of so many tokens there."""
        answers_more = self.unreported_requests / report.decode_workers
        return answer_tokens * (report.step_s + report.answer_step_s * answers_more)

    def note_sent(self, report: CellReport, prefill_s: float, class_of_length: int) -> None:
        """Count a request that is sent there, with the seconds of its prefill."""
        self.unreported_s += prefill_s
        self.unreported_requests += 1
        self.sent_s[class_of_length] += prefill_s / report.prefill_workers


class CellSplitter:
    """Chooses a cell for each request. Cells are numbers from 0 on.

    Moments are seconds of one clock, which the caller reads (`now`).
    """

    def __init__(
        self, cells: int, prefix_ttl_s: float = PREFIX_TTL_S, marks_max: int = MARKS_MAX
    ) -> None:
        self._cells = [SplitCell() for _ in range(cells)]
        self._answer_tokens = 0.0  #: mean of what the serving cells expect of an answer
        #: which cell was sent which marks; its "workers" are the cells
        self._index = PrefixIndex(max(1, marks_max // cells), prefix_ttl_s)
        self._forgot_at = 0.0  #: when a part of what was sent was last forgotten

    def report(self, cell: int, report: CellReport | None) -> None:
        """Take in what a cell says of itself.

        It replaces what the splitter has counted since the report before, so it must know of all
        requests that were sent there until now. None: the cell serves nothing, for want of workers.
        Its prefixes are lost then.
        """
        known = self._cells[cell]
        if report is None:
            self._index.drop(cell)
        elif known.report is None:
            known.sent_s = self._mean_sent_s()  # else all requests would go there, to catch up
        known.report = report
        known.unreported_s = 0.0
        known.unreported_requests = 0
        # One length for all: by its own, a cell that got short answers would seem fast.
        expected = [each.report.answer_tokens for each in self._cells if each.report is not None]
        expected = [tokens for tokens in expected if tokens]  # 0: nothing was asked there yet
        self._answer_tokens = mean(expected) if expected else 0.0

    def _mean_sent_s(self) -> list[float]:
        """Return the mean over the serving cells of what each was sent, by length class."""
        serving = [cell.sent_s for cell in self._cells if cell.report is not None]
        return (
            [mean(seconds) for seconds in zip(*serving, strict=True)]
            if serving
            else [0.0] * LENGTH_CLASSES
        )

    def choose(self, prompt_hashes: Sequence[bytes], prompt_tokens: int, now: float) -> int:
        """Return the cell that serves the request, and count the request as sent there.

        `prompt_hashes` has one for each full block of the prompt, of `BLOCK_TOKENS` tokens. They
        are chained: each names all blocks up to its own.
        Where no cell serves anything it is the first one, whose router keeps or refuses it.
        """
        self._forget_sent(now)
        self._index.expire(now)
        serving = [
            (number, cell, cell.report)
            for number, cell in enumerate(self._cells)
            if cell.report is not None
        ]
        if not serving:
            return 0
        queues_s = [cell.queue_s(report) for _, cell, report in serving]
        answers_s = [cell.answer_s(report, self._answer_tokens) for _, cell, report in serving]
        queue_limit_s = BOUND * mean(queues_s)
        answer_limit_s = BOUND * mean(answers_s)

        marks = marks_of(prompt_hashes)
        hits = self._index.find(marks)
        class_of_length = length_class(prompt_tokens)
        chosen = 0  #: of `serving`
        chosen_price_s = inf
        chosen_prefill_s = 0.0
        for place, (number, cell, report) in enumerate(serving):
            held_tokens = tokens_of_marks(hits.depth(number))
            # The last token of a prompt is always computed.
            uncached_tokens = max(1, prompt_tokens - held_tokens)
            prefill_s = report.cost.prefill_s(uncached_tokens, prompt_tokens)
            price_s = prefill_s + cell.sent_s[class_of_length]
            price_s += max(0.0, queues_s[place] - queue_limit_s)
            price_s += max(0.0, answers_s[place] - answer_limit_s)
            if price_s < chosen_price_s:
                chosen = place
                chosen_price_s = price_s
                chosen_prefill_s = prefill_s
        number, cell, report = serving[chosen]
        cell.note_sent(report, chosen_prefill_s, class_of_length)
        self._index.predict(number, marks, now)
        return number

    def _forget_sent(self, now: float) -> None:
        """Forget a part of what the cells were sent: half in `SENT_HALF_LIFE_S`, by exponential decay."""
        passed_s = now - self._forgot_at
        if passed_s < FORGET_EVERY_S:
            return
        self._forgot_at = now
        kept_share = 0.5 ** (passed_s / SENT_HALF_LIFE_S)
        for cell in self._cells:
            cell.sent_s = [seconds * kept_share for seconds in cell.sent_s]


def length_class(prompt_tokens: int) -> int:
    """Return k where 2^(k-1) <= `prompt_tokens` < 2^k; the last class has all longer prompts."""
    return min(prompt_tokens.bit_length(), LENGTH_CLASSES - 1)


def marks_of(prompt_hashes: Sequence[bytes]) -> list[bytes]:
    """Return the hashes that name a prompt's first 1, 2, 4, 8, ... blocks."""
    marks: list[bytes] = []
    blocks = 1
    while blocks <= len(prompt_hashes):
        marks.append(prompt_hashes[blocks - 1])
        blocks *= 2
    return marks


def tokens_of_marks(count: int) -> int:
    """Return the tokens of the longest prefix that the first `count` marks of a prompt name."""
    return BLOCK_TOKENS << (count - 1) if count else 0


def report_of(router: Router, now: float) -> CellReport | None:
    """Return what a cell with this router says of itself; None: it has no worker for a phase."""
    decode_workers = router.fleet.decode_workers
    prefill_workers = router.fleet.prefill_workers
    if router.placer.local_only:
        prefill_workers = decode_workers  # with no prefill worker up, they compute all prompts
    if not prefill_workers or not decode_workers:
        return None

    by_speed = sorted(prefill_workers, key=_corrected_prefill_s)
    middling_worker = by_speed[len(by_speed) // 2]
    # The mean request: `output` is the tokens of its answer, `context` the tokens whose KV all the
    # steps of that read together. So one step reads this many for it, on average.
    request = router.demand.offered_load(now)
    read_tokens = request.context / request.output if request.output else 0.0
    longer_steps_s = [worker.step_with(read_tokens) - worker.step_s for worker in decode_workers]
    return CellReport(
        prefill_workers=len(prefill_workers),
        decode_workers=len(decode_workers),
        backlog_s=sum(max(0.0, worker.urgent_until - now) for worker in prefill_workers)
        + _queued_s(router, _corrected_prefill_s(middling_worker)),
        step_s=mean([worker.decode_cost_s for worker in decode_workers]),
        answer_step_s=mean(longer_steps_s),
        answer_tokens=request.output,
        cost=middling_worker.cost,
    )


def _corrected_prefill_s(worker: WorkerState) -> float:
    """Return the seconds of a prompt like many, with all that was learned of the worker."""
    return worker.cost.prefill_s(TYPICAL_UNCACHED_TOKENS, TYPICAL_PROMPT_TOKENS)


def _queued_s(router: Router, typical_prefill_s: float) -> float:
    """Return the seconds of prefill of the requests that wait for a worker.

    Our policy has predicted each one, and keeps the sum of the urgent ones. Other policies predict
    none: each counts as a typical one.
    """
    queue = router.queue
    unpredicted = sum(not request.fastest_prefill_s for request in queue.by_key.values())
    return queue.prefill_s + unpredicted * typical_prefill_s
