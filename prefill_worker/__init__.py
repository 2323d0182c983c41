"""The prefill role turns prompts into KV on a decode worker, and into first tokens."""

from .role import PrefillRole

__all__ = ["PrefillRole"]
