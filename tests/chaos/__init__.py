"""Faults injected into a live cluster under a mixed load; see README.md."""
