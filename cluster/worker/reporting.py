"""What a worker says of itself to the router (pure): everything once, then only what changed.

On a new connection the router knows nothing of the worker, so the next observation of the engine
becomes a `JoinRouter` with all that is cached, and all attempts of the decode role. Each later
observation becomes a `WorkerReport` of the difference to the one before, or nothing where nothing
changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...engine.commands import EngineObservation
from ...protos import frames


class TierLoads(NamedTuple):
    """What has come back from the tiers below the pool since the worker's start."""

    tokens: int  #: whose KV came back
    seconds: float  #: that it took, without what loads waited for each other


class WorkerReporter:
    """Owns what the router was told last.

    While `must_join` is true, the router has not been told everything: the next message must come
    from `joining`, not from `report`.
    """

    def __init__(self) -> None:
        self.must_join = True
        self._report_number = 0
        self._last: EngineObservation | None = None
        self._last_loads = TierLoads(0, 0.0)

    def introduce_again(self) -> None:
        """Say everything with the next observation: the router is new, or the card has changed."""
        self.must_join = True

    def joining(
        self,
        observation: EngineObservation,
        card: frames.WorkerCard,
        term: int,
        reservations: list[tuple[str, int, int]],
    ) -> frames.JoinRouter:
        """Return the introduction, with the cached prefixes and the attempts of the decode role.

        `reservations` are (request id, attempt number, reserved blocks) of these attempts. `term`
        is the highest term of a router that the worker has seen: a router with a lower one learns
        by it that it was replaced.
        """
        self._last = observation
        self.must_join = False
        self._report_number = 0
        return frames.JoinRouter(
            card,
            term,
            cached_hashes=observation.hashes,
            held_reservations=reservations,
            demoted_hashes=observation.demoted_hashes,
        )

    def report(
        self,
        observation: EngineObservation,
        ended_attempts: Sequence[frames.AttemptKey],
        loads: TierLoads | None = None,
    ) -> frames.WorkerReport | None:
        """Return what changed since the last observation; None if nothing did.

        Observations count tokens, seconds and steps since the engine's start; the report has the
        differences. `ended_attempts` ended since the last report: when this returns a report, the
        caller forgets them. `loads` are those since the start; None: there are no tiers.
        """
        last = self._last
        assert last is not None, "the introduction comes first"
        self._last = observation
        prefill_tokens = observation.prefill_tokens - last.prefill_tokens
        decode_steps = observation.decode_steps - last.decode_steps
        worked = bool(prefill_tokens or decode_steps or ended_attempts)
        cache_changed = bool(observation.stored or observation.evicted or observation.demoted)
        if not (worked or cache_changed or _load_changed(last, observation)):
            return None
        loads = loads or self._last_loads
        loaded_tokens = loads.tokens - self._last_loads.tokens
        loading_s = loads.seconds - self._last_loads.seconds
        self._last_loads = loads
        self._report_number += 1
        return frames.WorkerReport(
            seq=self._report_number,
            free_blocks=observation.free_blocks,
            stored=observation.stored,
            evicted=observation.evicted,
            demoted=observation.demoted,
            loaded_tokens=loaded_tokens,
            loading_seconds=loading_s,
            prefill_tokens=prefill_tokens,
            prefill_seconds=observation.prefill_s - last.prefill_s,
            running=observation.running_sequences,
            kv_tokens=observation.kv_tokens,
            steps=decode_steps,
            step_seconds=observation.decode_s - last.decode_s,
            waiting=observation.preempted_sequences,
            step_ms=observation.step_s * 1e3,
            ended=list(ended_attempts),
        )


def _load_changed(last: EngineObservation, observation: EngineObservation) -> bool:
    """Return whether the pool or the number of sequences is another than before."""
    return (
        observation.free_blocks != last.free_blocks
        or observation.running_sequences != last.running_sequences
        or observation.preempted_sequences != last.preempted_sequences
    )
