"""When a peer that could not be reached is tried again (pure)."""

from __future__ import annotations

import random
from dataclasses import dataclass

FIRST_PAUSE_S = 1.0  #: After the first failure; doubles with each.
LONGEST_PAUSE_S = 30.0
#: A pause is this much longer or shorter, by chance: many workers lose the same peer at once.
JITTER = 0.25


@dataclass(slots=True)
class _UnreachablePeer:
    error: str  #: What the last try said.
    pause_s: float  #: Before the next try, without jitter.
    due_at: float  #: When the next try is due, in seconds of a monotonic clock.


class Redials:
    """The peers that could not be reached, each with a pause before it is tried again.

    Without pauses each transfer would try again, and so would each message of such a peer: a fleet
    whose network is cut would be busy with dials, and with a line in the log for each.
    """

    def __init__(self, chance: random.Random | None = None) -> None:
        self._peers: dict[str, _UnreachablePeer] = {}  #: By agent.
        self._chance = chance or random.Random()

    def note_failure(self, agent: str, error: str, now: float) -> float:
        """Note that a try has failed at `now`; return the seconds until the next is due."""
        known = self._peers.get(agent)
        pause_s = FIRST_PAUSE_S if known is None else min(2 * known.pause_s, LONGEST_PAUSE_S)
        wait_s = pause_s * self._chance.uniform(1 - JITTER, 1 + JITTER)
        self._peers[agent] = _UnreachablePeer(error, pause_s, now + wait_s)
        return wait_s

    def forget(self, agent: str) -> None:
        """Forget a peer that was reached, was lost, or is to be tried at once."""
        self._peers.pop(agent, None)

    def must_wait(self, agent: str, now: float) -> bool:
        """Return whether a try would come too early."""
        peer = self._peers.get(agent)
        return peer is not None and now < peer.due_at

    def due(self, now: float) -> list[str]:
        """Return the peers that are to be tried again at `now`."""
        return [agent for agent, peer in self._peers.items() if now >= peer.due_at]

    def errors(self) -> dict[str, str]:
        """Return what the last try said, by agent. Any thread may ask."""
        return {agent: peer.error for agent, peer in list(self._peers.items())}
