"""How several models share a number of GPUs (pure): what one has, the others' planners may not order."""

from __future__ import annotations


class GpuBudget:
    """The GPUs of a cluster, and how many each model's replicas have. `limit` None: no limit."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._used: dict[str, int] = {}  #: By model.

    def note(self, model: str, gpus: int) -> None:
        """Note how many GPUs the replicas have that a model should have by now."""
        self._used[model] = gpus

    def forget(self, model: str) -> None:
        """Note that a model is gone."""
        self._used.pop(model, None)

    def limit_of(self, model: str) -> int | None:
        """Return how many GPUs a model's replicas may have; None: no limit.

        The first model to ask gets what is free; a model gives GPUs back when its pools shrink.
        """
        if self._limit is None:
            return None
        used_by_others = sum(gpus for name, gpus in self._used.items() if name != model)
        return max(self._limit - used_by_others, 0)
