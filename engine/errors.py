"""Environment failures of the engine. Each message names the cause and what to do next.

`collectives.RankLost` is one more: it belongs to the ranks alone.
"""


class EngineError(Exception):
    """Base of everything that `engine` raises."""


class UnsupportedModel(EngineError):
    """The checkpoint needs something that the decoder does not have."""


class WeightsError(EngineError):
    """A file of the checkpoint is missing, truncated or does not fit the config."""


class OutOfMemory(EngineError):
    """Weights and KV pool do not fit into memory, or a sequence does not fit into the pool."""


class InvalidRequest(EngineError):
    """This request cannot be served as it stands, by any replica; others are not affected."""


class KernelUnavailable(EngineError):
    """The kernels or the device that the options name cannot be used here; the message says why."""
