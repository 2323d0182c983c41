"""`diptych bench gateway`: tokens through the gateway, long prompts into it, slow clients."""

from __future__ import annotations

import json
import signal
from typing import Annotated, Any

import typer

from .bench import checkpoint, numbers
from .common import check_output, fail, interrupt_on, table_lines
from .progress import step_progress

PROXIES = ("none", "haproxy", "python")  #: What stands between clients and the gateway.
#: MODE is paced (each stream gets tokens at a fixed rate) or flat (as fast as they go). The columns
#: from GATEWAY to SUM are the CPU time of a token in each process; ITL P99 is what is added to the
#: pace, and only paced rows have it.
COLUMNS = ("PROXY", "STREAMS", "MODE", "TOKENS/S", "GATEWAY", "WORKER", "PROXY", "SUM", "ITL P99")


def gateway(
    streams: Annotated[str, typer.Option(help="At a time, in turn.")] = "128,512",
    proxy: Annotated[
        str, typer.Option(help="none (the gateway's own socket), haproxy, python (Serve's).")
    ] = "none,haproxy,python",
    seconds: Annotated[float, typer.Option(min=2, max=100, help="Of a paced row.")] = 10.0,
    slow: Annotated[
        bool, typer.Option("--slow", help="Also 1,000 slow and 1,000 leaving clients among 200.")
    ] = False,
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
    interrupt_on(signal.SIGINT)
    # These imports take long: the options are checked first.
    from ...engine.demo import CHECKPOINT
    from ..bench.gateway.run import GatewayBenchOptions, run

    with checkpoint(model or str(CHECKPOINT)) as folder:
        options = GatewayBenchOptions(
            model=folder, proxies=proxies, streams=stream_counts, seconds=seconds, slow=slow
        )
        try:
            with step_progress("measuring") as report:
                result = run(options, report)
        except KeyboardInterrupt:
            fail("interrupted", 130)
    typer.echo(json.dumps(result, indent=2) if output == "json" else table(result))
    if not result["rows"]:
        fail("nothing was measured")


def table(result: dict[str, Any]) -> str:
    """Return the result as text; CPU is in microseconds per token, by process.

    Below the rows: proxies that could not be measured, prompts a second, and slow clients.
    """
    lines = table_lines([COLUMNS, *map(_row, result["rows"])], right_aligned_from=0)
    for proxy, reason in result["missing"].items():
        lines.append(f"{proxy}: not measured ({reason})")
    for prompts in result["prompts"]:
        lines.append(
            f"{prompts['requests_s']:,} prompts/s of {prompts['tokens']} tokens, {prompts['kind']}"
        )
    for proxy, slow in result.get("slow", {}).items():
        lines.append(
            f"{proxy}: ITL p99 of {slow['healthy']} streams {slow['alone']['itl_ms_p99']:.1f} ms "
            f"alone, {slow['crowd']['itl_ms_p99']:.1f} ms among {slow['slow']} slow and "
            f"{slow['leavers']} leaving"
        )
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
