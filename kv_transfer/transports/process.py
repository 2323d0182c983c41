"""Which process an agent lives in, and whether that process is gone: what a fence can lean on.

A dead process writes nothing more; a frozen one may wake up and go on. Linux only: elsewhere, and
for a process of another host or pid namespace, nothing is known.
"""

from __future__ import annotations

import os
import select
from pathlib import Path


def _space() -> str:
    """The host's boot and the pid namespace: process ids mean the same where these are equal."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _started(pid: int) -> int:
    """Start time in clock ticks since boot, field 22 of proc_pid_stat(5)."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat[stat.rindex(")") + 1 :].split()[19])


def here() -> str:
    """The identity of this process, for peers on the same host; empty where there is none."""
    try:
        return f"{_space()} {os.getpid()} {_started(os.getpid())}"
    except OSError:
        return ""


class Watch:
    """Watches the process of an identity that `here` made.

    `gone()` is True once every thread of it has ended, False while one lives, even frozen, and None
    when nothing can be known: another host, another pid namespace, this very process.
    """

    def __init__(self, identity: str) -> None:
        self._fd = -1
        self._gone: bool | None = None
        self.own = identity != "" and identity == here()  #: this very process
        space, pid, started = [*identity.rsplit(" ", 2), "", ""][:3]
        try:
            if not identity or space != _space() or int(pid) == os.getpid():
                return
            self._fd = os.pidfd_open(int(pid))
            self._gone = _started(int(pid)) != int(started)  # the number was given out again
        except (ProcessLookupError, FileNotFoundError):
            self._gone = True
        except (AttributeError, OSError):
            self._gone = None

    def gone(self) -> bool | None:
        if self._gone is False:
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            self._gone = bool(poll.poll(0))
        return self._gone

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
