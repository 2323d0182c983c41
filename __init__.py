"""Diptych serves open-weight language models with separate prefill and decode workers.

In Python, beside the command `diptych`: `LLM` answers prompts in this process, without a cluster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cluster.offline import LLM as LLM
    from .cluster.offline import RequestError as RequestError

__all__ = ["LLM", "RequestError"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, as torch takes seconds."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .cluster import offline

    return getattr(offline, name)
