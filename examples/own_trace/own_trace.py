"""From a log of requests to a layout: reads it as a trace, simulates policies on it, and plans.

The log is a CSV file with a row for each request: `time_s`, `tenant`, `prompt_tokens`,
`answer_tokens`. Any gateway's log has these. Blocks that prompts share are not known from it, so
nothing is shared; `.jsonl` files with `hash_ids` know that too (simulator/README.md).
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated

import typer
from diptych import plan, simulate
from diptych.simulator import Trace
from diptych.simulator.trace import TraceRequest

HERE = Path(__file__).parent
BLOCK_TOKENS = 512  #: of a block that requests could share; here none does


def read_log(path: Path) -> Trace:
    """Return the requests of the log as a trace."""
    with path.open(newline="") as file:
        rows = sorted(csv.DictReader(file), key=lambda row: float(row["time_s"]))
    requests = [
        TraceRequest(
            arrival_s=float(row["time_s"]) - float(rows[0]["time_s"]),
            prompt_tokens=int(row["prompt_tokens"]),
            output_tokens=int(row["answer_tokens"]),
            tenant=row["tenant"],
        )
        for row in rows
    ]
    return Trace(path.stem, requests, BLOCK_TOKENS)


def main(
    log: Annotated[Path, typer.Argument(help="The CSV file.")] = HERE / "requests.csv",
    fleet: Annotated[str, typer.Option(help="GPUs by type, like H200:16.")] = "H200:16",
    slo: Annotated[str, typer.Option(help="The targets.")] = "ttft=2s,itl=50ms",
    write: Annotated[Path, typer.Option(help="Where the plan goes.")] = Path("build/cluster.yaml"),
) -> None:
    """Simulate two policies on the log, plan a layout for it, and write cluster.yaml."""
    trace = read_log(log)
    print(f"{log.name}: {len(trace.requests)} requests, {trace.rate:.2f} a second\n")
    print(simulate(trace, fleet=fleet, slo=slo, policy=["diptych", "round_robin"], seeds=1))
    found = plan(trace, fleet=fleet, slo=slo, rate=trace.rate)
    print(f"\n{found}")
    write.parent.mkdir(parents=True, exist_ok=True)
    write.write_text(found.cluster_yaml)
    print(f"wrote {write}")


if __name__ == "__main__":
    typer.run(main)
