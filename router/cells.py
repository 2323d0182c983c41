"""Which cell serves a request, in a fleet that is too large for one router.

A cell is a part of the fleet with a router and a queue of its own. `CellSplitter` stands before the
cells. It has neither clock nor socket: callers give it the time, what cells report of themselves
(`CellReport`), and the requests. Each request goes to the cell with the lowest price, in seconds:

    price  = prefill + sent + delay
    prefill: of the part of the prompt that the cell was not sent before
    sent   : prefill that the cell was sent lately for prompts of about this length, divided by its
             workers for prefill; half of it is forgotten in `SENT_HALF_LIFE_S`
    delay  : max(0, queue and answer there - `BOUND` x the mean over cells of queue and answer)

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
from .index import BLOCK_TOKENS, PrefixIndex

LENGTH_CLASSES = 25  #: the last one is of prompts of 2^23 tokens and more
SENT_HALF_LIFE_S = 20.0  #: in which half of the prefill that a cell was sent is forgotten
FORGET_EVERY_S = 0.5  #: how often that is worked out, to save time
#: Times the mean over cells: as long as queue and answer of a cell take no more, there is no price
#: on them. With a smaller bound requests would follow the noise of the reports.
BOUND = 1.25
#: Seconds for which a cell is believed to have the prefix of a prompt that was sent there. Nobody
#: says when it is evicted.
PREFIX_TTL_S = 600.0
#: Marks that are kept, of all cells together; one that two cells have counts twice. Each takes
#: about 200 bytes.
MARKS_MAX = 4_000_000


@dataclass(frozen=True, slots=True)
class CellReport:
    """What a cell says of itself. Times are in seconds. A mixed worker counts for both phases."""

    prefill_workers: int  #: how many compute prompts, 1 at least
    decode_workers: int  #: how many take answers, 1 at least
    #: Sum of the prefill that its workers and its queue have left of urgent requests, by
    #: prediction. Requests that can no longer be in time are not in it: urgent ones pass them.
    backlog_s: float
    #: What the router counts for a decode step with one more answer, on average over the workers:
    #: the step itself, and a price on KV pools that are nearly full.
    step_s: float
    answer_step_s: float  #: by how much one more answer lengthens a step of its worker, on average
    answer_tokens: float  #: mean length of an answer, as the cell's router expects it
    cost: Coefficients  #: speed of the first worker that computes prompts, for all of them


class SplitCell:
    """A cell as the splitter knows it."""

    def __init__(self) -> None:
        self.report: CellReport | None = None  #: the last one; None: nothing is served there
        self.unreported_s = 0.0  #: seconds of prefill that were sent there since the report
        self.unreported_requests = 0  #: that were sent there since the report
        #: By `length_class` of the prompt: seconds of prefill that were sent there lately, divided
        #: by the workers for prefill that it had then.
        self.sent_s = [0.0] * LENGTH_CLASSES

    def queue_and_answer_s(self, answer_tokens: float) -> float:
        """Return the seconds of a request of so many answer tokens there, but for its prefill.

        The queue is as of the last report, and is worked off by all workers alike. Where nothing
        is served the time is infinite.
        """
        report = self.report
        if report is None:
            return inf
        queue_s = (report.backlog_s + self.unreported_s) / report.prefill_workers
        answers_more = self.unreported_requests / report.decode_workers
        step_s = report.step_s + report.answer_step_s * answers_more
        return queue_s + answer_tokens * step_s

    def prefill_s(self, held_tokens: int, prompt_tokens: int) -> float:
        """Return the seconds of computing a prompt whose first `held_tokens` are cached there."""
        assert self.report is not None, "only a cell that serves takes requests"
        # The last token of a prompt is always computed.
        uncached_tokens = max(1, prompt_tokens - held_tokens)
        return self.report.cost.prefill_s(uncached_tokens, prompt_tokens)

    def note_sent(self, prefill_s: float, class_of_length: int) -> None:
        """Count a request that is sent there, with the seconds of its prefill."""
        self.unreported_s += prefill_s
        self.unreported_requests += 1
        if self.report is not None:
            self.sent_s[class_of_length] += prefill_s / self.report.prefill_workers


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
        """
        known = self._cells[cell]
        known.report = report
        known.unreported_s = 0.0
        known.unreported_requests = 0
        # One length for all: by its own, a cell that got short answers would seem fast.
        expected = [each.report.answer_tokens for each in self._cells if each.report is not None]
        expected = [tokens for tokens in expected if tokens]  # 0: nothing was asked there yet
        self._answer_tokens = mean(expected) if expected else 0.0

    def choose(self, prompt_hashes: Sequence[bytes], prompt_tokens: int, now: float) -> int:
        """Return the cell that serves the request, and count the request as sent there.

        `prompt_hashes` has one for each full block of the prompt, of `BLOCK_TOKENS` tokens. They
        are chained: each names all blocks up to its own.
        Where no cell serves anything it is the first one, whose router keeps or refuses it.
        """
        self._forget_sent(now)
        self._index.expire(now)
        marks = marks_of(prompt_hashes)
        hits = self._index.find(marks)
        class_of_length = length_class(prompt_tokens)
        times_s = [cell.queue_and_answer_s(self._answer_tokens) for cell in self._cells]
        serving_times_s = [time_s for time_s in times_s if time_s < inf]
        if not serving_times_s:
            return 0
        limit_s = BOUND * mean(serving_times_s)
        chosen = 0
        chosen_price_s = inf
        chosen_prefill_s = 0.0
        for number, cell in enumerate(self._cells):
            if times_s[number] == inf:
                continue
            held_tokens = tokens_of_marks(hits.depth(number))
            prefill_s = cell.prefill_s(held_tokens, prompt_tokens)
            delay_s = max(0.0, times_s[number] - limit_s)
            price_s = prefill_s + cell.sent_s[class_of_length] + delay_s
            if price_s < chosen_price_s:
                chosen = number
                chosen_price_s = price_s
                chosen_prefill_s = prefill_s
        self._cells[chosen].note_sent(chosen_prefill_s, class_of_length)
        self._index.predict(chosen, marks, now)
        return chosen

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
    """Return what a cell with this router says of itself; None: it cannot serve a request."""
    decode_workers = [worker for worker in router.workers.values() if worker.can_decode]
    prefill_workers = [worker for worker in router.workers.values() if worker.can_prefill]
    if router.placer.local_only:
        prefill_workers = decode_workers  # with no prefill worker up, they compute all prompts
    if not prefill_workers or not decode_workers:
        return None

    # `queue.prefill_s` has urgent requests only, as `urgent_until` has.
    backlog_s = router.queue.prefill_s
    backlog_s += sum(max(0.0, worker.urgent_until - now) for worker in prefill_workers)

    # The mean request: `output` is the tokens of its answer, `context` the tokens whose KV all the
    # steps of that read together. So one step reads this many for it, on average.
    request = router.demand.offered_load(now)
    read_tokens = request.context / request.output if request.output else 0.0
    longer_steps_s = [worker.step_with(read_tokens) - worker.step_s for worker in decode_workers]
    return CellReport(
        prefill_workers=len(prefill_workers),
        decode_workers=len(decode_workers),
        backlog_s=backlog_s,
        step_s=mean([worker.decode_cost_s for worker in decode_workers]),
        answer_step_s=mean(longer_steps_s),
        answer_tokens=request.output,
        cost=prefill_workers[0].cost,
    )
