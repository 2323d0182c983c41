"""Hosts on one machine: each has a network card, processes and shared memory of its own.

A host is a network namespace and a first process in namespaces of processes, IPC and mounts, with a
/tmp and a /dev/shm that are its alone. So nothing of one host can be reached from another but over
the cable (`relay.py`): UCX finds neither shared memory nor CMA between them, and takes TCP.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from .relay import GOOD, MTU, LinkQuality, Relay, open_tap

SUBNET = "10.88.77"
OBSERVER = "observer"  #: The test's own place at the switch.
CARD = "eth0"

#: The first process of a host, whose end ends all others.
_FIRST_PROCESS = (
    "mount -t tmpfs tmpfs /tmp && mount -t tmpfs -o size=2g tmpfs /dev/shm && "
    "mount -t proc proc /proc && echo ready && exec sleep infinity"
)


def missing() -> str:
    """Returns why there can be no hosts here; empty: there can."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    for program in ("ip", "unshare", "nsenter"):
        if subprocess.run(["which", program], capture_output=True, check=False).returncode:
            return f"there is no {program}: apt-get install iproute2 util-linux"
    return ""


def _run(*command: str, check: bool = True) -> None:
    subprocess.run(command, check=check, capture_output=True)


@dataclass
class Host:
    """One host. Paths below /run, and others but /tmp and /dev/shm, are the same outside of it."""

    name: str
    address: str
    unshare: subprocess.Popen[str]  #: The first process's parent: ended, it ends all of the host.
    process: int  #: The first process, as seen from outside.

    def command(self, words: Sequence[str]) -> list[str]:
        """Returns the command that runs `words` on the host."""
        enter = ["nsenter", "--target", str(self.process), "--net", "--mount", "--ipc", "--pid"]
        return [*enter, "--wd=/", *words]

    def start(
        self, words: Sequence[str], output: IO[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Starts a process on the host; `end` ends it."""
        return subprocess.Popen(
            self.command(words),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=dict(environment),
            start_new_session=True,
        )

    def run(self, *words: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Runs a command on the host, and waits for its end."""
        return subprocess.run(
            self.command(words), capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def die(self) -> None:
        """Ends all its processes at once."""
        self.unshare.send_signal(signal.SIGKILL)
        self.unshare.wait(10.0)


def end(started: subprocess.Popen[bytes], first: signal.Signals, limit_s: float) -> None:
    """Sends a signal to a process that `Host.start` has started, and after `limit_s` SIGKILL.

    What was started is `nsenter`, which waits for the process itself and ends as that does.
    """
    for number, patience_s in ((first, limit_s), (signal.SIGKILL, 10.0)):
        if started.poll() is not None:
            return
        children = Path(f"/proc/{started.pid}/task/{started.pid}/children")
        for child in children.read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(child), number)
        with suppress(subprocess.TimeoutExpired):
            started.wait(patience_s)


class Machines:
    """Some hosts on one switch, and the observer, who sees all of them."""

    def __init__(self, hosts: dict[str, Host], relay: Relay) -> None:
        self.hosts = hosts
        self._relay = relay

    def link(self, one: str, other: str, quality: LinkQuality) -> None:
        """Gives a link this quality."""
        self._relay.set(one, other, quality)

    def isolate(self, name: str, quality: LinkQuality = LinkQuality(is_up=False)) -> None:
        """Gives all links of a host this quality, but the observer's."""
        for other in self.hosts:
            if other != name:
                self.link(name, other, quality)

    def heal(self) -> None:
        """Makes all links good again."""
        for one in self.hosts:
            for other in (*self.hosts, OBSERVER):
                if one != other:
                    self.link(one, other, GOOD)

    def lose(self, name: str) -> None:
        """A host loses its power: nothing that its processes say at their end is heard."""
        for other in (*self.hosts, OBSERVER):
            if other != name:
                self.link(name, other, LinkQuality(is_up=False))
        self.hosts[name].die()


@contextmanager
def machines(*names: str) -> Iterator[Machines]:
    """Makes hosts of these names, and takes them away."""
    with ExitStack() as stack:
        taps = {}
        tag = os.getpid() % 10_000
        for number, name in enumerate((OBSERVER, *names)):
            taps[name] = open_tap(f"dip{tag}x{number}")
        relay = Relay(taps)
        stack.callback(relay.stop)
        observer_card = f"dip{tag}x0"
        _run("ip", "addr", "add", f"{SUBNET}.1/24", "dev", observer_card)
        _run("ip", "link", "set", observer_card, "mtu", str(MTU), "up")
        hosts = {}
        for number, name in enumerate(names, start=1):
            hosts[name] = stack.enter_context(
                _host(name, f"dip{tag}x{number}", f"{SUBNET}.{number + 10}", f"dip{tag}-{name}")
            )
        yield Machines(hosts, relay)


@contextmanager
def _host(name: str, card: str, address: str, namespace: str) -> Iterator[Host]:
    _run("ip", "netns", "add", namespace)
    try:
        _run("ip", "link", "set", card, "netns", namespace, "name", CARD)
        for words in (
            ("addr", "add", f"{address}/24", "dev", CARD),
            ("link", "set", CARD, "mtu", str(MTU), "up"),
            ("link", "set", "lo", "up"),
        ):
            _run("ip", "-n", namespace, *words)
        isolated = ["unshare", "--mount", "--ipc", "--pid", "--fork", "--kill-child"]
        unshare = subprocess.Popen(
            ["ip", "netns", "exec", namespace, *isolated, "sh", "-c", _FIRST_PROCESS],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            assert unshare.stdout is not None
            assert unshare.stdout.readline() == "ready\n"
            children = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children")
            yield Host(name, address, unshare, int(children.read_text().split()[0]))
        finally:
            unshare.kill()
            unshare.wait(10.0)
    finally:
        _run("ip", "netns", "del", namespace, check=False)
