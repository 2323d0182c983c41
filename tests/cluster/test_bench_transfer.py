"""`diptych bench transfer`: transports between two processes, a prefill over a slow link."""

from __future__ import annotations

import json

import pytest
from diptych.cluster.cli import app
from typer.testing import CliRunner


def bench(*arguments: str) -> dict:
    result = CliRunner().invoke(app, ["bench", "transfer", *arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_it_prints_what_scripts_read() -> None:
    result = bench("--mib", "8", "--model", "7M", "--tokens", "256", "-o", "json")
    assert result["memcpy_gib_s"] > 0 and result["checksum_gib_s"] > 0
    cells = {(row["transport"], row["op"], row["run_bytes"]) for row in result["rows"]}
    for name in {"nixl", "shm", "tcp"} - result["missing"].keys():
        assert (name, "write", 262144) in cells
    for row in result["rows"]:
        assert row["gib_s"] > 0 and row["of_memcpy"] > 0 and 0 < row["checksum_share"] < 1
    assert len(result["overlap"]) == 3
    worst = max(row["exposed_of_transfer"] for row in result["overlap"])
    assert result["exposed_of_transfer"] == pytest.approx(worst, abs=1e-3)
    assert all(row["transfer_s"] > 0 and row["prefill_s"] > 0 for row in result["overlap"])


def test_a_wrong_output_or_model_is_refused_by_name() -> None:
    for arguments in (["-o", "xml"], ["--mib", "8", "--model", "/nowhere"]):
        result = CliRunner().invoke(app, ["bench", "transfer", *arguments])
        assert result.exit_code == 2
        assert arguments[-1] in result.output
