"""`diptych bench transfer`: tickets and transports between two processes, under a prefill too."""

from __future__ import annotations

import json
import subprocess

import pytest
from diptych.cluster.cli import app
from diptych.cluster.cli.bench_transfer import _measure_tickets, _table, _ticket_rows
from diptych.kv_transfer import ticket_speed
from typer.testing import CliRunner

from tests.support.live import BIN


def bench(*arguments: str) -> dict:
    command = [str(BIN / "diptych"), "bench", "transfer", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # the document, and nothing that its processes say


@pytest.mark.slow
def test_it_prints_what_scripts_read() -> None:
    result = bench("--mib", "8", "--model", "7M", "--tokens", "256", "-o", "json")
    assert result["memcpy_gib_s"] > 0 and result["checksum_gib_s"] > 0
    cells = {(row["transport"], row["op"], row["run_bytes"]) for row in result["rows"]}
    for name in {"nixl", "shm", "tcp"} - result["missing"].keys():
        assert (name, "write", 262144) in cells
    for row in result["rows"]:
        assert row["gib_s"] > 0 and row["of_memcpy"] > 0 and 0 <= row["checksum_share"] < 1
    measured = {row["transport"] for row in result["tickets"]}
    assert measured == {"nixl", "shm", "tcp"} - result["missing"].keys()
    for row in result["tickets"]:
        assert row["ticket"]["gib_s"] > 0 and row["ticket"]["sender_cpu_ms"] > 0
        if "nixl" in measured:
            assert row["raw"]["rate_ratio"] > 0 and row["raw_pieces"]["cpu_ratio"] > 0
    assert [row["throttled"] for row in result["overlap"]] == [False, True, True, True]
    worst = max(row["exposed_of_transfer"] for row in result["overlap"])
    assert result["exposed_of_transfer"] == pytest.approx(worst, abs=1e-3)
    assert all(row["transfer_s"] > 0 and row["prefill_s"] > 0 for row in result["overlap"])


def test_tickets_that_end_in_a_timeout_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bare transport may well have been measured: its row says nothing of the tickets."""

    def time_out(transport: str, tokens: int) -> None:
        raise TimeoutError(f"{transport}: nothing arrives")

    monkeypatch.setattr(ticket_speed, "measure_tickets", time_out)
    measured = _measure_tickets(128)
    reasons = {name: f"{name}: nothing arrives" for name in ("nixl", "shm", "tcp")}
    assert measured == {"tickets": [], "tickets_missing": reasons}
    rates = {"memcpy_gib_s": 1.0, "checksum_gib_s": 1.0, "rows": [], "missing": {"nixl": "none"}}
    lines = _table(measured | rates).splitlines()
    assert lines[-3:] == [
        "nixl: not here (none)",
        "shm: no tickets (shm: nothing arrives)",
        "tcp: no tickets (tcp: nothing arrives)",
    ]


def test_a_wrong_output_or_model_is_refused_by_name() -> None:
    for arguments in (["-o", "xml"], ["--mib", "8", "--model", "/nowhere"]):
        result = CliRunner().invoke(app, ["bench", "transfer", *arguments])
        assert result.exit_code == 2
        assert arguments[-1] in result.output


def test_the_table_puts_raw_nixl_under_the_tickets_that_it_ran_beside() -> None:
    figures = {"gib_s": 8.0, "sender_cpu_ms": 120.0, "receiver_cpu_ms": 60.0}
    raw = {"figures": figures | {"gib_s": 10.0}, "rate_ratio": 0.8, "cpu_ratio": 1.5}
    rows = _ticket_rows(
        [
            {"transport": "nixl", "ticket": figures, "raw": raw, "raw_pieces": raw},
            {"transport": "tcp", "ticket": figures, "raw": None, "raw_pieces": None},
        ]
    )
    assert rows == [
        ("nixl", "8.00", "120 sender", "60 receiver", "", ""),
        ("  raw NIXL", "10.00", "120 sender", "60 receiver", "0.80", "1.50"),
        ("  raw NIXL, in pieces", "10.00", "120 sender", "60 receiver", "0.80", "1.50"),
        ("tcp", "8.00", "120 sender", "60 receiver", "", ""),
    ]
