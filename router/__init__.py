"""Which pair of workers serves a request, and when. Pure: no asyncio, clock, Ray or torch."""

from . import native

native.prefer_compiled("router", __path__)

from .config import RouterConfig, SloClass, TenantSlo  # noqa: E402
from .core import Router  # noqa: E402

__all__ = ["Router", "RouterConfig", "SloClass", "TenantSlo"]
