"""Few workers instead of all: who could be the best for a request, and the index's word on each.

A small fleet is looked at whole. Of a large one: those soonest free, those with most slack (a
newcomer may go before what they have), those that cost least to decode on, all found again every
few requests; and whoever holds some of the prompt. What a choice costs is then worked out worker
by worker in plain floats: vectors over a thousand workers take longer than twenty workers do.
"""

from __future__ import annotations

from math import inf

import numpy as np

from .fleet import Fleet, Worker
from .index import Hits

WHOLE = 16  #: workers of a stage: up to this, all are looked at
SOON, PATIENT, CHEAP = 4, 2, 4  #: of the three shortlists
USES = 4  #: requests before a shortlist is found again (in `refresh`)
FASTEST = 2


class Few:
    """The workers that are compared for one request."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._joins = -1
        self._prefills: list[Worker] = []
        self._decodes: list[Worker] = []
        self._fastest: list[Worker] = []
        self._prefill_uses = self._decode_uses = -USES

    def prefills(self, hits: Hits, home: Worker | None, now: float) -> list[Worker]:
        """Of those that prefill; `home` is one of them, if the request has any."""
        if self._fleet.joins != self._joins:
            self._joined()
        if len(self._fleet.prefills) <= WHOLE:
            return self._prefills
        self._prefill_uses -= 1
        if self._prefill_uses < -USES:
            self._find_prefills(now)
        few = self._prefills
        by_slot = self._fleet.by_slot
        added = []
        for slot in hits.known:
            worker = by_slot[slot]
            if worker is not None and worker.prefills_ok and worker not in few:
                added.append(worker)
        if home is not None and home not in few and home not in added and home.alive:
            added.append(home)
        return few + added if added else few

    def refresh(self, now: float) -> None:
        """Finds the shortlists again, if enough requests have used them. Nobody waits for that:
        `prefills` and `decodes` do it themselves only after twice as many."""
        if self._prefill_uses <= 0 and len(self._fleet.prefills) > WHOLE:
            self._find_prefills(now)
        if self._decode_uses <= 0 and len(self._fleet.decodes) > WHOLE:
            self._find_decodes()

    def _find_prefills(self, now: float) -> None:
        self._prefill_uses = USES
        fleet = self._fleet
        soon = np.maximum(fleet.queue_until, now)
        soon += fleet.typical_s
        found = self._least(soon, SOON)
        found.update(self._least(-fleet.put_off_s, PATIENT))
        self._prefills = list(found)

    def _find_decodes(self) -> None:
        self._decode_uses = USES
        self._decodes = list(self._least(self._fleet.decode_cost, CHEAP))

    def decodes(self, hits: Hits) -> list[Worker]:
        """Of those that decode; some may not take anybody now."""
        if self._fleet.joins != self._joins:
            self._joined()
        if len(self._fleet.decodes) <= WHOLE:
            return self._decodes
        self._decode_uses -= 1
        if self._decode_uses < -USES:
            self._find_decodes()
        few = self._decodes
        by_slot = self._fleet.by_slot
        added = []
        for slot in hits.known:
            worker = by_slot[slot]
            if worker is not None and worker.decodes_ok and worker not in few:
                added.append(worker)
        return few + added if added else few

    def fastest(self, hits: Hits, decodes: bool) -> list[Worker]:
        """Who would do a prompt soonest, were all idle."""
        if decodes:
            return self.decodes(hits)
        if self._fleet.joins != self._joins:
            self._joined()
        if len(self._fleet.prefills) <= WHOLE:
            return self._prefills
        by_slot = self._fleet.by_slot
        more = [by_slot[slot] for slot in hits.known]
        return [*self._fastest, *(w for w in more if w is not None and w.prefills_ok)]

    def whole(self, decodes: bool) -> bool:
        """Whether all workers of the stage are looked at."""
        return len(self._fleet.decodes if decodes else self._fleet.prefills) <= WHOLE

    def _joined(self) -> None:
        """Somebody came or went."""
        fleet = self._fleet
        self._joins = fleet.joins
        self._prefills = sorted(fleet.prefills.values(), key=lambda worker: worker.slot)
        self._decodes = sorted(fleet.decodes.values(), key=lambda worker: worker.slot)
        self._prefill_uses = self._decode_uses = -USES
        self._fastest = sorted(self._prefills, key=lambda worker: worker.typical_s)[:FASTEST]

    def _least(self, costs: np.ndarray, few: int) -> dict[Worker, None]:
        """In order of their slots; inf: not to be had."""
        slots = costs.argpartition(few)[:few]
        slots.sort()
        by_slot = self._fleet.by_slot
        found: dict[Worker, None] = {}
        for slot in slots.tolist():
            worker = by_slot[slot]
            if worker is not None and costs[slot] < inf:
                found[worker] = None
        return found
