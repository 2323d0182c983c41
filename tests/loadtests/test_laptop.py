"""A cluster for one run: the ports that it gets, and what is said where it does not start."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from diptych.loadtests import laptop, ports
from diptych.loadtests.errors import LoadError

LINUX_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_ports_are_different_and_none_that_linux_gives_away() -> None:
    first, last = (int(word) for word in LINUX_PORTS.read_text().split())
    chosen = ports.free_ports(200)
    assert len(set(chosen)) == 200
    assert ports.free_ports(0) == []
    assert not [port for port in chosen if first <= port <= last]


def test_a_port_that_is_taken_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((ports.HOST, 0)) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr(ports, "PORTS", range(taken, taken + 1))
        with pytest.raises(OSError, match="no free port"):
            ports.free_ports(1)


@pytest.mark.parametrize(
    ("printed", "reason"),
    [
        (
            "[ 12.4 s] Gateway: healthy\ndiptych: Control did not start: Address already in use\n"
            "[ 43.0 s] stopping\n[2026-11-27 E 26979] task_manager.cc:1545: Failed to push error\n",
            "Control did not start: Address already in use",
        ),
        ("[  0.3 s] starting Ray\n\n", r"\[  0.3 s\] starting Ray"),
        ("", "no output"),
    ],
)
def test_a_failed_start_gives_the_reason_of_the_command(
    tmp_path: Path, printed: str, reason: str
) -> None:
    command = tmp_path / "diptych"
    log = tmp_path / "printed"
    log.write_text(printed)
    command.write_text(f"#!/bin/sh\ncat {log}\nexit 1\n")
    command.chmod(0o755)
    with pytest.raises(LoadError, match=f"diptych serve did not start: {reason}$"):  # noqa: SIM117
        with laptop.cluster(str(command), []):
            pass
