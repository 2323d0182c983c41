"""How several models share a number of GPUs (pure).

GPUs that one model has are not available to the planners of the others.
"""

from __future__ import annotations


class GpuBudget:
    """How many GPUs each model has, and how many it may have.

    `limit` is the number of GPUs that the models share; None: there is no limit. A model's planner
    asks `limit_of`, orders replicas and calls `note`. No other planner may ask in between, as
    `limit_of` reserves nothing.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._used: dict[str, int] = {}  #: By model.

    def note(self, model: str, gpus: int) -> None:
        """Replace the number of GPUs that a model has.

        These are the GPUs of all replicas that the model should have now, whether or not they
        run yet.
        """
        self._used[model] = gpus

    def forget(self, model: str) -> None:
        """Make the GPUs of a model that is gone available to the others.

        A model that was never noted is no error.
        """
        self._used.pop(model, None)

    def limit_of(self, model: str) -> int | None:
        """Return how many GPUs a model may have, its present ones included; None: no limit.

        All GPUs that no other model has noted count: whichever model notes them first has them. A
        model gives GPUs back when it notes fewer, as its pools have shrunk.
        """
        if self._limit is None:
            return None
        used_by_others = sum(gpus for name, gpus in self._used.items() if name != model)
        return max(self._limit - used_by_others, 0)
