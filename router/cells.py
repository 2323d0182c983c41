"""Which cell serves a request, in a fleet that is too large for one router (pure).

A cell is a part of the fleet with a router and a queue of its own. The splitter stands before the
cells. It knows little of each: what the cell last reported of itself (`CellReport`), what it was
sent since then, and which prompts went there.

A request goes where its answer would end first, by prediction:

    wait for the prefill + prefill of what the cell was not sent before + steps of the answer

So a conversation stays in the cell that has its prefix, unless the cell is behind the others by
more than that prefix saves; and a new one goes to the cell with the least work. This is consistent
hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded
Loads", 2018) with two changes: what is known of prefixes takes the place of the hash, and the bound
is a price in seconds.

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
HASHES_MAX = 4_000_000  #: that are kept of all cells together; each takes about 200 bytes


@dataclass(frozen=True, slots=True)
class CellReport:
    """What a cell says of itself: sums and means over its workers. Times are in seconds."""

    prefill_workers: int  #: that compute prompts, 1 at least
    decode_workers: int  #: that take answers, 1 at least
    backlog_s: float  #: of prefill, by prediction: what its workers have left, and its queue
    step_s: float  #: a decode step with one more answer, on average; a fuller KV pool counts too
    row_step_s: float  #: by how much one more answer lengthens a step of its worker, on average
    answer_tokens: float  #: of the mean answer, as expected
    cost: Coefficients  #: speed of one of its workers that compute prompts


@dataclass(slots=True)
class SplitCell:
    """A cell as the splitter knows it."""

    report: CellReport | None = None  #: the last one; None: nothing is served there
    sent_s: float = 0.0  #: seconds of prefill that were sent there since the report
    sent_requests: int = 0  #: since the report

    def base_s(self) -> float:
        """Return the predicted seconds of a request there, without its prefill.

        They are infinite where nothing is served.
        """
        report = self.report
        if report is None:
            return inf
        wait_s = (report.backlog_s + self.sent_s) / report.prefill_workers
        rows = self.sent_requests / report.decode_workers
        return wait_s + report.answer_tokens * (report.step_s + report.row_step_s * rows)

    def prefill_s(self, held_tokens: int, prompt_tokens: int) -> float:
        """Return the seconds in which a worker computes a prompt behind what is held of it."""
        assert self.report is not None, "only a cell that serves takes requests"
        # The last token of a prompt is always computed.
        uncached_tokens = max(1, prompt_tokens - held_tokens)
        return self.report.cost.prefill_s(uncached_tokens, prompt_tokens)


class CellSplitter:
    """Chooses a cell for each request. Cells are numbers from 0 on.

    Moments are seconds of one clock, which the caller reads (`now`).
    """

    def __init__(
        self, cells: int, prefix_ttl_s: float = PREFIX_TTL_S, hashes_max: int = HASHES_MAX
    ) -> None:
        self._cells = [SplitCell() for _ in range(cells)]
        self._index = PrefixIndex(max(1, hashes_max // cells), prefix_ttl_s)

    def report(self, cell: int, report: CellReport | None) -> None:
        """Take in what a cell says of itself: everything that was sent there before counts in it.

        None: it serves nothing, for want of workers.
        """
        known = self._cells[cell]
        known.report = report
        known.sent_s = 0.0
        known.sent_requests = 0

    def choose(self, prompt_hashes: Sequence[bytes], prompt_tokens: int, now: float) -> int:
        """Return the cell that serves the request; `prompt_hashes` are of its 64-token blocks.

        Where no cell serves anything it is the first one, whose router keeps or refuses it.
        """
        index = self._index
        index.expire(now)
        marks = doubling_hashes(prompt_hashes)
        hits = index.find(marks)
        best = 0
        best_s = inf
        best_prefill_s = 0.0
        for number, cell in enumerate(self._cells):
            base_s = cell.base_s()
            if base_s >= best_s:
                continue  # not even without a prefill
            prefill_s = cell.prefill_s(tokens_at_mark(hits.depth(number)), prompt_tokens)
            if base_s + prefill_s < best_s:
                best = number
                best_s = base_s + prefill_s
                best_prefill_s = prefill_s
        self._cells[best].sent_s += best_prefill_s
        self._cells[best].sent_requests += 1
        index.predict(best, marks, now)
        return best


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
    backlog_s = queue.prefill_s + queue.overdue_prefill_s
    backlog_s += sum(worker.backlog_s(now) for worker in prefill_workers)
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
