"""`diptych simulate`: policies on a trace, in virtual time. `diptych plan`: the layout for one.

Both call `simulator/entry.py`, as notebooks do. The simulator is imported when a command runs: no
other command pays for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from .common import check_output, check_writable, fail, save
from .progress import step_progress

TRACE_HELP = "File (.jsonl, Azure .csv, either .gz; ServeGen .npz), synthetic[:N], poisson:256-1024:64-128[:N]."
ModelOption = Annotated[str, typer.Option(help="Model and type of its weights.")]
EngineOption = Annotated[
    str, typer.Option(help="Whose times on GPUs: vllm, sglang, trtllm, or our own, diptych.")
]
PriceOption = Annotated[
    list[str] | None,
    typer.Option(help="An hour of one GPU, in any currency: H100=2.2,H200=3."),
]
TIERS_HELP = (
    "Below each worker's KV pool: memory=256GiB,disk=2TiB, or with speeds: memory=256GiB@40GB/s."
)
SloOption = Annotated[
    str,
    typer.Option(help="Targets: ttft=2s, max(1s, 3x) of the isolated prefill, 500ms + 300ms/1k."),
]
LiveOption = Annotated[
    Path | None,
    typer.Option(
        "--calibrate-from-live",
        help="Router's log, or JSON of measured coefficients; `recorded` replays its run.",
    ),
]
OutputOption = Annotated[str, typer.Option("-o", "--output", help="table or json")]
JobsOption = Annotated[int | None, typer.Option(min=1, help="Processes. Default: every core.")]
DispatchOption = Annotated[
    str, typer.Option(help="timestamp, or thinktime: turns wait for the end of the one before.")
]
PolicyOption = Annotated[list[str] | None, typer.Option(help="May be given several times; or all.")]
VariantOption = Annotated[
    str,
    typer.Option(
        help="policy-only; full: baselines as their authors ship them; both of these; or "
        "deadline-order: baselines on workers that compute prompts by deadline."
    ),
]
SeedsOption = Annotated[int, typer.Option(min=1, help="Jitter seeds.")]
#: G90 and G99 are the highest rates per GPU at which 90% and 99% of the requests meet their
#: targets.
FindMaxFlag = Annotated[bool, typer.Option("--find-max", help="Search G90 and G99.")]
HeadOption = Annotated[float, typer.Option(min=0.01, max=1, help="Share of the trace to use.")]
FaultsOption = Annotated[
    str, typer.Option(help="stale=1s,slow=3x@0,wrong=10%,kill=2@60s; all optional.")
]
AgreementFlag = Annotated[
    bool, typer.Option("--agreement", help="Run step by step too; say how far apart.")
]
EarlyRejectFlag = Annotated[
    bool, typer.Option("--early-reject", help="Refuse late requests at once: diptych, mooncake.")
]
PacingFlag = Annotated[
    bool | None,
    typer.Option(
        "--pace-first-token/--no-pace-first-token",
        help="Hold first tokens until the second can follow in time. Default: as a cluster does.",
        show_default=False,
    ),
]
CellsOption = Annotated[
    int,
    typer.Option(min=1, help="Divide the fleet into cells, each with a router and a queue."),
]
HtmlOption = Annotated[Path | None, typer.Option(help="Write a report with plots.")]


def simulate(
    trace: Annotated[str, typer.Argument(help=TRACE_HELP + " Or: recorded.")],
    model: ModelOption = "llama3.1-70b-fp8",
    engine: EngineOption = "vllm",
    tp: Annotated[int, typer.Option(min=1, help="GPUs of a replica.")] = 4,
    fleet: Annotated[
        str, typer.Option(help="GPUs by type: H200:32, or H100:8,H200:8.")
    ] = "H200:32",
    split: Annotated[
        str, typer.Option(help="Replicas by role, like 6P2D or 8M; or best.")
    ] = "best",
    policy: PolicyOption = None,
    variant: VariantOption = "policy-only",
    slo: SloOption = "ttft=max(1s, 3x),itl=50ms",
    seeds: SeedsOption = 3,
    find_max: FindMaxFlag = False,
    rate: Annotated[
        float | None, typer.Option(help="Requests/s without --find-max. Default: as recorded.")
    ] = None,
    dispatch: DispatchOption = "timestamp",
    head: HeadOption = 1.0,
    faults: FaultsOption = "",
    agreement: AgreementFlag = False,
    early_reject: EarlyRejectFlag = False,
    pace_first_token: PacingFlag = None,
    price: PriceOption = None,
    tiers: Annotated[str, typer.Option(help=TIERS_HELP)] = "",
    cells: CellsOption = 1,
    calibrate_from_live: LiveOption = None,
    jobs: JobsOption = None,
    output: OutputOption = "table",
    html: HtmlOption = None,
) -> None:
    """Replay TRACE against the real router on simulated workers."""
    check_output(output)
    check_writable(html)
    from ...simulator import entry

    with _simulator_errors_reported(), step_progress("simulating") as report_progress:
        result = entry.simulate(
            trace,
            model=model,
            engine=engine,
            tp=tp,
            fleet=fleet,
            split=split,
            policy=policy or entry.OWN_POLICY,
            variant=variant,
            slo=slo,
            seeds=seeds,
            find_max=find_max,
            rate=rate,
            dispatch=dispatch,
            head=head,
            faults=faults,
            agreement=agreement,
            early_reject=early_reject,
            pace_first_token=pace_first_token,
            price=price or (),
            tiers=tiers,
            cells=cells,
            calibrate_from_live=calibrate_from_live,
            jobs=jobs,
            report_progress=report_progress,
        )
    typer.echo(json.dumps(result.document, indent=2) if output == "json" else repr(result))
    if html:
        save(html, result.html())


@contextmanager
def _simulator_errors_reported() -> Iterator[None]:
    """Turn what is wrong with the simulator's input, and an interrupt, into an exit."""
    from ...simulator import SimulationError

    try:
        yield
    except SimulationError as error:
        fail(str(error), 2)
    except KeyboardInterrupt:
        fail("interrupted", 130)


def plan(
    trace: Annotated[str, typer.Argument(help=TRACE_HELP)] = "synthetic",
    model: ModelOption = "llama3.1-70b-fp8",
    engine: EngineOption = "vllm",
    tp: Annotated[str, typer.Option(help="GPUs of a replica; several: 2,4.")] = "4",
    fleet: Annotated[
        list[str] | None, typer.Option(help="A fleet to consider; may be given several times.")
    ] = None,
    price: PriceOption = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests/s to serve. Default: as many as can be.")
    ] = None,
    share: Annotated[float, typer.Option(min=0.5, max=1, help="Of requests in time.")] = 0.99,
    slo: SloOption = "ttft=max(1s, 3x),itl=50ms",
    seeds: SeedsOption = 1,
    dispatch: DispatchOption = "timestamp",
    head: HeadOption = 1.0,
    tiers: Annotated[
        str, typer.Option(help="The largest to consider. " + TIERS_HELP, show_default=False)
    ] = "",
    calibrate_from_live: Annotated[
        list[Path] | None,
        typer.Option(help="As for simulate; several: workers of several sizes."),
    ] = None,
    jobs: JobsOption = None,
    write: Annotated[Path, typer.Option(help="Where the plan goes.")] = Path("cluster.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite it.")] = False,
    output: OutputOption = "table",
) -> None:
    """Find the layout that serves TRACE best; say whether disaggregation pays; write it down."""
    check_output(output)
    check_writable(write)
    if write.exists() and not force:
        fail(f"{write} exists: give another --write, or --force", 2)
    try:
        tp_sizes = [int(part) for part in tp.split(",")]
    except ValueError:
        fail(f"--tp {tp}: expected numbers, like 4 or 2,4", 2)
    from ...simulator import entry

    with _simulator_errors_reported(), step_progress("planning") as report_progress:
        result = entry.plan(
            trace,
            model=model,
            engine=engine,
            tp=tp_sizes,
            fleet=fleet or entry.DEFAULT_FLEET,
            price=price or (),
            rate=rate,
            share=share,
            slo=slo,
            seeds=seeds,
            dispatch=dispatch,
            head=head,
            tiers=tiers,
            calibrate_from_live=calibrate_from_live or (),
            jobs=jobs,
            report_progress=report_progress,
        )
    typer.echo(json.dumps(result.document, indent=2) if output == "json" else repr(result))
    save(write, result.cluster_yaml)
    if output == "table":
        typer.echo(f"wrote {write}")
