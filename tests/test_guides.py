"""The cheap commands of the site's own pages do what they say; test_docs.py knows the other ones' options."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from diptych.cluster.config import load_config

from tests.support.live import BIN

ROOT = Path(__file__).parent.parent
PAGES = sorted([*(ROOT / "docs/guides").glob("*.md"), *(ROOT / "docs/concepts").glob("*.md")])
PROGRAM = ".venv/bin/diptych "
#: Commands that need no cluster and end within seconds.
CHEAP = ("plan", "simulate", "render", "keys add", "keys list", "config")


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of a page, those inside of lists too, without their indentation."""
    fenced = re.findall(
        rf"^( *)```{language}\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE
    )
    return [re.sub(rf"^{indent}", "", text, flags=re.MULTILINE) for indent, text in fenced]


def commands(page: Path) -> list[str]:
    """Return the page's commands of `diptych`, each in one line."""
    lines = "".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith(PROGRAM)]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if page.stem == "choose_a_layout" else [])
        for page in PAGES
        if commands(page)
    ],
    ids=lambda page: page.stem,
)
def test_the_cheap_commands_of_a_page_run_in_their_order(page: Path, tmp_path: Path) -> None:
    for command in commands(page):
        if not command.removeprefix(PROGRAM).startswith(CHEAP):
            continue
        done = subprocess.run(
            command.replace(PROGRAM, f"{BIN}/diptych "),
            shell=True,
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "120"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, (command, done.stdout + done.stderr)


def test_the_settings_on_the_pages_are_settings(tmp_path: Path) -> None:
    texts = [text for page in PAGES for text in blocks(page, "yaml")]
    assert len(texts) >= 2
    for text in texts:
        assert isinstance(yaml.safe_load(text), dict)
        file = tmp_path / "cluster.yaml"
        file.write_text(text)
        load_config(file, {})
