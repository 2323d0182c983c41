"""The cluster in virtual time: the real router, analytic workers, traces, metrics, the bound."""

from .. import engine
from ..router import native

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
