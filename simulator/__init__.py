"""The cluster in virtual time: the real router, analytic workers, traces, metrics, the bound."""

from .errors import SimulationError
from .fleet import Faults, Fleet, Split
from .metrics import Slo
from .sim import Setting, Simulation
from .trace import Trace, load

__all__ = [
    "Faults",
    "Fleet",
    "Setting",
    "Simulation",
    "SimulationError",
    "Slo",
    "Split",
    "Trace",
    "load",
]
