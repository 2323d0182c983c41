"""Which pair of workers serves a request. Pure: no asyncio, no clock, no ray, no torch."""

from .core import Router, RouterConfig

__all__ = ["Router", "RouterConfig"]
