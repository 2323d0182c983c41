"""Runs a cluster in a child process, and again when the cluster has lost what it cannot do without.

`diptych serve` has two processes of its own. The parent, the supervisor, uses neither Ray nor
threads: it waits. The child starts the cluster, and watches it. When Ray's GCS or raylet ends, no
replica lives for long, and Ray's own library in the child may end it: so the child ends, the parent
kills all that is left, and starts another child.

- A child that has been ready before, and was lost, is started again, up to `RESTARTS_LIMIT` times
  in `RESTARTS_WINDOW_S`. It was lost, too, if a signal or a library has ended it.
- A child that ends otherwise ends `serve`: it was asked to, or it could not start.
- When the parent is killed, the child stops the cluster as for ^C.
- When the terminal is closed, the parent has the child stop the cluster, unless `nohup` forbids it.
- A cluster that is stopped before it was ready is not shut down but killed, which is quicker.
- In all cases nothing is left behind: no process, and no folder of Ray's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum

import msgspec

from .processes import adopt_orphans, descendants, end_descendants, end_with_parent

RESTARTS_LIMIT = 5
RESTARTS_WINDOW_S = 600.0
LOST_EXIT_CODE = 75  #: Of a child whose cluster was lost (EX_TEMPFAIL of sysexits.h).
END_LIMIT_S = 5.0  #: For killed processes to be gone.
_READ_BYTES = 4096


class ChildNote(msgspec.Struct, frozen=True):
    """What a child tells its supervisor, a line of JSON each."""

    folder: str = ""  #: Of its Ray: to be removed when the child has ended.
    ready: bool = False  #: The cluster serves requests.
    #: The child ends by itself. Ray's library does not say so when it ends the process, a minute
    #: after the GCS has stopped answering.
    ends: bool = False


class Verdict(Enum):
    """What becomes of a child that has ended."""

    END = "end"  #: `serve` ends with the child's exit code
    RESTART = "restart"
    GIVE_UP = "give up"  #: it was lost too often


@dataclass(frozen=True, slots=True)
class ChildEnd:
    """How a child has ended."""

    exit_code: int  #: minus the signal's number, if a signal ended it
    was_ready: bool
    was_told_to_end: bool  #: by a signal to the supervisor
    ended_itself: bool = True  #: False: a signal or a library has ended it


class RestartPolicy:
    """Decides whether a cluster is started again (pure)."""

    def __init__(self) -> None:
        self._restarted_at: deque[float] = deque()

    def judge(self, end: ChildEnd, now: float) -> Verdict:
        """Return what becomes of a child that has ended at `now`, in seconds of any clock."""
        was_lost = end.exit_code == LOST_EXIT_CODE or end.exit_code < 0 or not end.ended_itself
        if end.was_told_to_end or not end.was_ready or not was_lost:
            return Verdict.END
        while self._restarted_at and self._restarted_at[0] < now - RESTARTS_WINDOW_S:
            self._restarted_at.popleft()
        if len(self._restarted_at) >= RESTARTS_LIMIT:
            return Verdict.GIVE_UP
        self._restarted_at.append(now)
        return Verdict.RESTART


class Supervised:
    """What a child uses to tell its supervisor how far it is."""

    def __init__(self, pipe: int, supervisor: int) -> None:
        """`supervisor` is the number of the supervisor's process."""
        self._pipe = pipe
        self._supervisor = supervisor
        self._folders: list[str] = []  #: The folders that the supervisor was told of.

    def tell(self, note: ChildNote) -> None:
        """Send a note; without a supervisor any more, nobody needs it."""
        if note.folder:
            self._folders.append(note.folder)
        with contextlib.suppress(OSError):
            os.write(self._pipe, msgspec.json.encode(note) + b"\n")

    def clean_up_if_alone(self) -> None:
        """Do what the supervisor would do after this process's end, if the supervisor has ended.

        The processes below this one are killed, and the folders that it has made are removed.
        """
        if os.getppid() == self._supervisor:
            return
        end_descendants(END_LIMIT_S, spare=set())
        _remove_folders(self._folders)


def stop_signals() -> set[signal.Signals]:
    """Return the signals that stop the cluster: SIGINT, SIGTERM, and SIGHUP of a closed terminal.

    SIGHUP is not among them where this process ignores it, as a process below `nohup` does.
    """
    signals = {signal.SIGINT, signal.SIGTERM}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.add(signal.SIGHUP)
    return signals


def supervise(run: Callable[[Supervised], int], report: Callable[[str], None]) -> int:
    """Run `run` in a child process until it is not to be started again; return the exit code.

    `run` returns an exit code: `LOST_EXIT_CODE` if the cluster was lost. `report` takes a line for
    the user. This process must have no other threads, and is left with `stop_signals()` blocked.
    Processes that it has started before are let alone.
    """
    others = descendants(os.getpid())
    adopt_orphans()
    policy = RestartPolicy()
    told_to_stop = stop_signals()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *told_to_stop})
    while True:
        child = _start(run, told_to_stop)
        end = child.wait()
        remaining = end_descendants(END_LIMIT_S, spare=others)
        _remove_folders(child.folders())
        if remaining:
            report("some processes of the cluster could not be ended")
        # A signal that has come since the child's end is pending here, and was passed on to nobody.
        if signal.sigtimedwait(told_to_stop, 0) is not None:
            end = replace(end, was_told_to_end=True)
        match policy.judge(end, time.monotonic()):
            case Verdict.END:
                return 128 - end.exit_code if end.exit_code < 0 else end.exit_code
            case Verdict.GIVE_UP:
                report(f"the cluster was lost {RESTARTS_LIMIT + 1} times in 10 minutes: giving up")
                return 1
            case Verdict.RESTART:
                report("starting the cluster again")


def _remove_folders(folders: Iterable[str]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _start(run: Callable[[Supervised], int], told_to_stop: set[signal.Signals]) -> _SupervisedChild:
    """Fork a child that runs `run` and exits with its code; this returns in the parent alone.

    `told_to_stop` are the signals that the parent passes on to the child.
    """
    read_end, write_end = os.pipe()
    parent = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # else the child would write it too
    child = os.fork()
    if child:
        os.close(write_end)
        return _SupervisedChild(child, read_end, told_to_stop)
    exit_code = 1
    supervised = Supervised(write_end, parent)
    try:
        os.close(read_end)
        end_with_parent(parent)
        adopt_orphans()
        # A terminal that closes signals all of its processes. Those below this one, Ray's among
        # them, inherit that they ignore it: so they live until the parent has had this one stop.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD, *told_to_stop})
        exit_code = run(supervised)
        end_descendants(END_LIMIT_S, spare=set())
        supervised.clean_up_if_alone()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        supervised.tell(ChildNote(ends=True))
        os._exit(exit_code)  # the parent's own way out is not the child's


class _SupervisedChild:
    """A child process, from the parent's side."""

    def __init__(self, process: int, notes_pipe: int, told_to_stop: set[signal.Signals]) -> None:
        self._process = process
        self._pipe = notes_pipe
        self._told_to_stop = told_to_stop  #: The signals that are passed on to the child.
        self._notes: list[ChildNote] = []
        self._was_told_to_end = False

    def wait(self) -> ChildEnd:
        """Pass signals on to the child until it ends."""
        while True:
            info = signal.sigwaitinfo({signal.SIGCHLD, *self._told_to_stop})
            if info.si_signo == signal.SIGCHLD:
                ended, status = os.waitpid(self._process, os.WNOHANG)
                if ended:
                    break
                continue
            self._was_told_to_end = True
            # ^C in a terminal comes from the kernel, which has sent it to the child too. In the
            # child, Ray replaces the handler of SIGTERM while it starts, and SIGHUP is ignored; so
            # these become a SIGINT.
            if info.si_code <= 0 or info.si_signo != signal.SIGINT:
                os.kill(self._process, signal.SIGINT)
        self._read_notes()
        return ChildEnd(
            exit_code=os.waitstatus_to_exitcode(status),
            was_ready=any(note.ready for note in self._notes),
            was_told_to_end=self._was_told_to_end,
            ended_itself=any(note.ends for note in self._notes),
        )

    def folders(self) -> list[str]:
        """Return the folders that the child has made."""
        return [note.folder for note in self._notes if note.folder]

    def _read_notes(self) -> None:
        """Take the notes of a child that has ended."""
        # Descendants of the child may have inherited the pipe's other end: do not wait for its end.
        os.set_blocking(self._pipe, False)
        content = b""
        try:
            while part := os.read(self._pipe, _READ_BYTES):
                content += part
        except BlockingIOError:
            pass
        os.close(self._pipe)
        self._notes = [msgspec.json.decode(line, type=ChildNote) for line in content.splitlines()]
