"""Chooses ports of this machine for servers that start later, up to a minute later."""

from __future__ import annotations

import contextlib
import random
import socket

HOST = "127.0.0.1"
#: Above Ray's workers' (10002 to 19999), and below those that Linux gives to outgoing connections and to
#: servers that leave the choice to it (32768 to 60999): Ray's processes open dozens of these while a
#: cluster starts, so a port of that range may be taken before its server comes up.
PORTS = range(20_000, 32_768)
ATTEMPTS_PER_PORT = 100


def free_ports(count: int) -> list[int]:
    """Return `count` different ports of `PORTS` that nothing listens on at `HOST`.

    Another process may still take one of them before its server does. Raises OSError if so many are
    taken that none is found.
    """
    ports: list[int] = []
    attempts_left = count * ATTEMPTS_PER_PORT
    while len(ports) < count:
        if not attempts_left:
            raise OSError(f"no free port was found between {PORTS.start} and {PORTS.stop - 1}")
        attempts_left -= 1
        port = random.SystemRandom().choice(PORTS)
        if port not in ports and _is_free(port):
            ports.append(port)
    return ports


def _is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind((HOST, port))
        return True
    return False
