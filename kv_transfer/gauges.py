"""What a rank's transfer service has done so far."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Gauges:
    """Owned by the transfer thread. Bytes, seconds, counts."""

    sent: int = 0
    received: int = 0
    arrived: int = 0  #: tickets that landed here
    closed: int = 0  #: tickets that were pushed from here, all of it
    busy_s: float = 0.0  #: of arrived tickets: with a write under way
    exposed_s: float = 0.0  #: of these: after the last KV was computed
    checksum_s: float = 0.0
    copy_s: float = 0.0  #: in the transport's `write`
    failures: Counter[str] = field(default_factory=Counter)  #: by reason

    def landed(self, busy_s: float, exposed_s: float) -> None:
        self.arrived += 1
        self.busy_s += busy_s
        self.exposed_s += exposed_s

    def values(self) -> dict:
        return {
            "bytes_sent": self.sent,
            "bytes_received": self.received,
            "transfers": self.arrived + self.closed,
            "failures": dict(self.failures),
            "busy_s": round(self.busy_s, 6),
            "exposed_s": round(self.exposed_s, 6),
            "checksum_s": round(self.checksum_s, 6),
            "copy_s": round(self.copy_s, 6),
        }
