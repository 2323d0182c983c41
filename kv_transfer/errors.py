"""Exceptions for a failing environment; expected failures of a transfer are `TransferFailed`.

That is an event, in `commands`. `pinning.PinningRefused` is no `TransferError`: it ends the start
of a worker, and the operator has to mend what it names.
"""


class TransferError(Exception):
    """Base of the exceptions for a failing environment: of peers, transports and the disk tier."""


class PeerLost(TransferError):
    """The transport cannot reach this peer any more, or was never told of it."""


class TransportUnavailable(TransferError):
    """The transport cannot run here, because a library or a permission is missing."""
