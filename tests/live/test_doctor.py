"""A NIXL that silently fell back to TCP, as `diptych doctor` sees it on a real cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.live import BIN, Live, eventually, free_port, running

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.mark.slow
def test_a_tcp_fallback_is_found_named_and_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nixl", reason="NIXL has no wheel for this platform")
    monkeypatch.setenv("UCX_TLS", "tcp")
    with running(tmp_path / "serve.log") as live:
        done = live.cli("doctor", "-o", "json", "--mib", "4")
        report = json.loads(done.stdout)
        assert (done.returncode, report["state"]) == (3, "degraded")
        assert {pair["transport"] for pair in report["pairs"]} == {"nixl (tcp)"}
        (found,) = [one for one in report["findings"] if one["severity"] == "warning"]
        assert found["what"] == "NIXL fell back to TCP: UCX_TLS=tcp leaves out cma"
        assert len(found["where"]) == 2
        table = live.cli("doctor", "--mib", "4")
        assert table.returncode == 3 and table.stdout.startswith("DEGRADED")
        assert "unset UCX_TLS" in table.stdout
        pages = scraped(live)
        assert 'transport="nixl (tcp)"} 1.0' in pages, "what moved says so, without a doctor"
        assert 'transport="nixl"} 1.0' not in pages
        wrong = httpx.post(f"{live.control}/admin/v1/doctor", content=b'{"mib": 0}')
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "mib"
        eventually(live.idle)


def scraped(live: Live) -> str:
    groups = httpx.get(f"{live.control}/metrics/targets").json()
    addresses = [address for group in groups for address in group["targets"]]
    return "".join(httpx.get(f"http://{address}/metrics").text for address in addresses)


def test_without_a_gateway_it_looks_at_this_host_and_fails() -> None:
    where = f"http://127.0.0.1:{free_port()}"
    command = [str(BIN / "diptych"), "doctor", "-o", "json", "--admin", where]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "this host only" in done.stderr and "no Control at" in done.stderr
    report = json.loads(done.stdout)
    assert report["pairs"] == [] and report["scope"] == "this host only, no worker"
    (seen,) = report["workers"]
    assert seen["environment"]["memcpy_gib_s"] > 0
    assert seen["environment"]["versions"]["python"].startswith(f"3.{sys.version_info.minor}")
    assert str(os.getpid()) in seen["environment"]["cma"]
