"""`diptych loadtest` against a real cluster: its figures are the server's, its report renders."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.loadtests.test_report import check_screenshot, screenshot
from tests.support.live import Live, eventually, free_port

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def environment(live: Live) -> dict[str, str]:
    path = f"{BIN}:{os.environ['PATH']}"
    return {
        **os.environ,
        "PATH": path,
        "DIPTYCH_ENDPOINT": live.url,
        "DIPTYCH_ADMIN": live.control,
    }


def loadtest(live: Live, folder: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, document, and what was printed."""
    out = folder / "run.json"
    command = [str(BIN / "diptych"), "loadtest", *arguments, "--json", str(out)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env=environment(live), check=False
    )
    assert out.exists(), done.stderr
    return done.returncode, json.loads(out.read_text()), done.stdout + done.stderr


def broken(live: Live) -> list[dict[str, int]]:
    return [worker["transfer"]["failures"] for worker in live.status()["workers"]]


def test_fifty_users_are_counted_as_the_server_counts_them(live: Live, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    options = ["--profile", "chat", "--users", "50", "--duration", "5s", "--think", "1"]
    lengths = ["--prompt-tokens", "16-64", "--output-tokens", "8-24", "--shared-tokens", "64"]
    before = broken(live)
    code, run, told = loadtest(live, tmp_path, *options, *lengths, "--html", str(page))
    assert code == 0 and run["summary"]["served"] > 50 and not run["summary"]["errors"]
    rows = {row["figure"]: row["deviation"] for row in run["server"]}
    assert abs(rows["requests answered"]) < 0.05 and abs(rows["output tokens"]) < 0.05
    assert "goodput" in told and "under way" in told, "figures at the end, progress before"
    assert run["config"]["users"] == 50 and run["endpoint"]["model"] == "demo"
    eventually(live.idle)
    assert broken(live) == before, "answers of one token, asked for at first, break no transfer"
    check_screenshot(screenshot(page, tmp_path / "report.png"), missed=False)


@pytest.mark.long
def test_the_times_of_fifty_users_are_those_that_the_server_counts(
    live: Live, tmp_path: Path
) -> None:
    """On a machine that does nothing else: a client that reads late sees two tokens as one."""
    options = ["--profile", "chat", "--users", "50", "--duration", "30s"]
    lengths = ["--prompt-tokens", "16-128", "--shared-tokens", "128"]
    _, run, told = loadtest(live, tmp_path, *options, *lengths)
    rows = {row["figure"]: row["deviation"] for row in run["server"]}
    times = ["TTFT mean, ms", "TPOT mean, ms", "E2E mean, ms"]
    assert [figure for figure in times if not abs(rows[figure]) < 0.05] == [], told
    eventually(live.idle)


def test_two_processes_offer_the_arrivals_of_one_and_a_gate_is_the_exit_code(
    live: Live, tmp_path: Path
) -> None:
    options = ["--profile", "constant", "--rate", "6", "--duration", "2s", "--processes", "2"]
    lengths = ["--prompt-tokens", "40", "--output-tokens", "10", "--slo", "ttft=1ms,itl=10s"]
    code, run, told = loadtest(live, tmp_path, *options, *lengths, "--gate", "goodput>=0.5")
    assert code == 4 and "MISSED: goodput>=0.5" in told
    rows = [dict(zip(run["columns"], row, strict=True)) for row in run["requests"]]
    assert [row["at_s"] for row in rows] == [round(n / 6, 3) for n in range(12)]
    assert {(row["prompt"], row["output"]) for row in rows} == {(40, 10)}, "lengths are exact"
    assert len({row["id"].split("-")[2] for row in rows}) == 2, "both took part"
    assert run["client"]["processes"] == 2


def test_locusts_page_shows_goodput_and_grpc_streams_are_measured(live: Live) -> None:
    port = free_port()
    command = [str(BIN / "locust"), "-f", str(ROOT / "loadtests/locustfile.py"), "--autostart"]
    command += ["-u", "1", "--host", live.url, "--web-port", str(port)]
    command += ["--grpc", f"127.0.0.1:{live.grpc}", "--rate", "5", "--duration", "60"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:

        def stats() -> list[dict[str, Any]] | None:
            try:
                found = httpx.get(f"http://127.0.0.1:{port}/stats/requests").json()
            except (httpx.HTTPError, ValueError):
                return None
            kinds = {entry["method"] for entry in found.get("stats", ())}
            # The table of goodput is filled a moment after the usual figures.
            rows = [row for table in found.get("extended_stats", ()) for row in table["data"]]
            return rows if rows and {"TTFT", "ITL", "SLO", "gRPC"} <= kinds else None

        row = eventually(stats, 60.0)[0]
        assert row["requests"] >= 1 and row["goodput"].endswith("%") and not row["error"]
        assert "Goodput" in httpx.get(f"http://127.0.0.1:{port}/").text
    finally:
        process.terminate()
        process.wait(30)


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "loadtests/README.md").read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", "").strip().split("\n")]
    return [line.removeprefix(".venv/bin/") for line in lines]


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(commands())))
def test_the_readmes_commands_do_what_it_says(
    number: int, live: Live, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In their order and in one folder: the comparison is of two runs before it. Shorter."""
    folder = tmp_path_factory.getbasetemp() / "readme"
    folder.mkdir(exist_ok=True)
    command = re.sub(r"--duration \S+", "--duration 4", commands()[number])
    command = command.replace("http://127.0.0.1:8000", live.url)
    if command == "make loadtest":
        written = [f"--html={folder}/make.html", f"--json={folder}/make.json"]
        command = f'make -C {ROOT} loadtest ARGS="--duration 12s {" ".join(written)}"'
    command = command.replace("-f loadtests", f"-f {ROOT}/loadtests")
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment(live),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name in re.findall(r"\S+\.(?:html|json)", command):
        assert (folder / name.rpartition("=")[2].rpartition("/")[2]).stat().st_size > 1000
