"""Which process an agent lives in, and whether that process is gone: what a fence can rely on.

A dead process writes nothing more; a frozen one may wake up and go on. Linux only: elsewhere, and
for a process of another host or pid namespace, nothing is known.
"""

from __future__ import annotations

import os
import select
from pathlib import Path


def _pid_space() -> str:
    """Names the host's boot and the pid namespace: within one such space a pid has one meaning."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _start_time(pid: int) -> int:
    """Start time in clock ticks since boot, field 22 of proc_pid_stat(5)."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    after_command = stat[stat.rindex(")") + 1 :]  # the command may contain spaces
    return int(after_command.split()[19])


def own_process_identity() -> str:
    """Returns the identity of this process, for peers on the same host; empty where there is none.

    It is "boot-id pid-namespace pid start-time": a pid that was given to another process later
    makes another identity.
    """
    try:
        return f"{_pid_space()} {os.getpid()} {_start_time(os.getpid())}"
    except OSError:
        return ""


class ProcessWatch:
    """Watches the process of an identity that `own_process_identity` made, perhaps elsewhere.

    The watch holds a file descriptor until `close`.
    """

    def __init__(self, identity: str) -> None:
        self._pidfd = -1
        self._has_ended: bool | None = None  #: None: nothing can be known
        self.is_own_process = identity != "" and identity == own_process_identity()
        parts = identity.rsplit(" ", 2)
        if len(parts) != 3:
            return
        space, pid, start_time = parts
        try:
            if space != _pid_space() or int(pid) == os.getpid():
                return
            self._pidfd = os.pidfd_open(int(pid))
            # Another start time: the process ended, and its pid was given to another one.
            self._has_ended = _start_time(int(pid)) != int(start_time)
        except (ProcessLookupError, FileNotFoundError):
            self._has_ended = True
        except (AttributeError, OSError):  # no pidfds here, or no permission
            self._has_ended = None

    def has_ended(self) -> bool | None:
        """Returns whether the process has ended, with every thread of it.

        False while one lives, even frozen. None when nothing can be known: another host, another
        pid namespace, or this very process.
        """
        if self._has_ended is False:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)  # readable once the process has ended
            self._has_ended = bool(poll.poll(0))
        return self._has_ended

    def close(self) -> None:
        """Ends the watch; `has_ended` must not be called afterwards."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
