"""Host memory and disk below a worker's KV pool: whole blocks, bounded, checksummed."""

from .service import Limits, Tiers

__all__ = ["Limits", "Tiers"]
