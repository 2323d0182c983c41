"""Which pair of workers serves a request. Pure: no asyncio, no clock, no ray, no torch."""

from .config import RouterConfig, SloClass
from .core import Router

__all__ = ["Router", "RouterConfig", "SloClass"]
