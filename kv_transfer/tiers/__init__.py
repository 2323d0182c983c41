"""Host memory and disk below a worker's KV pool: whole blocks, bounded, checksummed."""

from .service import TieredStore, TierLimits

__all__ = ["TierLimits", "TieredStore"]
