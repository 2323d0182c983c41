"""What each process counts and exports, and where Prometheus finds it."""

from .control_metrics import ControlTally
from .exporter import Exporter
from .gateway_metrics import GatewayTally
from .router_metrics import RouterTally

__all__ = ["ControlTally", "Exporter", "GatewayTally", "RouterTally"]
