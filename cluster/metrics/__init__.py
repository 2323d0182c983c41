"""What each process counts and exports, and where Prometheus finds it."""

from .control import ControlTally
from .exporter import Exporter
from .gateway import GatewayTally
from .router import RouterTally

__all__ = ["ControlTally", "Exporter", "GatewayTally", "RouterTally"]
