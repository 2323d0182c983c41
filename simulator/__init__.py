"""The cluster in virtual time: the real router, modelled workers, traces of requests, metrics.

`search` finds the largest load that a policy serves within its targets, `bound` an upper bound of
what any policy could serve on the same hardware.
"""

from .. import engine
from ..router import native

# Before any module of the two packages is imported, so that compiled ones are found first.
native.prefer_compiled("engine", engine.__path__)
native.prefer_compiled("simulator", __path__)

from .errors import SimulationError  # noqa: E402
from .fleet import Faults, Fleet, Split  # noqa: E402
from .metrics import Slo  # noqa: E402
from .sim import Setting, Simulation  # noqa: E402
from .sources import load_trace  # noqa: E402
from .trace import Trace  # noqa: E402

__all__ = [
    "Faults",
    "Fleet",
    "Setting",
    "Simulation",
    "SimulationError",
    "Slo",
    "Split",
    "Trace",
    "load_trace",
]
