"""Which cell serves a request, in a fleet that is too large for one router (pure).

A cell is a part of the fleet with a router and a queue of its own. The splitter stands before the
cells. It knows little of each: what the cell last reported of itself (`CellReport`), and what it
was sent lately. A request goes to the cell with the least sum of three times in seconds:

    prefill  of what the cell was not sent before
    + lead   of prompts of about this length that it was sent lately, for each of its workers
    + delay  by which an answer ends later there than `BOUND` times the mean of all cells

So a conversation stays in the cell that has its prefix, until that cell has got more than its share
by as much as the prefix saves. A new one goes where least was sent. Each length is shared out by
itself: if only the sum of all were, one cell would get few long prompts and another many short
ones, which wait in vain behind each other.

This is consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, "Consistent
Hashing with Bounded Loads", 2018), with what is known of prefixes in place of the hash and with
prices in place of a bound that is all or nothing.

Of a prompt the splitter keeps few hashes: those of its first 1, 2, 4, 8, ... blocks. It takes a
shared prefix for the longest of these that both prompts have, half of the true one at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean as mean

from ..protos.frames import Coefficients
from .core import Router
from .index import BLOCK_TOKENS, PrefixIndex

#: Seconds for which a cell is believed to have the prefix of a prompt that was sent there. Nobody
#: says when it is evicted.
PREFIX_TTL_S = 600.0
LENGTH_CLASSES = 25  #: the last one is of prompts of 2^23 tokens and more
LEAD_HALF_LIFE_S = 20.0  #: in which half of what a cell was sent is forgotten
FADE_EVERY_S = 0.5
#: An answer may end so many times later in a cell than in the mean cell before that has a price.
#: Less, and the noise of the reports would be paid for.
BOUND = 1.25
HASHES_MAX = 4_000_000  #: that are kept of all cells together; each takes about 200 bytes


@dataclass(frozen=True, slots=True)
class CellReport:
    """What a cell says of itself: sums and means over its workers. Times are in seconds."""

    prefill_workers: int  #: that compute prompts, 1 at least
    decode_workers: int  #: that take answers, 1 at least
    #: Of urgent prefill, by prediction: what its workers have left of it, and its queue. What is
    #: overdue there keeps no newcomer waiting.
    backlog_s: float
    step_s: float  #: a decode step with one more answer, on average; a fuller KV pool counts too
    row_step_s: float  #: by how much one more answer lengthens a step of its worker, on average
    answer_tokens: float  #: of the mean answer, as expected
    cost: Coefficients  #: speed of one of its workers that compute prompts


class SplitCell:
    """A cell as the splitter knows it."""

    def __init__(self) -> None:
        self.report: CellReport | None = None  #: the last one; None: nothing is served there
        self.sent_s = 0.0  #: seconds of prefill that were sent there since the report
        self.sent_requests = 0  #: since the report
        #: By the length of the prompt (`length_class`): seconds of prefill that were sent there
        #: lately for each worker that computes prompts. What was sent a while ago counts less.
        self.lead_s = [0.0] * LENGTH_CLASSES

    def ends_in_s(self, answer_tokens: float) -> float:
        """Return the predicted seconds of a request with such an answer, without its prefill.

        They are infinite where nothing is served.
        """
        report = self.report
        if report is None:
            return inf
        wait_s = (report.backlog_s + self.sent_s) / report.prefill_workers
        rows = self.sent_requests / report.decode_workers
        return wait_s + answer_tokens * (report.step_s + report.row_step_s * rows)

    def prefill_s(self, held_tokens: int, prompt_tokens: int) -> float:
        """Return the seconds in which a worker computes a prompt behind what is held of it."""
        assert self.report is not None, "only a cell that serves takes requests"
        # The last token of a prompt is always computed.
        uncached_tokens = max(1, prompt_tokens - held_tokens)
        return self.report.cost.prefill_s(uncached_tokens, prompt_tokens)

    def note_sent(self, prefill_s: float, length: int) -> None:
        """Count a request that is sent there, with the seconds of its prefill and its length."""
        self.sent_s += prefill_s
        self.sent_requests += 1
        if self.report is not None:
            self.lead_s[length] += prefill_s / self.report.prefill_workers


class CellSplitter:
    """Chooses a cell for each request. Cells are numbers from 0 on.

    Moments are seconds of one clock, which the caller reads (`now`).
    """

    def __init__(
        self, cells: int, prefix_ttl_s: float = PREFIX_TTL_S, hashes_max: int = HASHES_MAX
    ) -> None:
        self._cells = [SplitCell() for _ in range(cells)]
        self._answer_tokens = 0.0  #: of the mean answer, over all cells
        self._index = PrefixIndex(max(1, hashes_max // cells), prefix_ttl_s)
        self._faded_at = 0.0  #: when the leads last faded

    def report(self, cell: int, report: CellReport | None) -> None:
        """Take in what a cell says of itself: what was sent there before counts in it.

        None: it serves nothing, for want of workers.
        """
        known = self._cells[cell]
        known.report = report
        known.sent_s = 0.0
        known.sent_requests = 0
        # One mean for all: by its own, a cell that got short answers would seem fast.
        reports = [each.report for each in self._cells if each.report is not None]
        self._answer_tokens = mean([each.answer_tokens for each in reports] or [0.0])

    def choose(self, prompt_hashes: Sequence[bytes], prompt_tokens: int, now: float) -> int:
        """Return the cell that serves the request; `prompt_hashes` are of its 64-token blocks.

        Where no cell serves anything it is the first one, whose router keeps or refuses it.
        """
        self._fade_leads(now)
        self._index.expire(now)
        marks = doubling_hashes(prompt_hashes)
        hits = self._index.find(marks)
        length = length_class(prompt_tokens)
        ends_s = [cell.ends_in_s(self._answer_tokens) for cell in self._cells]
        limit_s = BOUND * mean([end_s for end_s in ends_s if end_s < inf] or [0.0])
        best = 0
        best_s = inf
        best_prefill_s = 0.0
        for number, cell in enumerate(self._cells):
            if ends_s[number] == inf:
                continue
            prefill_s = cell.prefill_s(tokens_at_mark(hits.depth(number)), prompt_tokens)
            delay_s = max(0.0, ends_s[number] - limit_s)
            price_s = prefill_s + cell.lead_s[length] + delay_s
            if price_s < best_s:
                best = number
                best_s = price_s
                best_prefill_s = prefill_s
        self._cells[best].note_sent(best_prefill_s, length)
        self._index.predict(best, marks, now)
        return best

    def _fade_leads(self, now: float) -> None:
        """Halve the leads for each `LEAD_HALF_LIFE_S` that has passed."""
        passed_s = now - self._faded_at
        if passed_s < FADE_EVERY_S:
            return
        self._faded_at = now
        kept_share = 0.5 ** (passed_s / LEAD_HALF_LIFE_S)
        for cell in self._cells:
            cell.lead_s = [seconds * kept_share for seconds in cell.lead_s]


def length_class(prompt_tokens: int) -> int:
    """Return a number for all lengths of prompts between two powers of two."""
    return min(prompt_tokens.bit_length(), LENGTH_CLASSES - 1)


def doubling_hashes(prompt_hashes: Sequence[bytes]) -> list[bytes]:
    """Return the hashes of a prompt's first 1, 2, 4, 8, ... blocks: the prefixes that are kept."""
    marks: list[bytes] = []
    blocks = 1
    while blocks <= len(prompt_hashes):
        marks.append(prompt_hashes[blocks - 1])
        blocks *= 2
    return marks


def tokens_at_mark(depth: int) -> int:
    """Return the tokens of the prefix that the first `depth` of `doubling_hashes` name."""
    return BLOCK_TOKENS << (depth - 1) if depth else 0


def report_of(router: Router, now: float) -> CellReport | None:
    """Return what a cell with this router says of itself; None: it has no worker."""
    decode_workers = [worker for worker in router.workers.values() if worker.can_decode]
    prefill_workers = [worker for worker in router.workers.values() if worker.can_prefill]
    if router.placer.local_only:
        prefill_workers = decode_workers
    if not prefill_workers or not decode_workers:
        return None
    queue = router.queue
    backlog_s = queue.prefill_s
    backlog_s += sum(max(0.0, worker.urgent_until - now) for worker in prefill_workers)
    demand = router.demand.offered_load(now)
    # The tokens whose KV a step reads for one answer, on average.
    read_tokens = demand.context / demand.output if demand.output else 0.0
    row_s = [worker.step_with(read_tokens) - worker.step_s for worker in decode_workers]
    return CellReport(
        prefill_workers=len(prefill_workers),
        decode_workers=len(decode_workers),
        backlog_s=backlog_s,
        step_s=mean([worker.decode_cost_s for worker in decode_workers]),
        row_step_s=mean(row_s),
        answer_tokens=demand.output,
        cost=prefill_workers[0].cost,
    )
