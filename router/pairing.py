"""Both stages of one request: its prefill worker is given, or the request itself asks; found are
the decode worker, whose blocks are reserved with the choice, and what it costs. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import nsmallest
from math import inf

import numpy as np

from ..protos.frames import AttemptKey
from . import placement as p
from .config import RouterConfig
from .decisions import Option
from .few import Few
from .fleet import Fleet, Worker
from .index import FEW, PrefixIndex, bits, tokens_at
from .line import Waiting
from .policies import POLICIES
from .predictor import Residuals

LATE_S = 30.0  #: the deadline of one that is late anyway
LOCAL_TOKENS, LOCAL_HIT, LOCAL_HIT_TOKENS = 512, 0.6, 4096
OPTIONS = 3  #: of each stage in a record
FULL_S = 1e6  #: a worker without room for chunks comes after all others
_NONE: set[str] = set()
SPREAD = 0x9E3779B1  #: spreads ties over equal workers


#: seconds to the first token, tie, slot, worker, seconds of the prefill alone, whether the worker
#: takes it now
Ranked = tuple[float, int, int, Worker, float, bool]
#: cost, tie, slot, worker, tokens that move, terms of the cost
Priced = tuple[float, int, int, Worker, int, p.Terms]


class Binding:
    """What was decided for one request. Seconds; `wait_s` is until its prefill ends."""

    def __init__(
        self,
        waiting: Waiting,
        kind: str,
        prefill: Worker | None,
        decode: Worker,
        uncached: int,
        hit: int,
        wait_s: float,
        compute_s: float,
        itl_s: float,
        exposed_s: float,
        due: float,  #: when its prompt should be computed, for the worker's order; 0: as they come
        moves: int = 0,  #: tokens of the prompt that go to the decode worker
        fetch: Worker | None = None,
        need: int = 0,  #: blocks to reserve
        compared: Sequence[Ranked] = (),  #: what its options will be made of
        priced: Sequence[Priced] = (),
    ) -> None:
        self.waiting = waiting
        self.kind = kind
        self.prefill = prefill
        self.decode = decode
        self.uncached = uncached
        self.hit = hit
        self.wait_s = wait_s
        self.compute_s = compute_s
        self.itl_s = itl_s
        self.exposed_s = exposed_s
        self.due = due
        self.moves = moves
        self.fetch = fetch
        self.need = need
        self.compared = compared
        self.priced = priced
        self.passed_over: Sequence[tuple[str, float, str]] = ()
        self.prefill_options: Sequence[Option] = ()
        self.decode_options: Sequence[Option] = ()

    def name_options(self) -> None:
        """Makes its options, for a record: the chosen worker and the best others."""
        if self.compared:
            self.prefill_options = [
                (worker.card.id, score, (score - alone_s, alone_s))
                for score, _, _, worker, alone_s, _ in _shown(self.compared, self.prefill)
            ]
        if self.priced:
            self.decode_options = [
                (worker.card.id, score, terms)
                for score, _, _, worker, _, terms in _shown(self.priced, self.decode)
            ]


def _shown(compared: Sequence, chosen: Worker | None) -> list:
    others = nsmallest(OPTIONS - 1, (one for one in compared if one[3] is not chosen))
    return [one for one in compared if one[3] is chosen] + others


class Pairing:
    """Looks at the fleet for one request at a time."""

    def __init__(self, config: RouterConfig, fleet: Fleet, index: PrefixIndex) -> None:
        self.config, self.fleet, self.index = config, fleet, index
        self.policy = POLICIES[config.policy](index, config.seed)
        self.residuals = Residuals()
        self.explain = config.decisions > 0
        self.few = Few(fleet)
        self._asks: dict[AttemptKey, p.Ask] = {}
        self._asks_at = -np.inf

    # ---- what the request is ---------------------------------------------------------------------

    def missing(self, waiting: Waiting) -> set[str]:
        """Roles that it needs and no worker has, but those that it has seen die."""
        fleet, lost = self.fleet, waiting.place.lost_workers
        if not lost and fleet.decodes and (fleet.prefills or waiting.local):
            return _NONE
        wanted = {"decode": set(fleet.decodes)}
        if not waiting.local:
            wanted["prefill"] = set(fleet.prefills)
        return {role for role, names in wanted.items() if not names.difference(lost)}

    def need(self, waiting: Waiting) -> int:
        """Blocks: prompt and growth allowance, and for each further answer as many but the
        prompt's full blocks, if a pool has them (as `engine.scheduler` reserves)."""
        place, size = waiting.place, self.fleet.block_tokens
        own = -(-(waiting.prompt + min(place.max_tokens, self.config.growth_tokens)) // size)
        if place.answer_count == 1:
            return own
        more = (place.answer_count - 1) * (own - waiting.prompt // size)
        return max(own, min(own + more, self.fleet.largest_pool))

    def ask(self, waiting: Waiting, now: float) -> p.Ask:
        """Its view of all workers; made once for a request at a moment."""
        self.fleet.sync()
        if now != self._asks_at:
            self._asks_at = now
            self._asks.clear()
        ask = self._asks.get(waiting.key)
        if ask is None or ask.waiting is not waiting:
            ask = p.Ask(self.fleet, self.index, waiting, self.need(waiting), now)
            self._asks[waiting.key] = ask
        return ask

    def look(self, waiting: Waiting) -> None:
        """Who holds how much of its prompt now, and whether most of it can be moved from there."""
        hits = waiting.hits = self.index.find(waiting.sampled)
        waiting.looked = self.fleet.joins
        waiting.holder, waiting.held, waiting.fetches = None, 0, False
        mask = hits.holders
        if not mask:
            return
        count = mask.bit_count()
        if count == 1:
            slot = mask.bit_length() - 1
        elif count <= FEW:
            slot = list(bits(mask))[waiting.tie % count]
        else:
            return
        holder = self.fleet.by_slot[slot]
        if holder is not None:
            waiting.fetches = self.config.fetch and holder.cost.transfer_token > 0
            waiting.holder = holder
            waiting.held = min(tokens_at(hits.deepest), waiting.prompt - 1)

    def look_again(self, waiting: Waiting) -> None:
        """The same, if the longest match is another one now."""
        if self.fleet.joins != waiting.looked or not self.index.stands(
            waiting.hits, waiting.sampled
        ):
            self.look(waiting)

    def hit(self, waiting: Waiting, worker: Worker) -> int:
        """Cached tokens of its prompt, as of the last look; at least one is always computed."""
        hits = waiting.hits
        if not hits.holders:
            return 0
        depth = hits.depth(worker.slot)
        return min(tokens_at(depth), waiting.prompt - 1) if depth else 0

    def alone(self, waiting: Waiting, worker: Worker) -> float:
        """Seconds of its prefill there, were the worker idle; a fetch with its margin."""
        prompt, hit = waiting.prompt, 0
        depth = waiting.hits.depth(worker.slot)
        if depth:
            hit = min(tokens_at(depth), prompt - 1)
        left = prompt - hit
        token, pair = worker.prefill_token, worker.prefill_pair
        seconds = worker.prefill_base + left * (token + pair * (prompt - left / 2))
        if waiting.fetches and waiting.held - hit >= p.FETCH_TOKENS:
            holder = waiting.holder
            assert holder
            moves = p.FETCH_S + holder.transfer_token * (waiting.held - hit)
            left = prompt - waiting.held
            rest = worker.prefill_base + left * (token + pair * (prompt - left / 2))
            return min(seconds, rest + p.FETCH_MARGIN * moves)
        return seconds

    def compute(self, waiting: Waiting, worker: Worker) -> tuple[float, int, Worker | None]:
        """(seconds, cached or fetched tokens, who they are fetched from) of a prefill there."""
        prompt, hit = waiting.prompt, self.hit(waiting, worker)
        seconds = worker.prefill_s(prompt - hit, prompt)
        holder, held = waiting.holder, waiting.held
        if holder is None or holder is worker or not waiting.fetches or not holder.alive:
            return seconds, hit, None
        if held - hit < p.FETCH_TOKENS:
            return seconds, hit, None
        moves = p.FETCH_S + holder.transfer_token * (held - hit)
        rest = worker.prefill_s(prompt - held, prompt)
        if rest + p.FETCH_MARGIN * moves >= seconds:
            return seconds, hit, None
        return rest + moves, held, holder

    def due(self, waiting: Waiting, now: float) -> float:
        """When its prompt should be computed, for the worker's order; 0: as they come."""
        if not self.policy.late:
            return 0.0
        return now + LATE_S if waiting.late else waiting.deadline

    # ---- both stages -----------------------------------------------------------------------------

    def _allowed(self, waiting: Waiting, ok: np.ndarray) -> np.ndarray:
        """Without lost workers, and without those to avoid if there are others."""
        if not waiting.picky:
            return ok
        alive = self.fleet.mask(ok, waiting.place.lost_workers)
        better = self.fleet.mask(alive, waiting.place.avoided_workers)
        return better if better.any() else alive

    def _of(self, waiting: Waiting, few: list[Worker], everybody: dict) -> list[Worker]:
        """The same, of few workers, or of everybody if it has seen some fail."""
        if not waiting.picky:
            return few
        lost, avoid = waiting.place.lost_workers, waiting.place.avoided_workers
        alive = [worker for worker in everybody.values() if worker.card.id not in lost]
        return [worker for worker in alive if worker.card.id not in avoid] or alive

    def _finish(
        self, waiting: Waiting, worker: Worker, kind: str, gentle: bool, now: float
    ) -> Binding | None:
        """The decode worker for a prompt on `worker`; None if none has room now."""
        seconds, hit, holder = self.compute(waiting, worker)
        due = self.due(waiting, now)
        wait = worker.left_s(due, now) if worker.prefills else 0.0
        begins = now + wait
        need = self.need(waiting)
        found = self._decode(waiting, need, begins, begins + seconds, gentle, now)
        if found is None:
            return None
        decode, step, exposed, moves, priced = found
        return Binding(
            waiting,
            kind,
            worker if decode is not worker else None,
            decode,
            waiting.prompt - hit,
            hit,
            wait,
            seconds,
            step,
            exposed,
            due,
            moves,
            holder,
            need,
            priced=priced,
        )

    def _prefill_options(
        self, ask: p.Ask, slot: int, times: np.ndarray, masked: np.ndarray
    ) -> list[Option]:
        def of(other: int) -> tuple[float, float]:
            return float(times[other] - ask.alone[other]), float(ask.alone[other])

        return self._options(masked, slot, of)

    def _decode(
        self, waiting: Waiting, need: int, begins: float, ends: float, gentle: bool, now: float
    ) -> tuple[Worker, float, float, int, list[Priced]] | None:
        """(decode worker, step, exposed transfer, tokens that move, who was compared) for a prompt
        that is computed in that time; None if nobody has room."""
        if self.policy.late:
            few = self.few.decodes(waiting.hits)
            found = self._of_few(waiting, need, few, begins, ends, gentle)
            if found or (self.few.whole(decodes=True) and not waiting.picky):
                return found
        ask, computed = self.ask(waiting, now), (begins, ends)
        ok = self._allowed(waiting, self.fleet.decode_ok) & (self.fleet.fit >= ask.need)
        if gentle:
            ok &= p.gentle(ask)
        masked = np.where(ok, self.policy.decode(ask, ok, computed), np.inf)
        slot = p.least(masked, waiting.tie)
        if slot is None:
            return None

        slots = p.best_few(masked, slot, OPTIONS) if self.explain else [slot]
        priced: list[Priced] = []
        for order, other in enumerate(slots):
            worker = self.fleet.by_slot[other]
            assert worker
            moves = waiting.prompt - self.hit(waiting, worker)
            terms = p.decode_terms(ask, worker, computed, moves)
            priced.append((float(masked[other]), order, other, worker, moves, terms))
        _, _, _, worker, moves, terms = priced[0]
        return worker, terms[0], terms[1], moves, priced

    def _of_few(
        self,
        waiting: Waiting,
        need: int,
        few: list[Worker],
        begins: float,
        ends: float,
        gentle: bool,
    ) -> tuple[Worker, float, float, int, list[Priced]] | None:
        """The least sum of `placement.decode_terms`, with the worker's own hits."""
        prompt, itl_s, hits, tie = waiting.prompt, waiting.itl_s, waiting.hits, waiting.tie & 0xFFFF
        reads, whole = waiting.reads, waiting.whole
        alike, chunked = itl_s == self.fleet.itl_s, p.ITL_SHARE * itl_s
        place = waiting.place if waiting.picky else None
        known, wide, best_cost = hits.known, hits.wide, inf
        ranked: list[Priced] = []
        for worker in few:
            if worker.fit < need:
                continue
            running = worker.step_next
            step = running + reads * worker.step_token
            memory = worker.decode_s - running
            if step + memory > best_cost:
                continue
            slot = worker.slot
            if place and (
                worker.card.id in place.lost_workers or worker.card.id in place.avoided_workers
            ):
                continue
            if gentle and worker.rows:
                calm = worker.calm_tokens if alike else self.fleet.calm(worker, itl_s)
                if calm < reads or worker.expected_tokens < whole:
                    continue
            moves = prompt
            if slot in known:
                moves -= min(tokens_at(known[slot]), prompt - 1)
            else:
                for depth, mask in wide:
                    if mask >> slot & 1:
                        moves -= min(tokens_at(depth), prompt - 1)
                        break
            transfer = worker.transfer_base + worker.transfer_token * moves
            tail = (worker.link_until if worker.link_until > begins else begins) + transfer - ends
            exposed = worker.exposed * transfer
            if tail > exposed:
                exposed = tail
            if worker.busy_until > ends and running < chunked:
                running = chunked  # it computes a prompt of its own then
            handover = exposed + running + step - itl_s
            if handover < 0.0:
                handover = 0.0
            cost = step + exposed + memory + handover
            if cost < best_cost:
                best_cost = cost
            spread = tie + slot * SPREAD & 0xFFFF
            ranked.append((cost, spread, slot, worker, moves, (step, exposed, memory, handover)))
        if not ranked:
            return None
        _, _, _, worker, moves, terms = min(ranked)
        return worker, terms[0], terms[1], moves, ranked

    def _options(
        self, masked: np.ndarray, chosen: int, of: Callable[[int], tuple[float, ...]]
    ) -> list[Option]:
        """The chosen worker and the best others."""
        options = []
        for slot in p.best_few(masked, chosen, OPTIONS):
            worker = self.fleet.by_slot[slot]
            assert worker
            options.append((worker.card.id, float(masked[slot]), of(slot)))
        return options

    # ---- local prefill ---------------------------------------------------------------------------

    def _if_local(self, waiting: Waiting, remote_s: float, now: float) -> Binding | None:
        """Local if it is done as early, or is short, or mostly cached or fetched; and in time.

        The formula is `placement.local_s`'.
        """
        few = self._of(waiting, self.few.decodes(waiting.hits), self.fleet.decodes)
        need, prompt = self.need(waiting), waiting.prompt
        whole, spare_s = waiting.whole, p.ITL_SHARE * waiting.itl_s
        most = (waiting.deadline - now) / self.residuals.upper
        ranked: list[tuple[float, int, int, Worker]] = []
        for worker in few:
            if worker.fit < need or worker.credit_at > now or worker.expected_tokens < whole:
                continue
            alone_s, hit, _ = self.compute(waiting, worker)
            left = prompt - hit
            each = worker.prefill_token + worker.prefill_pair * (prompt - left / 2)
            chunk = float(worker.chunk)
            if worker.rows:
                chunk = min((spare_s - p.GROWTH * worker.step_next) / each, chunk)
                if chunk < p.CHUNK_MIN:
                    continue
            queue = max(worker.busy_until - now, 0.0)
            seconds = queue + left / chunk * worker.step_now + alone_s
            tie = (waiting.tie + worker.slot * SPREAD) & 0xFFFF
            ranked.append((seconds, tie, worker.slot, worker))
        if not ranked:
            return None
        seconds, _, _, chosen = min(ranked)
        _, hit, _ = self.compute(waiting, chosen)
        short = prompt - hit <= LOCAL_TOKENS
        cached = hit >= LOCAL_HIT * prompt and prompt - hit <= LOCAL_HIT_TOKENS
        if seconds > remote_s and not ((short or cached) and seconds <= most):
            return None
        binding = self._finish_local(waiting, chosen, seconds, now)
        if binding and self.explain:
            best = nsmallest(OPTIONS, ranked)
            binding.decode_options = [(w.card.id, cost, (cost,)) for cost, _, _, w in best]
        return binding

    def _local(self, waiting: Waiting, ok: np.ndarray, now: float) -> Binding | None:
        """A request that has to be local: the decode worker that has its first token earliest.

        One whose streams leave no room for chunks is better than none: its engine keeps its pace.
        """
        ask = self.ask(waiting, now)
        times = p.local_s(ask)
        times = np.where(np.isinf(times), FULL_S + p.ttft_s(ask), times)
        masked = np.where(ok & (self.fleet.fit >= ask.need), times, np.inf)
        slot = p.least(masked, waiting.tie)
        if slot is None:
            return None
        worker = self.fleet.by_slot[slot]
        assert worker
        binding = self._finish_local(waiting, worker, float(p.local_s(ask)[slot]), now)
        if binding and self.explain:
            of = times.item
            binding.decode_options = self._options(masked, slot, lambda other: (of(other),))
        return binding

    def _finish_local(
        self, waiting: Waiting, worker: Worker, seconds: float, now: float
    ) -> Binding | None:
        """`seconds`: until the first token; inf: as fast as the engine can."""
        need = self.need(waiting)
        if worker.fit < need:
            return None
        due = self.due(waiting, now)
        wait = worker.left_s(due, now)
        alone_s, hit, holder = self.compute(waiting, worker)
        if seconds == np.inf:
            seconds = wait + alone_s
        step = worker.step_next + worker.step_token * waiting.reads
        return Binding(
            waiting, "local", None, worker, waiting.prompt - hit, hit, wait, seconds - wait,
            step, 0.0, due, fetch=holder, need=need,
        )  # fmt: skip
