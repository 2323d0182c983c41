"""The documentation site: every link and anchor leads somewhere, and what is made from the code is there."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = runpy.run_path(str(ROOT / "docs/site/pages.py"))
#: attributes by which a page loads something as it is opened
LOADING = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src")}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def build(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    return subprocess.run(
        [*command, "--site-dir", str(folder), *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=False,
    )


class LoadedAddresses(HTMLParser):
    """Collects what a page loads from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.found += [
            value
            for name, value in attrs
            if (tag, name) in LOADING
            and value
            and value.startswith(("http:", "https:", "//"))
            and values.get("rel") not in ("canonical", "alternate")
        ]


@pytest.mark.slow
def test_strict_building_finds_pages_of_every_kind(site: Path) -> None:
    for page in (
        "index.html",
        "start.html",
        "guides/choose_a_layout.html",
        "router/index.html",
        "deploy/observability/runbooks/DiptychErrors.html",
        "reference/cli.html",
    ):
        assert (site / page).is_file(), page
    assert "diptych loadtest compare" in (site / "reference/cli.html").read_text()
    assert "kv_transfer_failed" in (site / "reference/errors.html").read_text()
    assert "diptych_requests_total" in (site / "reference/metrics.html").read_text()
    assert "/v1/chat/completions" in (site / "reference/http_routes.html").read_text()
    grpc = re.sub("<[^>]*>", "", (site / "reference/grpc.html").read_text())
    assert "service Inference" in grpc and "service Admin" in grpc


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        addresses = LoadedAddresses()
        addresses.feed(page.read_text())
        assert addresses.found == [], page


@pytest.mark.slow
def test_links_that_lead_nowhere_end_the_build(tmp_path: Path) -> None:
    hook = tmp_path / "wrong_links.py"
    hook.write_text(
        "def on_page_markdown(markdown, page, **_):\n"
        "    wrong = '[x](no_such_page.md) [y](router/README.md#no-such-heading)'\n"
        "    return f'{markdown}\\n\\n{wrong}\\n' if page.file.src_uri == 'README.md' else markdown\n"
    )
    settings = tmp_path / "mkdocs.yml"
    settings.write_text(
        f"INHERIT: {ROOT / 'mkdocs.yml'}\n"
        f"docs_dir: {ROOT / 'docs'}\n"
        f"hooks: [{ROOT / 'docs/site/pages.py'}, {hook}]\n"
    )
    done = build(tmp_path / "site", "--config-file", str(settings))
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "no_such_page.md" in said and "no-such-heading" in said


def test_lists_are_indented_for_mkdocs() -> None:
    page = "Text\n- one\n  more\n  ```sh\n  run\n  ```\n\n1. first\n\n   second\n\nend\n"
    assert PAGES["indent_lists"](page) == (
        "Text\n\n- one\n    more\n    ```sh\n    run\n    ```\n\n1. first\n\n    second\n\nend\n"
    )


def test_a_folder_is_linked_by_its_readme() -> None:
    text = PAGES["link_folders"]("[a](../router/) [b](../router#figures) [c](x.md)", "docs/a.md")
    assert text == "[a](../router/README.md) [b](../router/README.md#figures) [c](x.md)"
