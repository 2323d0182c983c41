"""`diptych bench transfer`: how fast KV moves here, and how much of it hides behind prefill."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from .bench import checkpoint, interrupt_at_end
from .common import check_output, fail, table_lines

TRANSPORTS = ("nixl", "shm", "tcp")  #: The ways in which KV can move; NIXL is NVIDIA's library.
#: Sizes of the contiguous pieces of memory that one operation moves.
RUN_BYTES = (64 << 10, 256 << 10, 1 << 20)
#: RUN is one of these sizes. OF MEMCPY: speed over that of copying memory. CHECKSUMS: the share of
#: the time to checksum and move a block that the checksum takes.
COLUMNS = ("TRANSPORT", "OP", "RUN", "GIB/S", "OF MEMCPY", "CHECKSUMS")
#: CPU MS/GIB is that of the sender, and the column without a name that of the receiver.
TICKET_COLUMNS = ("TICKETS OVER", "GIB/S", "CPU MS/GIB", "", "RATE OF RAW", "CPU OF RAW")


def transfer(
    mib: Annotated[int, typer.Option(min=8, max=4096, help="Moved by each bare transport.")] = 64,
    model: Annotated[
        str, typer.Option(help="Prefilled while its KV moves: a folder, 205M or 7M; empty: none.")
    ] = "205M",
    tokens: Annotated[int, typer.Option(min=128, help="Of that prompt, and of a ticket.")] = 2048,
    output: Annotated[str, typer.Option("-o", "--output", help="table or json")] = "table",
) -> None:
    """Measure tickets and bare transports between two processes here, and what a prefill hides.

    A ticket is a whole transfer with its protocol and checksums. OF RAW: the ticket's rate, and the
    CPU of both processes, divided by those of NIXL alone with the same bytes.
    """
    check_output(output)
    interrupt_at_end()
    try:
        # A wrong name is found before anything is measured.
        with checkpoint(model) if model else nullcontext() as folder:
            result = _measure_tickets(tokens)
            result |= _measure_transports(mib << 20)
            if folder:
                result |= _measure_overlap(folder, tokens)
    except KeyboardInterrupt:
        fail("interrupted", 130)
    typer.echo(json.dumps(result, indent=2) if output == "json" else _table(result))


def _measure_tickets(tokens: int) -> dict[str, Any]:
    """Send tickets of the KV of `tokens` tokens, with checksums, beside raw NIXL, NVIDIA's library.

    `tickets_missing` says of each transport without a row why it has none. Torch is not needed.
    """
    import msgspec

    from ...kv_transfer.errors import TransportUnavailable
    from ...kv_transfer.ticket_speed import measure_tickets

    rows: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    for transport in TRANSPORTS:
        typer.echo(f"sending tickets of {tokens} tokens over {transport}", err=True)
        try:
            row = measure_tickets(transport, tokens)
        except (TransportUnavailable, TimeoutError) as error:
            missing[transport] = str(error)
            continue
        rows.append(msgspec.to_builtins(row))
    return {"tickets": rows, "tickets_missing": missing}


def _measure_transports(size_bytes: int) -> dict[str, Any]:
    """Measure each transport that is here, and note why others are missing.

    This imports torch, which takes seconds, so it comes after the checks of the options.
    """
    import msgspec

    from ...kv_transfer import speed
    from ...kv_transfer.errors import TransportUnavailable

    checksum_gib_s = round(speed.checksum(size_bytes), 2)
    result: dict[str, Any] = {
        "memcpy_gib_s": round(speed.memcpy(size_bytes), 2),
        "checksum_gib_s": checksum_gib_s,
        "rows": [],
        "missing": {},
    }
    for transport in TRANSPORTS:
        typer.echo(f"moving {size_bytes >> 20} MiB over {transport}", err=True)
        try:
            measurements = speed.measure(transport, size_bytes, RUN_BYTES)
        except (TransportUnavailable, TimeoutError) as error:
            result["missing"][transport] = str(error)
            continue
        for measurement in measurements:
            row = msgspec.structs.asdict(measurement)
            row["gib_s"] = round(measurement.gib_s, 2)
            row["of_memcpy"] = round(measurement.of_memcpy, 2)
            # Of the time to checksum and move a block, the checksum's share: with speeds t and c it
            # is (1/c) / (1/c + 1/t) = t / (t + c).
            row["checksum_share"] = round(
                measurement.gib_s / (measurement.gib_s + checksum_gib_s), 2
            )
            result["rows"].append(row)
    return result


def _measure_overlap(folder: Path, tokens: int) -> dict[str, Any]:
    """Prefill a prompt while its KV moves to another process, and see how much that hides.

    The exposed part of a transfer is what comes after the end of the prefill. `folder` is the
    checkpoint's. Fails if the engine cannot run it.
    """
    import msgspec

    from ...engine.bench.overlap import measure_overlap
    from ...engine.errors import EngineError

    try:
        typer.echo(f"prefilling {tokens} tokens, at full speed and over throttled links", err=True)
        measurements = measure_overlap(folder, tokens)
    except (EngineError, TimeoutError) as error:
        fail(str(error))
    worst_share = max(measurement.exposed_of_transfer for measurement in measurements)
    rows = [
        {name: round(value, 4) for name, value in msgspec.structs.asdict(measurement).items()}
        for measurement in measurements
    ]
    return {"exposed_of_transfer": round(worst_share, 4), "overlap": rows}


def _table(result: dict[str, Any]) -> str:
    rows = [
        (
            row["transport"],
            row["op"],
            f"{row['run_bytes'] >> 10} KiB",
            f"{row['gib_s']:.2f}",
            f"{row['of_memcpy']:.2f}",
            f"{row['checksum_share']:.0%}",
        )
        for row in result["rows"]
    ]
    lines = [
        f"memcpy {result['memcpy_gib_s']} GiB/s, checksum {result['checksum_gib_s']} GiB/s a core",
        *table_lines([COLUMNS, *rows]),
        "",
        *table_lines([TICKET_COLUMNS, *_ticket_rows(result["tickets"])]),
        "",
    ]
    for transport, reason in result["missing"].items():
        lines.append(f"{transport}: not here ({reason})")
    for transport, reason in result["tickets_missing"].items():
        if transport not in result["missing"]:
            lines.append(f"{transport}: no tickets ({reason})")
    for row in result.get("overlap", ()):
        link = "throttled " if row["throttled"] else ""
        lines.append(
            f"{link}transfer of {row['of_prefill']:.1%} of the prefill's time: "
            f"{row['exposed_of_transfer']:.1%} of it exposed ({row['exposed_s'] * 1e3:.1f} ms)"
        )
    return "\n".join(lines)


def _ticket_rows(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return a line for each transport's tickets, and one for either kind of raw NIXL beside them.

    None in place of raw figures: this kind was not measured.
    """
    lines: list[tuple[str, ...]] = []
    for row in rows:
        lines.append((row["transport"], *_figures(row["ticket"]), "", ""))
        for key, name in (("raw", "raw NIXL"), ("raw_pieces", "raw NIXL, in pieces")):
            raw = row[key]
            if raw is None:
                continue
            ratios = (f"{raw['rate_ratio']:.2f}", f"{raw['cpu_ratio']:.2f}")
            lines.append((f"  {name}", *_figures(raw["figures"]), *ratios))
    return lines


def _figures(figures: dict[str, float]) -> tuple[str, str, str]:
    """Return the cells of speed and of the CPU time, in ms/GiB, of either end."""
    sender = f"{figures['sender_cpu_ms']:.0f} sender"
    receiver = f"{figures['receiver_cpu_ms']:.0f} receiver"
    return f"{figures['gib_s']:.2f}", sender, receiver
