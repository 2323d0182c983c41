"""Where traces come from: files of recorded requests, ServeGen's client models, and generators."""

from __future__ import annotations

from pathlib import Path

from ..errors import SimulationError
from ..trace import Trace
from .azure import read_azure
from .jsonl import read_jsonl
from .servegen import read_window
from .synthetic import GENERATORS, parse_source

__all__ = ["load_trace"]


def load_trace(source: str, seed: int = 0) -> Trace:
    """Return the trace that `source` names; `seed` is the seed of whatever is drawn at random.

    `source` is one of

    * a file of recorded requests (.jsonl, .jsonl.gz, or Azure's .csv, .csv.gz), of which nothing is
      drawn;
    * a file of ServeGen's client models (.npz): the requests of one window of 600 s are drawn. It
      is always the window with the median total rate;
    * `synthetic[:REQUESTS]`: sessions of several tenants, with bursts of new sessions; 4,000
      requests by default;
    * `poisson:LOW-HIGH:LOW-HIGH[:REQUESTS]`: one request a second on average, 600 requests by
      default. The tokens of a prompt are uniform in the first range, those of an answer in the
      second.

    Raises SimulationError.
    """
    if source.split(":")[0] in GENERATORS:
        return parse_source(source, seed)
    path = Path(source)
    if not path.is_file():
        names = ", ".join(GENERATORS)
        raise SimulationError(f"trace {source}: no such file, and no generator ({names})")
    name = path.name.split(".")[0]
    if path.suffix == ".npz":
        return read_window(path, name, seed)
    if ".csv" in path.suffixes:
        return read_azure(path, name)
    return read_jsonl(path, name)
