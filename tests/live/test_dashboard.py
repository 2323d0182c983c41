"""The live page in a real browser. `PICTURES=docs` keeps what the long test sees."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import httpx
import pytest
from diptych.cluster.cli.common import AdminClient
from diptych.cluster.cli.screen import Top

from ..support.browser import CHROMIUM, Page, browser
from ..support.live import BIN, Live, running

pytestmark = pytest.mark.cluster
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium: apt-get install chromium"
)
SCRIPTS = ("draw", "fleet", "history", "timeline", "whatif")
RAN = "document.querySelectorAll('#whatif-curves polyline').length == 3"


def what_if(page: Page, **asked: object) -> None:
    page.run("location.hash = 'whatif'")
    page.wait("document.querySelectorAll('#policy option').length > 5")
    for name, value in asked.items():
        page.run(f"document.getElementById('{name.replace('_', '-')}').value = '{value}'")
    page.run("document.getElementById('whatif-form').requestSubmit()")
    page.wait(RAN)


@needs_chromium
def test_a_browser_shows_pools_and_why_a_request_went_where_it_went(
    live: Live, tmp_path: Path
) -> None:
    for number in range(8):  # a what-if wants some
        answer = live.chat(f"{number}: what is prefill?", max_tokens=4)
        assert answer.status_code == 200
    request = answer.headers["x-request-id"]
    with browser(tmp_path) as page:
        page.open(f"{live.control}/dashboard")
        page.wait("document.getElementById('state').textContent == 'healthy'")
        page.wait("document.querySelectorAll('#fleet g').length > 1")
        drawn = page.run("document.getElementById('fleet').textContent")
        assert all(worker["id"] in drawn for worker in live.status()["workers"])
        page.run("location.hash = 'requests'")
        page.wait(f"document.body.textContent.includes('{request}')")
        row = f"[...document.querySelectorAll('#decisions tr')].find(r => r.title == '{request}')"
        assert page.run(f"{row}.querySelectorAll('svg rect').length") > 1, "its waterfall"
        page.run(f"{row}.click()")
        assert "candidates" in page.run("document.getElementById('explain').textContent")
        what_if(page, policy="min_ttft", prefill_count=2)
        told = page.run("document.getElementById('whatif-runs').textContent")
        assert "min_ttft" in told and "2P 1D" in told


def test_the_page_needs_nothing_from_elsewhere_and_says_nothing_of_the_cluster(live: Live) -> None:
    names = ["dashboard", *(f"dashboard/{name}" for name in ("dashboard.css", "dashboard.js"))]
    names += [f"dashboard/{name}.js" for name in SCRIPTS]
    files = [httpx.get(f"{live.control}/{name}") for name in names]
    assert {one.status_code for one in files} == {200}
    assert "default-src 'self'" in files[0].headers["content-security-policy"]
    text = "".join(one.text for one in files).replace("http://www.w3.org/2000/svg", "")
    assert "http://" not in text and "https://" not in text
    assert live.status()["model"] not in files[0].text.split()


def test_a_what_if_is_refused_by_name(live: Live) -> None:
    asked = {"policy": "best", "prefill": 2, "decode": 1}
    refused = httpx.post(f"{live.control}/admin/v1/whatif", json=asked)
    assert refused.status_code == 400 and "min_ttft" in refused.text


async def screen_of_top(live: Live) -> str:
    """What a terminal shows, as SVG."""
    top = Top(AdminClient(live.control, ""), 0.5)
    async with top.run_test(size=(132, 36)) as pilot:
        await pilot.pause(8.0)
        return top.export_screenshot(title="diptych top")


@pytest.mark.long
@needs_chromium
def test_pictures_of_a_cluster_at_work(tmp_path: Path) -> None:
    pictures = Path(os.environ.get("PICTURES", tmp_path))
    with running(tmp_path / "serve.log", "--prefill", "2", "--decode", "2") as live:
        words = ["--endpoint", live.url, "--profile", "chat", "--users", "12", "--think", "1"]
        words += ["--duration", "70s", "--shared-tokens", "128", "--json", str(tmp_path / "run")]
        load = subprocess.Popen([BIN / "diptych", "loadtest", *words], stdout=subprocess.DEVNULL)
        try:
            with browser(tmp_path / "browser") as page:
                page.open(f"{live.control}/dashboard", 1200, 640)
                page.wait("document.querySelectorAll('#decisions tbody tr').length > 40", 60)
                page.wait("document.querySelectorAll('#fleet .moving').length > 1")
                page.picture(pictures / "dashboard.png")
                page.run("location.hash = 'requests'")
                page.run("document.querySelectorAll('#decisions tbody tr')[4].click()")
                page.picture(pictures / "explain.png")
                what_if(page, prefill_count=1, decode_count=3, load=2)
                page.picture(pictures / "whatif.png")
                svg = tmp_path / "top.svg"
                svg.write_text(asyncio.run(screen_of_top(live)))
                page.open(svg.as_uri(), 1630, 960)
                page.picture(pictures / "top.png")
        finally:
            load.send_signal(signal.SIGINT)
            load.wait(60)
    names = ("dashboard", "explain", "whatif", "top")
    assert all((pictures / f"{name}.png").stat().st_size > 20_000 for name in names)
