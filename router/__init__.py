"""Which pair of workers serves a request. Pure: no asyncio, no clock, no ray, no torch."""

from . import native

native.use("router", __path__)

from .config import RouterConfig, SloClass  # noqa: E402
from .core import Router  # noqa: E402

__all__ = ["Router", "RouterConfig", "SloClass"]
