"""Processes that do what strangers wrote, with limits of memory and time.

What comes with a checkpoint or in a body can ask for any amount of work: a chat template, a
grammar. Python cannot stop a call under way in a thread, so such work is done in a process of its
own, which can be killed. `LimitedProcesses` is the gateway's end, `serve` the other one.

Life of a limited process:
    1. Started when there is work and no process is idle. It reads its setup, and says when it is
       ready.
    2. It answers one request after another.
    3. It is killed when a request takes too long, and ends when one takes too much memory. The next
       request starts another process.
    4. It ends when its socket is closed, as the gateway ends.

It inherits no environment, so none of the gateway's secrets. What it answers is bytes: nothing of
it is ever unpickled.
"""

from __future__ import annotations

import math
import os
import queue
import resource
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

LENGTH = struct.Struct("<Q")  #: in front of each request, and of the setup: its bytes
REPLY_HEAD = struct.Struct("<BQ")  #: in front of each reply: its `ReplyKind` and its length
SETUP_HEAD = struct.Struct("<dQ")  #: in front of the setup: seconds of a request, MiB
START_TIMEOUT_S = 60.0  #: for a process to import what it needs, and to read its setup
READ_BYTES = 1 << 15  #: that one read takes at most
CPU_MARGIN_S = 1.0  #: beyond the limit of a request, in case nobody is there to kill the process
MIB = 1 << 20


class ReplyKind(IntEnum):
    """What a reply says: the first byte of its head."""

    DONE = 0  #: The reply is the result; empty behind the setup, for "ready".
    REFUSED = 1  #: The request is wrong; the reply says why. The process takes further requests.
    OVER_LIMIT = 2  #: The request takes too much memory, or the setup failed; the process ends.


class RefusedError(Exception):
    """The work was refused, or went beyond a limit; the message says why."""


class OverLimitError(RefusedError):
    """The work took too much time or memory."""


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """What one process may take; the gateway kills a process that takes more time or bytes."""

    request_s: float  #: Seconds of one request, waiting included.
    memory_mib: int  #: Beyond what the process has after its setup; the kernel refuses more.
    reply_bytes: int  #: Of one reply.


class LimitedProcesses:
    """Up to `size` processes that run the program `module`, each with the same `setup`.

    Any thread may ask; one that finds no idle process waits for one. `module` is a name as for
    `python -m`; that program calls `serve`, which hands `setup` to its `make_handler`.
    """

    def __init__(self, module: str, setup: bytes, limits: ProcessLimits, size: int) -> None:
        self._module = module
        self._setup = setup
        self._limits = limits
        #: Places of idle processes, those used last first; None: the process is not started. Who
        #: takes a place out puts it back, so that no more than `size` processes ever run.
        self._idle: queue.LifoQueue[_Child | None] = queue.LifoQueue()
        for _ in range(size):
            self._idle.put(None)

    def ask(self, request: bytes) -> bytes:
        """Return the reply of a process.

        Raises RefusedError if the process refuses the request, and OverLimitError, which is one,
        if the request takes too much or the process cannot be started. The start of a process does
        not count for the limit of time.
        """
        child = self._idle.get()
        try:
            if child is None:
                child = _Child(self._module, self._limits)
                child.set_up(self._setup)
            reply = child.ask(request)
        except BaseException:
            if child is not None and child.has_ended:
                child = None
            raise
        finally:
            self._idle.put(child)
        return reply

    def start(self) -> None:
        """Start one process, so that the first request need not; its setup is read meanwhile."""
        child = self._idle.get()
        try:
            if child is None:
                child = _Child(self._module, self._limits)
                child.send_setup(self._setup)
        finally:
            if child is not None and child.has_ended:
                child = None
            self._idle.put(child)

    def close(self) -> None:
        """End all idle processes; `ask` would then wait for ever.

        A process at work ends when nothing refers to this object any more (`weakref.finalize`).
        """
        while True:
            try:
                child = self._idle.get_nowait()
            except queue.Empty:
                return
            if child is not None:
                child.end()


class _Child:
    """The gateway's end of one process."""

    def __init__(self, module: str, limits: ProcessLimits) -> None:
        self._limits = limits
        self._socket, other_end = socket.socketpair()
        with other_end:
            self._process = subprocess.Popen(
                # -P: the working directory is no place to find modules in.
                [sys.executable, "-P", "-m", module, str(other_end.fileno())],
                env=_environment(),
                cwd="/",
                pass_fds=(other_end.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a traceback may quote what a client wrote
            )
        self._is_ready = False  #: True once the process has said that its setup is read.
        #: Kills the process: by `end`, when this object is collected, or when the gateway exits.
        self._finalizer = weakref.finalize(self, _end, self._process, self._socket)

    @property
    def has_ended(self) -> bool:
        """True if the process was killed, or has died and was noticed: it takes no request."""
        return not self._finalizer.alive

    def end(self) -> None:
        """Kill the process, if it has not ended."""
        self._finalizer()

    def send_setup(self, setup: bytes) -> None:
        """Send the setup, and do not wait until the process is ready: `ask` does."""
        self._socket.settimeout(START_TIMEOUT_S)
        # The process gets two of the limits; the length of replies is checked at this end.
        self._send(SETUP_HEAD.pack(self._limits.request_s, self._limits.memory_mib) + setup)

    def set_up(self, setup: bytes) -> None:
        """Send the setup, and wait until the process is ready. Raises RefusedError."""
        self.send_setup(setup)
        self._await_ready()

    def ask(self, request: bytes) -> bytes:
        """Return the reply. Raises RefusedError; any other error ends the process."""
        if not self._is_ready:
            self._await_ready()
        try:
            self._send(request)
            return self._receive()
        except RefusedError:
            raise  # whoever raised it has ended the process where that is needed
        except BaseException:
            self.end()  # a reply that was not read would be taken for the next request's
            raise

    def _await_ready(self) -> None:
        """Wait until the setup is read; from then on the limit of a request counts."""
        self._socket.settimeout(START_TIMEOUT_S)
        try:
            self._receive()
        except BaseException:
            self.end()
            raise
        self._is_ready = True
        self._socket.settimeout(self._limits.request_s)

    def _send(self, data: bytes) -> None:
        try:
            self._socket.sendall(LENGTH.pack(len(data)) + data)
        except TimeoutError:
            raise self._over_time() from None
        except OSError:
            raise self._died() from None

    def _receive(self) -> bytes:
        """Return the next reply. Raises RefusedError; the process has ended if it cannot go on."""
        data = self._read(REPLY_HEAD.size)
        kind, length = REPLY_HEAD.unpack_from(data)
        if length > self._limits.reply_bytes:
            self.end()
            raise OverLimitError(f"its result has more than {self._limits.reply_bytes} bytes")
        reply_end = REPLY_HEAD.size + length
        if len(data) < reply_end:
            data += self._read(reply_end - len(data))
        reply = bytes(data[REPLY_HEAD.size : reply_end])
        if kind == ReplyKind.DONE:
            return reply
        message = reply.decode(errors="replace")
        if kind == ReplyKind.REFUSED:
            raise RefusedError(message)
        self.end()
        raise OverLimitError(message)

    def _read(self, minimum_bytes: int) -> bytearray:
        """Return the next bytes, at least `minimum_bytes`. Raises OverLimitError.

        They must come within the socket's timeout: a process that sends byte by byte, each in
        time, gets no further.
        """
        deadline_s = time.monotonic() + (self._socket.gettimeout() or 0.0)
        data = bytearray()
        while len(data) < minimum_bytes:
            try:
                piece = self._socket.recv(READ_BYTES)
            except TimeoutError:
                raise self._over_time() from None
            except OSError:
                raise self._died() from None
            if not piece:
                raise self._died()
            data += piece
            if time.monotonic() > deadline_s:
                raise self._over_time()
        return data

    def _over_time(self) -> OverLimitError:
        """Kill the process; return what to raise."""
        self.end()
        return OverLimitError(f"it takes more than {self._limits.request_s:g} s")

    def _died(self) -> OverLimitError:
        """Give up a process that has ended; return what to raise."""
        self.end()
        return OverLimitError("the process that did it ended: it takes too much memory or time")


def _environment() -> dict[str, str]:
    """Return what a process needs to find its modules and to tell the local time, no more."""
    environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    if "TZ" in os.environ:
        environment["TZ"] = os.environ["TZ"]
    return environment


def _end(process: subprocess.Popen[bytes], its_socket: socket.socket) -> None:
    its_socket.close()
    process.kill()
    process.wait()


# ---- in the process ------------------------------------------------------------------------------


def serve(make_handler: Callable[[bytes], Callable[[bytes], bytes]]) -> None:
    """Answer requests until the other end is closed; the process's first argument is the socket.

    `make_handler` takes the setup and returns what answers a request. What either raises is said
    to the gateway, and refuses the request. The process ends after an error of `make_handler`, and
    after a MemoryError.
    """
    connection = socket.socket(fileno=int(sys.argv[1]))
    setup = _read_request(connection)
    if setup is None:
        return
    request_s, memory_mib = SETUP_HEAD.unpack_from(setup)
    try:
        handle = make_handler(setup[SETUP_HEAD.size :])
    except Exception as error:
        # Not REFUSED: the gateway must not send requests to this process.
        _reply(connection, ReplyKind.OVER_LIMIT, str(error).encode(errors="replace"))
        return
    _limit_memory(memory_mib)  # behind the setup, whose imports need memory of their own
    _reply(connection, ReplyKind.DONE, b"")
    while (request := _read_request(connection)) is not None:
        _limit_cpu(request_s)
        try:
            reply = handle(request)
        except MemoryError:
            message = f"it takes more than {memory_mib} MiB of memory"
            _reply(connection, ReplyKind.OVER_LIMIT, message.encode())
            return
        except Exception as error:
            _reply(connection, ReplyKind.REFUSED, str(error).encode(errors="replace"))
            continue
        _reply(connection, ReplyKind.DONE, reply)


def _limit_memory(memory_mib: int) -> None:
    """Let the process have so much more address space than it has now, and write no files.

    Address space counts (RLIMIT_AS), whether or not it is ever touched.
    """
    with open("/proc/self/statm") as statm:
        # The first number is the size of the address space, in pages.
        used_bytes = int(statm.read().split()[0]) * resource.getpagesize()
    limit_bytes = used_bytes + memory_mib * MIB
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _limit_cpu(seconds: float) -> None:
    """Let the process compute for so many seconds more and `CPU_MARGIN_S`; the kernel then ends it.

    The hard limit stays open, because each request moves the limit on.
    """
    limit_s = math.ceil(time.process_time() + seconds + CPU_MARGIN_S)
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, resource.RLIM_INFINITY))


def _read_request(connection: socket.socket) -> bytes | None:
    """Return the next request; None if the other end was closed."""
    data = bytearray()
    request_end = LENGTH.size  # and the request's own length, once that has come
    while len(data) < request_end:
        piece = connection.recv(READ_BYTES)
        if not piece:
            return None
        data += piece
        if len(data) >= LENGTH.size:
            request_end = LENGTH.size + LENGTH.unpack_from(data)[0]
    return bytes(data[LENGTH.size :])


def _reply(connection: socket.socket, kind: ReplyKind, reply: bytes) -> None:
    connection.sendall(REPLY_HEAD.pack(kind, len(reply)) + reply)
