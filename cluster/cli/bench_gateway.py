"""`diptych bench gateway`: tokens through the gateway, long prompts into it, slow clients."""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path
from typing import Annotated, Any

import typer

from .bench import checkpoint, interrupt_at_end, numbers
from .common import check_output, fail, table_lines
from .progress import step_progress

PROXIES = ("none", "haproxy", "python")  #: What stands between clients and the gateway.
#: MODE is paced (each stream gets tokens at a fixed rate) or flat (as fast as they go). The columns
#: from GATEWAY to SUM are the CPU time of a token in each process; ITL P99 is what is added to the
#: pace, and only paced rows have it.
COLUMNS = ("PROXY", "STREAMS", "MODE", "TOKENS/S", "GATEWAY", "WORKER", "PROXY", "SUM", "ITL P99")
#: Of whole requests: the medians of all rounds. CPU is that of a request in all processes of the
#: server; RATIO is ours over the peer's within a round, median and extremes.
REQUEST_COLUMNS = (
    "LOAD",
    "PROMPT",
    "ANSWER",
    "SERVER",
    "REQUESTS/S",
    "CPU",
    "TTFT P50",
    "P99",
    "RATIO",
)
OWN_SERVER = "diptych"  #: The name of ours among the servers that are compared.
DYNAMO_INSTALL = "how to install it: cluster/bench/gateway/README.md"


def gateway(
    streams: Annotated[str, typer.Option(help="At a time, in turn.")] = "128,512",
    proxy: Annotated[
        str, typer.Option(help="none (the gateway's own socket), haproxy, python (Serve's).")
    ] = "none,haproxy,python",
    seconds: Annotated[float, typer.Option(min=2, max=100, help="Of a paced row.")] = 10.0,
    slow: Annotated[
        bool, typer.Option("--slow", help="Also 1,000 slow and 1,000 leaving clients among 200.")
    ] = False,
    requests: Annotated[
        bool, typer.Option("--requests", help="Whole requests instead of tokens.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Of whole requests.")] = 5,
    against: Annotated[
        str | None, typer.Option(help="Beside whole requests, in turn with ours: dynamo.")
    ] = None,
    dynamo_python: Annotated[
        Path | None,
        typer.Option(envvar="DIPTYCH_DYNAMO_PYTHON", help="The Python that has Dynamo."),
    ] = None,
    model: Annotated[str, typer.Option(help="Whose tokenizer: a checkpoint's folder.")] = "",
    output: Annotated[str, typer.Option("-o", "--output", help="table or json")] = "table",
) -> None:
    """Measure the gateway under Ray Serve, its workers replaced by a source of tokens."""
    check_output(output)
    proxies = tuple(name.strip() for name in proxy.split(","))
    for name in proxies:
        if name not in PROXIES:
            fail(f"--proxy {name}: expected some of {', '.join(PROXIES)}", 2)
    stream_counts = numbers("--streams", streams)
    if against is not None and not requests:
        fail("--against compares whole requests: give --requests too", 2)
    dynamo = _find_dynamo_python(against, dynamo_python)
    interrupt_at_end()
    # These imports take long: the options are checked first.
    from ...engine.demo import CHECKPOINT
    from ..bench.gateway.run import GatewayBenchOptions, run

    with checkpoint(model or str(CHECKPOINT)) as folder:
        options = GatewayBenchOptions(
            model=folder,
            proxies=proxies,
            streams=stream_counts,
            seconds=seconds,
            slow=slow,
            rounds=rounds if requests else 0,
            dynamo=dynamo,
        )
        try:
            with step_progress("measuring") as report:
                result = run(options, report)
        except KeyboardInterrupt:
            fail("interrupted", 130)
    typer.echo(json.dumps(result, indent=2) if output == "json" else table(result))
    if not result["rows"] and not result.get("requests"):
        fail("nothing was measured")


def _find_dynamo_python(against: str | None, python: Path | None) -> Path | None:
    """Return the Python that has Dynamo, or None if nothing is compared."""
    if against is None:
        return None
    if against != "dynamo":
        fail(f"--against {against}: expected dynamo", 2)
    if python is None:
        message = "--against dynamo needs --dynamo-python, the Python that has Dynamo"
        fail(f"{message}; {DYNAMO_INSTALL}", 2)
    program = shutil.which(python)
    if program is None:
        fail(f"--dynamo-python {python}: no such program; {DYNAMO_INSTALL}", 2)
    return Path(program).absolute()


def table(result: dict[str, Any]) -> str:
    """Return the result as text; CPU is in microseconds per token, by process.

    Below the rows: proxies that could not be measured, prompts a second, and slow clients. Of whole
    requests there is a table of their own.
    """
    lines: list[str] = []
    if result["rows"]:
        lines += table_lines([COLUMNS, *map(_row, result["rows"])], right_aligned_from=0)
    if result.get("requests"):
        rows = _request_rows(result["requests"])
        lines += table_lines([REQUEST_COLUMNS, *rows], right_aligned_from=4)
    for proxy, reason in result["missing"].items():
        lines.append(f"{proxy}: not measured ({reason})")
    for prompts in result["prompts"]:
        lines.append(
            f"{prompts['requests_s']:,} prompts/s of {prompts['tokens']} tokens, {prompts['kind']}"
        )
    for proxy, slow in result.get("slow", {}).items():
        crowd = slow["crowd"]
        lines.append(
            f"{proxy}: ITL p99 of {slow['healthy']} streams {slow['alone']['itl_ms_p99']:.1f} ms "
            f"alone, {crowd['itl_ms_p99']:.1f} ms among {slow['slow']} slow and "
            f"{slow['leavers']} leaving"
        )
        clients = slow["healthy"] + slow["slow"] + slow["leavers"]
        losses = {
            "healthy streams failed": crowd["failed"],
            "slow ones were refused": crowd["slow_refused"],
            "slow ones were dropped": crowd["dropped"],
            "clients did not connect": clients - crowd["connected"],
        }
        lines += [f"{proxy}: {count} {what}" for what, count in losses.items() if count]
    return "\n".join(lines)


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a measurement, in the order of `COLUMNS`."""
    cpu_us = row["cpu_us_per_token"]
    parts = [cpu_us["gateway"], cpu_us["worker"], cpu_us["proxy"]]
    added_itl_ms = row["added_itl_ms_p99"]
    return (
        row["proxy"],
        str(row["streams"]),
        row["mode"],
        f"{row['tokens_s']:,}",
        *(f"{us:.1f} us" for us in parts),
        f"{sum(parts):.1f} us",
        "-" if added_itl_ms is None else f"+{added_itl_ms:.1f} ms",
    )


def _request_rows(measured: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return a row for each proxy, load and server, of the medians over rounds."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in measured:
        groups.setdefault((row["proxy"], row["load"], row["server"]), []).append(row)
    rows: list[tuple[str, ...]] = []
    for (proxy, load, server), rounds in groups.items():
        peers = [group for key, group in groups.items() if key[:2] == (proxy, load)][1:]
        is_compared = server == OWN_SERVER and bool(peers)
        rows.append(
            (
                load if proxy == "none" else f"{load}, {proxy}",
                str(rounds[0]["prompt_tokens"]),
                str(rounds[0]["max_tokens"]),
                server,
                f"{_median(rounds, 'requests_s'):,.0f}",
                f"{_median(rounds, 'cpu_us'):,.0f} us",
                f"{_median(rounds, 'ttft_ms_p50'):,.1f} ms",
                f"{_median(rounds, 'ttft_ms_p99'):,.1f} ms",
                _ratio(rounds, peers[0]) if is_compared else "",
            )
        )
    return rows


def _median(rounds: list[dict[str, Any]], name: str) -> float:
    return statistics.median(row[name] for row in rounds)


def _ratio(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> str:
    """Return ours over theirs in CPU per request: the median of rounds, and the extremes."""
    ratios = [
        own["cpu_us"] / max(other["cpu_us"], 1e-9) for own, other in zip(ours, theirs, strict=True)
    ]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
