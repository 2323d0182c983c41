"""A measured process: started, commanded in JSON lines, and frozen while it is not its turn."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

PR_SET_PDEATHSIG = 1  #: Linux's number of the option of `prctl`, from <sys/prctl.h>.


class EngineBenchError(Exception):
    """The measurement cannot go on. The message names the cause and what to do next."""


class EngineProcess:
    """One engine in its own process. Only one runs at a time: the others wait frozen.

    A frozen process (SIGSTOP) takes no CPU: OpenMP threads otherwise spin for a while after a step,
    and on as many cores as threads that slows down the engine that is measured next.

    Life: the constructor starts the process; `answer` reads the line that it writes when it is
    ready; `command` has one command done, inside of a `turn`; `close` ends the process.
    """

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str]) -> None:
        """`name` is for messages; `command` and `environment` are those of the new process."""
        self.name = name
        self._errors = tempfile.TemporaryFile(mode="w+", errors="replace")  # noqa: SIM115
        prctl = ctypes.CDLL(None).prctl  # found here: nothing is safe to look up after the fork

        def die_with_parent() -> None:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # reaches frozen processes too

        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            text=True,
            start_new_session=True,  # ^C reaches the parent alone, which ends its children
            preexec_fn=die_with_parent,
        )

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def answer(self) -> dict[str, Any]:
        """Wait for the next line that the process writes, and return its JSON.

        Raises EngineBenchError if the process ends, or answers `error` instead.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise EngineBenchError(
                f"{self.name} ended (exit code {code}); it said:\n{self._last_words()}"
            )
        try:
            reply = json.loads(line)
        except ValueError:
            raise EngineBenchError(
                f"{self.name} does not answer in JSON: {line.strip()!r}"
            ) from None
        if "error" in reply:
            raise EngineBenchError(f"{self.name}: {reply['error']}")
        return reply

    def command(self, do: str, **values: Any) -> dict[str, Any]:
        """Have one command done, and return its answer. Raises EngineBenchError."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # `answer` finds out why
            self._process.stdin.write(json.dumps({"do": do, **values}) + "\n")
            self._process.stdin.flush()
        return self.answer()

    def freeze(self) -> None:
        """Stop the process until its next turn."""
        self._signal(signal.SIGSTOP)

    @contextmanager
    def turn(self, urgent: bool = False) -> Iterator[None]:
        """Let the process run inside of the context, and freeze it afterwards.

        An `urgent` process goes before other processes, where the system allows that.
        """
        self._signal(signal.SIGCONT)
        try:
            self._schedule(os.SCHED_RR if urgent else os.SCHED_OTHER)
            yield
        finally:
            self.freeze()
            self._schedule(os.SCHED_OTHER)

    def close(self) -> None:
        """End the process, and what it may have started."""
        # Also if the process itself has ended: what it has started may still run.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def _schedule(self, policy: int) -> None:
        """Make every thread real-time (SCHED_RR), or ordinary (SCHED_OTHER).

        A nice value would not do: it counts within a session only. Only root may change the policy;
        other users are measured as the machine lets them, and the result's `waited` tells how well.
        """
        priority = os.sched_param(1 if policy == os.SCHED_RR else 0)
        with suppress(PermissionError, FileNotFoundError):
            for task in os.listdir(f"/proc/{self.pid}/task"):
                with suppress(ProcessLookupError):
                    os.sched_setscheduler(int(task), policy, priority)

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to the process's group, which is its own: it was started as a session."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _last_words(self) -> str:
        """Return the last lines that the process wrote to stderr."""
        self._errors.seek(0)
        return "\n".join(self._errors.read().strip().splitlines()[-8:])
