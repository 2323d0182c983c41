"""The decode role receives KV, and turns it into token streams."""

from .role import DecodeRole

__all__ = ["DecodeRole"]
