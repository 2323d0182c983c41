"""The decode role: KV in, token streams out."""

from .role import DecodeRole

__all__ = ["DecodeRole"]
