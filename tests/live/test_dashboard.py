"""The live page in a real browser."""

from __future__ import annotations

import shutil
import subprocess

import httpx
import pytest

from ..support.live import Live

pytestmark = pytest.mark.cluster
CHROMIUM = shutil.which("chromium")


def page(url: str, folder: str) -> str:
    """The document as a browser has made it, after it has listened for a while."""
    command = [CHROMIUM or "", "--headless", "--no-sandbox", "--disable-gpu", "--timeout=8000"]
    command += [f"--user-data-dir={folder}", "--dump-dom", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
def test_a_browser_shows_pools_and_why_a_request_went_where_it_went(live: Live, tmp_path) -> None:
    answer = live.chat("What is prefill?", max_tokens=4)
    assert answer.status_code == 200
    request = answer.headers["x-request-id"]
    shown = page(f"{live.control}/dashboard#requests", str(tmp_path))
    assert "healthy" in shown and "Control is away" not in shown
    assert all(worker["id"] in shown for worker in live.status()["workers"])
    assert request in shown, "the request's row"
    assert "<rect" in shown.split(request)[1], "its waterfall"


def test_the_page_needs_nothing_from_elsewhere_and_says_nothing_of_the_cluster(live: Live) -> None:
    names = ("dashboard", "dashboard/dashboard.js", "dashboard/dashboard.css")
    files = [httpx.get(f"{live.control}/{name}") for name in names]
    assert [one.status_code for one in files] == [200, 200, 200]
    assert "default-src 'self'" in files[0].headers["content-security-policy"]
    text = "".join(one.text for one in files).replace("http://www.w3.org/2000/svg", "")
    assert "http://" not in text and "https://" not in text
    assert live.status()["model"] not in files[0].text.split()


def test_a_what_if_runs_the_last_requests_again(live: Live, tmp_path) -> None:
    for number in range(8):
        assert live.chat(f"{number}: what is decode?", max_tokens=4).status_code == 200
    asked = {"policy": "min_ttft", "prefill": 2, "decode": 1}
    answer = httpx.post(f"{live.control}/admin/v1/whatif", json=asked, timeout=60)
    told = answer.json()
    assert answer.status_code == 200 and told["requests"] >= 8
    assert (told["same"]["prefill"], told["other"]["prefill"]) == (1, 2)
    assert told["other"]["policy"] == "min_ttft" and 0 <= told["other"]["met"] <= 1
    refused = httpx.post(f"{live.control}/admin/v1/whatif", json={**asked, "policy": "best"})
    assert refused.status_code == 400 and "min_ttft" in refused.text
    if CHROMIUM:
        shown = page(f"{live.control}/dashboard#whatif", str(tmp_path))
        assert '<option value="min_ttft">' in shown
