"""Moves KV blocks between workers, and defines what a block is."""

from .errors import PeerLost, TransferError, TransportUnavailable
from .layout import KVLayout
from .transport import PeerCard, Pool, Transport

__all__ = [
    "KVLayout",
    "PeerCard",
    "PeerLost",
    "Pool",
    "TransferError",
    "Transport",
    "TransportUnavailable",
]
