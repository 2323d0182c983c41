"""Failures of the environment; expected failures of a transfer are `commands.TransferFailed`."""


class TransferError(Exception):
    """Base of every exception that `kv_transfer` raises for a failing environment."""


class PeerLost(TransferError):
    """The transport cannot reach this peer any more, or was never told of it."""


class TransportUnavailable(TransferError):
    """The transport cannot run here, because a library or a permission is missing."""
