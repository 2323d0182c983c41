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

    `source` is one of

    * a file: recorded requests (.jsonl, .jsonl.gz), or ServeGen's client models (.npz), from which
      a window of 600 s is drawn;
    * `synthetic[:REQUESTS]`: sessions of tenants with bursts, 4,000 requests by default;
    * `poisson:LOW-HIGH:LOW-HIGH[:REQUESTS]`: on average one request a second, 600 by default, with
      uniform tokens of the prompt and of the answer.

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
