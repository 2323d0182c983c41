"""Where traces come from: files of recorded requests, ServeGen's client models, and generators."""

from __future__ import annotations

from pathlib import Path

from ..errors import SimulationError
from ..trace import Trace
from .jsonl import read_jsonl
from .servegen import read_window
from .synthetic import GENERATORS, parse_source

__all__ = ["load_trace"]


def load_trace(source: str, seed: int = 0) -> Trace:
    """Return the trace that `source` names; the seed is for what is drawn.

    `source` is a file (.jsonl, .jsonl.gz, ServeGen's .npz), `synthetic[:REQUESTS]`, or
    `poisson:LOW-HIGH:LOW-HIGH[:REQUESTS]` (uniform tokens of the prompt and of the answer).
    Raises SimulationError.
    """
    if source.split(":")[0] in GENERATORS:
        return parse_source(source, seed)
    path = Path(source)
    if not path.is_file():
        raise SimulationError(f"trace {source}: no such file (and not `synthetic`)")
    name = path.name.split(".")[0]
    if path.suffix == ".npz":
        return read_window(path, name, seed)
    return read_jsonl(path, name)
