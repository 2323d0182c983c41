"""Processes of a machine that are no process of a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from diptych.loadtests import footprint


@pytest.mark.parametrize("command", [b"", b"play\0caf\xe9.ogg\0"])
def test_a_command_line_of_any_bytes_is_read(tmp_path: Path, command: bytes) -> None:
    (tmp_path / "cmdline").write_bytes(command)
    assert footprint._read_footprint(tmp_path) is None
