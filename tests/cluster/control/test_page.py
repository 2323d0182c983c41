"""The live page in a real browser, over an invented cluster: narrow, dark, large, by keyboard.

`PAGE_PICTURES=FOLDER` keeps pictures of three widths, light and dark.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.browser import CHROMIUM, Page, browser
from tests.support.control_page import invented_control

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
WIDTHS = (360, 390, 768, 1440)
VIEWS = ("cluster", "requests", "whatif", "orders")
PICTURES = os.environ.get("PAGE_PICTURES")
CONNECTED = "document.getElementById('state').textContent == 'healthy'"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
#: Pixels by which the widest text of the fleet stands out of its drawing.
OUTSIDE = """(() => { const all = document.getElementById('fleet').getBoundingClientRect();
return Math.max(...[...document.querySelectorAll('#fleet text')].map((text) => {
  const box = text.getBoundingClientRect();
  return Math.max(box.right - all.right, all.left - box.left);
})); })()"""
SMALLEST_TEXT = """Math.min(...[...document.querySelectorAll('#fleet text')].map(
  (text) => text.getBoundingClientRect().height))"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture(scope="module")
def control() -> Iterator[str]:
    with invented_control() as url:
        yield url


def open_page(page: Page, url: str, width: int, scheme: str = "light") -> None:
    feature = {"name": "prefers-color-scheme", "value": scheme}
    page.call("Emulation.setEmulatedMedia", features=[feature])
    page.open(f"{url}/dashboard", width, 900)
    page.wait(CONNECTED)
    page.wait("document.querySelectorAll('.chart polyline').length > 3")


def press(page: Page, key: str) -> None:
    text = {"Enter": "\r", " ": " "}.get(key, "")
    for kind in ("keyDown", "keyUp"):
        page.call(
            "Input.dispatchKeyEvent", type=kind, key=key, text=text if kind == "keyDown" else ""
        )


def picture(page: Page, name: str) -> None:
    if not PICTURES:
        return
    height = page.run("document.documentElement.scrollHeight")
    width = page.run("window.innerWidth")
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    page.call("Emulation.setDeviceMetricsOverride", **size)
    page.picture(Path(PICTURES) / f"{name}.png")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_no_view_is_wider_than_the_screen(
    page: Page, control: str, width: int, scheme: str
) -> None:
    open_page(page, control, width, scheme)
    for view in VIEWS:
        page.run(f"location.hash = '{view}'")
        page.wait(f"!document.getElementById('{view}').hidden")
        if view == "requests":
            page.wait("document.querySelectorAll('#decisions tbody tr').length > 5")
            page.run("document.querySelectorAll('#decisions tbody tr')[2].click()")
            page.wait("document.querySelectorAll('.timeline').length == 1")
        assert page.run(OVERFLOW) <= 0, view
        picture(page, f"{view}-{width}-{scheme}")
    page.run("location.hash = 'cluster'")
    assert page.run(OUTSIDE) <= 1 and page.run(SMALLEST_TEXT) >= 11


def test_what_is_not_there_yet_is_said(page: Page, control: str) -> None:
    open_page(page, control, 1440)
    page.wait("document.getElementById('actions').tBodies[0].textContent.includes('No orders yet')")


def test_dark_mode_has_a_dark_page_and_light_text(page: Page, control: str) -> None:
    seen = []
    for scheme in ("light", "dark"):
        open_page(page, control, 768, scheme)
        seen.append(page.run("getComputedStyle(document.body).backgroundColor"))
    assert seen == ["rgb(255, 255, 255)", "rgb(20, 24, 29)"]


@pytest.mark.parametrize("width", [390, 1440])
def test_sixty_four_workers_can_be_told_apart(page: Page, width: int) -> None:
    with invented_control(prefill=16, decode=48, samples=3) as url:
        page.open(f"{url}/dashboard", width, 900)
        page.wait("document.querySelectorAll('#fleet g').length == 64")
        assert page.run(OUTSIDE) <= 1 and page.run(SMALLEST_TEXT) >= 11
        assert page.run(OVERFLOW) <= 0
        boxes = page.run(
            "JSON.stringify([...document.querySelectorAll('#fleet .box')].map((box) => "
            "['x', 'y', 'width', 'height'].map((name) => Number(box.getAttribute(name)))))"
        )
        corners = json.loads(boxes)
        for index, (x, y, wide, high) in enumerate(corners):
            for other_x, other_y, other_wide, other_high in corners[:index]:
                apart_x = x >= other_x + other_wide or other_x >= x + wide
                assert apart_x or y >= other_y + other_high or other_y >= y + high
        assert "prefill/000abeef" in page.run("document.getElementById('fleet').textContent")
        assert page.run("document.querySelectorAll('#fleet .changing').length") == 1
        assert page.run("document.getElementById('fleet').getBoundingClientRect().height") < 1400
        picture(page, f"fleet-64-{width}")


def test_the_keyboard_reaches_every_view_and_opens_a_request(page: Page, control: str) -> None:
    open_page(page, control, 1440)
    page.run("document.querySelector('nav button').focus()")
    press(page, "ArrowRight")
    press(page, "Enter")
    page.wait("!document.getElementById('requests').hidden")
    page.wait("document.querySelectorAll('#decisions tbody tr').length > 5")
    page.run("document.querySelectorAll('#decisions tbody tr')[1].focus()")
    press(page, " ")
    page.wait("document.querySelectorAll('#explain').length == 1")
    opened = "document.activeElement.getAttribute('aria-expanded')"
    assert page.run(opened) == "true", "the rows are drawn anew, and the focus stays"
    press(page, "Enter")
    page.wait("document.querySelectorAll('#explain').length == 0")


def test_a_request_s_life_is_drawn_from_what_was_observed(page: Page, control: str) -> None:
    open_page(page, control, 768)
    page.run("location.hash = 'requests'")
    page.wait("document.querySelectorAll('#decisions tbody tr').length > 5")
    page.run("document.querySelector('#decisions tbody tr').click()")
    told = page.run("document.querySelector('.phases').textContent")
    for phase in (
        "in the router's queue 48 ms",
        "prefill (predicted) 188 ms",
        "KV transfer, 12 ms",
    ):
        assert phase in told
    assert "decode, 184 tokens" in told
    lanes = page.run("document.querySelector('.timeline').textContent")
    assert all(lane in lanes for lane in ("router", "prefill", "transfer", "decode"))


def test_the_history_is_asked_for_by_what_is_lacking(control: str) -> None:
    whole = httpx.get(f"{control}/admin/v1/history").json()
    assert len(whole["at"]) == len(whole["series"]["goodput"]) > 300
    later = httpx.get(f"{control}/admin/v1/history", params={"after": whole["at"][-3]}).json()
    assert later["at"][:2] == whole["at"][-2:]
    wrong = httpx.get(f"{control}/admin/v1/history", params={"after": "nan"})
    assert wrong.status_code == 400 and "after=nan" in wrong.text
