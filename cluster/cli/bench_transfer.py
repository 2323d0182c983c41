"""`diptych bench transfer`: how fast KV moves here, and how much of it hides behind prefill."""

from __future__ import annotations

import json
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from .bench import checkpoint
from .common import fail

TRANSPORTS = ("nixl", "shm", "tcp")
RUN_BYTES = (64 << 10, 256 << 10, 1 << 20)
COLUMNS = ["TRANSPORT", "OP", "RUN", "GIB/S", "OF MEMCPY", "CHECKSUMS"]


def transfer(
    mib: Annotated[int, typer.Option(min=8, max=4096, help="Moved by each measurement.")] = 64,
    model: Annotated[
        str, typer.Option(help="Prefilled to see what hides: a folder, 205M or 7M; empty: none.")
    ] = "205M",
    tokens: Annotated[int, typer.Option(min=128, help="Of its prompt.")] = 2048,
    output: Annotated[str, typer.Option("-o", "--output", help="table or json")] = "table",
) -> None:
    """Measure the transports between two processes here, and their overlap with prefill."""
    if output not in ("table", "json"):
        fail(f"-o {output}: expected table or json", 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by jobs of a script
    try:
        with checkpoint(model) if model else nullcontext() as folder:  # wrong names are told first
            result = _measure(mib << 20)
            if folder:
                result |= _overlap(folder, tokens)
    except KeyboardInterrupt:
        fail("interrupted", 130)
    typer.echo(json.dumps(result, indent=2) if output == "json" else _table(result))


def _measure(size: int) -> dict[str, Any]:
    """Torch is imported here, not before the options have been found right."""
    import msgspec

    from ...kv_transfer import speed
    from ...kv_transfer.errors import TransportUnavailable

    result: dict[str, Any] = {
        "memcpy_gib_s": round(speed.memcpy(size), 2),
        "checksum_gib_s": round(speed.checksum(size), 2),
        "rows": [],
        "missing": {},
    }
    for name in TRANSPORTS:
        typer.echo(f"moving {size >> 20} MiB over {name}", err=True)
        try:
            rows = speed.measure(name, size, RUN_BYTES)
        except (TransportUnavailable, TimeoutError) as error:
            result["missing"][name] = str(error)
            continue
        for row in rows:
            share = row.gib_s / (row.gib_s + result["checksum_gib_s"])
            fields = {"gib_s": round(row.gib_s, 2), "of_memcpy": round(row.of_memcpy, 2)}
            result["rows"].append(
                msgspec.structs.asdict(row) | fields | {"checksum_share": round(share, 2)}
            )
    return result


def _overlap(folder: Path, tokens: int) -> dict[str, Any]:
    import msgspec

    from ...engine.bench.overlap import measure_overlap
    from ...engine.errors import EngineError

    try:
        typer.echo(f"prefilling {tokens} tokens over a throttled link", err=True)
        rows = measure_overlap(folder, tokens)
    except EngineError as error:
        fail(str(error))
    worst = max(row.exposed_of_transfer for row in rows)
    return {
        "exposed_of_transfer": round(worst, 4),
        "overlap": [
            {k: round(v, 4) for k, v in msgspec.structs.asdict(row).items()} for row in rows
        ],
    }


def _table(result: dict[str, Any]) -> str:
    lines = [
        f"memcpy {result['memcpy_gib_s']} GiB/s, checksum {result['checksum_gib_s']} GiB/s a core"
    ]
    rows = [COLUMNS]
    for row in result["rows"]:
        share, of = f"{row['checksum_share']:.0%}", f"{row['of_memcpy']:.2f}"
        run = f"{row['run_bytes'] >> 10} KiB"
        rows.append([row["transport"], row["op"], run, f"{row['gib_s']:.2f}", of, share])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        lines.append("  ".join(t.ljust(w) for t, w in zip(cells, widths, strict=True)).rstrip())
    lines += [f"{name}: not here ({why})" for name, why in result["missing"].items()]
    for row in result.get("overlap", ()):
        lines.append(
            f"transfer of {row['of_prefill']:.0%} of the prefill's time: "
            f"{row['exposed_of_transfer']:.1%} of it exposed"
        )
    return "\n".join(lines)
