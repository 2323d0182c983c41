"""What is wrong with what the simulator was given."""

from __future__ import annotations


class SimulationError(Exception):
    """One sentence that names the input and what was expected."""
