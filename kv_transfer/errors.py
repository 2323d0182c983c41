"""Environment failures of a transfer. Expected outcomes are values (`tickets.Broken`)."""


class TransferError(Exception):
    """Base of everything that `kv_transfer` raises."""


class PeerLost(TransferError):
    """The peer is gone or was never known; nothing more reaches it."""


class TransportUnavailable(TransferError):
    """The transport cannot run here (library missing, no permission)."""
