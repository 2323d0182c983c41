"""The prefill role: prompts in, KV and first tokens out."""

from .role import PrefillRole

__all__ = ["PrefillRole"]
