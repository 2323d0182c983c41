"""Which workers get an attempt while there is no router (pure).

The choice is a plain one: the workers with the fewest attempts of this gateway. A gateway does not
know what other gateways give to a worker. So it gives each worker a few attempts only, and its
other attempts wait until one of these ends, or a router comes. As always, a decode worker without
blocks for an attempt refuses it (`no_capacity`) if the KV comes from a prefill worker, and queues
it if it computes the prompt itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....protos import frames

#: Without a router for so long, gateways place attempts themselves. A router that was killed is
#: back after 3 to 5 s.
FALLBACK_AFTER_S = 2.0
ATTEMPTS_MAX = 8  #: of one gateway on one worker, without a router


@dataclass(frozen=True, slots=True)
class KnownWorker:
    """A worker that a gateway is connected to, and that is not silent."""

    card: frames.WorkerCard
    #: Of this gateway, those that were placed there, until they end. On a prefill worker an
    #: attempt ends when all its answers have begun.
    attempts: int


def place_without_router(
    place: frames.PlaceAttempt, term: int, workers: Sequence[KnownWorker]
) -> frames.AttemptPlaced | None:
    """Return the workers for an attempt; None: it has to wait.

    `term` is the last router's, as workers refuse orders of routers before it. A decode worker
    computes the prompt itself if the attempt asks for that, or there are no prefill workers.
    """
    allowed = [
        worker
        for worker in workers
        if worker.card.id not in place.lost_workers
        and worker.attempts < ATTEMPTS_MAX
        and worker.card.blocks * worker.card.block_tokens > place.prompt_tokens
    ]
    decode = _least_loaded(allowed, ("decode", "mixed"), place)
    if decode is None:
        return None
    prefill = None
    has_prefill_workers = any(worker.card.role == "prefill" for worker in workers)
    if has_prefill_workers and not place.local_prefill:
        prefill = _least_loaded(allowed, ("prefill",), place)
        if prefill is None:
            return None
    return frames.AttemptPlaced(
        attempt_key=place.attempt_key,
        term=term,
        prefill_worker=prefill.card.id if prefill else None,
        decode_worker=decode.card.id,
        hit_tokens=0,
        predicted_ready_ms=0.0,
    )


def _least_loaded(
    workers: Sequence[KnownWorker], roles: tuple[str, ...], place: frames.PlaceAttempt
) -> KnownWorker | None:
    """Return the worker of these roles with the fewest attempts, of those not to avoid if any."""
    able = [worker for worker in workers if worker.card.role in roles]
    welcome = [worker for worker in able if worker.card.id not in place.avoided_workers]
    return min(welcome or able, key=lambda worker: (worker.attempts, worker.card.id), default=None)
