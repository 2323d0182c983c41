"""Diptych serves open-weight language models with separate prefill and decode workers.

In Python, beside the command `diptych`: `LLM` answers prompts in this process, without a cluster.
`simulate` and `plan` do what the commands of these names do, with the same numbers; what they
return prints as the commands print it:

>>> from diptych import plan
>>> plan("synthetic:400", fleet=["H200:8", "H200:16"], rate=1.5)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cluster.offline import LLM as LLM
    from .cluster.offline import RequestError as RequestError
    from .simulator.entry import PlanResult as PlanResult
    from .simulator.entry import SimulationError as SimulationError
    from .simulator.entry import StudyResult as StudyResult
    from .simulator.entry import plan as plan
    from .simulator.entry import simulate as simulate

#: The module of each public name. It is imported when the name is first used: torch takes seconds.
_MODULES = {
    "LLM": ".cluster.offline",
    "RequestError": ".cluster.offline",
    "PlanResult": ".simulator.entry",
    "SimulationError": ".simulator.entry",
    "StudyResult": ".simulator.entry",
    "plan": ".simulator.entry",
    "simulate": ".simulator.entry",
}

__all__ = [
    "LLM",
    "PlanResult",
    "RequestError",
    "SimulationError",
    "StudyResult",
    "plan",
    "simulate",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name], __name__), name)
