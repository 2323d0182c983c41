"""`diptych bench gateway`: tokens through the gateway, long prompts into it, slow clients."""

from __future__ import annotations

import json
import signal
from typing import Annotated, Any

import typer

from .bench import checkpoint, numbers
from .common import fail

PROXIES = ("none", "haproxy", "python")
COLUMNS = ["PROXY", "STREAMS", "MODE", "TOKENS/S", "GATEWAY", "WORKER", "PROXY", "SUM", "ITL P99"]


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
    if output not in ("table", "json"):
        fail(f"-o {output}: expected table or json", 2)
    proxies = tuple(name.strip() for name in proxy.split(","))
    for name in proxies:
        if name not in PROXIES:
            fail(f"--proxy {name}: expected some of {', '.join(PROXIES)}", 2)
    counts = numbers("--streams", streams)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by jobs of a script
    from ...engine.demo import CHECKPOINT
    from ..bench.gateway.run import Options, run

    with checkpoint(model or str(CHECKPOINT)) as folder:
        options = Options(folder, proxies, counts, seconds, slow)
        try:
            result = run(options, lambda line: typer.echo(line, err=True))
        except KeyboardInterrupt:
            fail("interrupted", 130)
    typer.echo(json.dumps(result, indent=2) if output == "json" else table(result))
    if not result["rows"]:
        fail("nothing was measured")


def table(result: dict[str, Any]) -> str:
    """CPU in microseconds per token, by process."""
    rows = [COLUMNS]
    for row in result["rows"]:
        cpu = row["cpu_us_per_token"]
        parts = [cpu[name] for name in ("gateway", "worker", "proxy")]
        added = row["added_itl_ms_p99"]
        rows.append(
            [
                row["proxy"],
                str(row["streams"]),
                row["mode"],
                f"{row['tokens_s']:,}",
                *(f"{us:.1f} us" for us in (*parts, sum(parts))),
                "-" if added is None else f"+{added:.1f} ms",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(t.rjust(w) for t, w in zip(r, widths, strict=True)) for r in rows]
    lines += [f"{name}: not measured ({why})" for name, why in result["missing"].items()]
    for one in result["prompts"]:
        lines.append(f"{one['requests_s']:,} prompts/s of {one['tokens']} tokens, {one['kind']}")
    for name, told in result.get("slow", {}).items():
        alone, crowd = told["alone"], told["crowd"]
        lines.append(
            f"{name}: ITL p99 of {told['healthy']} streams {alone['itl_ms_p99']:.1f} ms alone, "
            f"{crowd['itl_ms_p99']:.1f} ms among {told['slow']} slow and {told['leavers']} leaving"
        )
    return "\n".join(lines)
