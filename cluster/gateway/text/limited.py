"""Processes that do what strangers wrote, with limits of memory and time.

What comes with a checkpoint or in a body can ask for any amount of work: a chat template, a
grammar. Python cannot stop a call under way in a thread, so such work is done in a process of its
own, which can be killed. `LimitedProcesses` is the gateway's end, `serve` the other one.

Life of a limited process:
    1. It is started for a request whose place among the processes is empty, or by `start` before
       there is a request. It reads its setup, and says when it is ready.
    2. It answers one request after another.
    3. It is killed when a request takes too long, sooner if other requests wait behind it, and ends
       when one takes too much memory. Its place is empty then, and the next request starts another
       process there.
    4. It ends when its socket is closed, as the gateway ends.

Its environment holds the path of modules and the time zone alone, so none of the gateway's secrets.
What it answers is bytes: nothing of it is ever unpickled.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

LENGTH = struct.Struct("<Q")  #: in front of each request, and of the setup: its length
REPLY_HEAD = struct.Struct("<BQ")  #: in front of each reply: its `ReplyKind` and its length
SETUP_HEAD = struct.Struct("<dQ")  #: in front of the setup: seconds of a request, MiB
TIMEVAL = struct.Struct("@ll")  #: of the kernel: seconds and microseconds
START_TIMEOUT_S = 60.0  #: for a process to import what it needs, and to read its setup
GLANCE_S = 0.002  #: So long one read of the gateway waits for bytes; then it looks at the clock.
#: The longest request that `ask_briefly` sends. A socket's buffer holds more, so that to send it
#: does not block.
BRIEF_BYTES = 1 << 15
READ_BYTES = 1 << 15  #: that one read takes at most
#: CPU seconds beyond `request_s` after which the kernel ends a process, if no gateway killed it.
CPU_MARGIN_S = 1.0
MIB = 1 << 20


#: The core that the calling thread is on.
current_core: Callable[[], int] = ctypes.CDLL(None).sched_getcpu


class ReplyKind(IntEnum):
    """What a reply says: the first byte of its head."""

    DONE = 0  #: The reply is the result; empty behind the setup, for "ready".
    REFUSED = 1  #: The request is wrong; the reply says why. The process takes further requests.
    OVER_LIMIT = 2  #: The request takes too much memory, or the setup failed; the process ends.


class RefusedError(Exception):
    """The work was refused, or went beyond a limit; the message says why."""


class OverLimitError(RefusedError):
    """The work took too much time or memory, or its result is too long."""


class DiedError(OverLimitError):
    """The process that did the work has ended, by itself or by somebody's kill."""


class SetupError(RefusedError):
    """No process got ready for the work, which is not to blame; another try may help.

    The message says why. It is for the log: it may name files of this machine.
    """

    def __init__(self, cause: OverLimitError) -> None:
        super().__init__(str(cause))
        self.process_died = isinstance(cause, DiedError)


class BusyError(RefusedError):
    """The work had to make way for others, or found no process in time; another try may help."""


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """What one process may take; the gateway kills a process that takes more time or bytes."""

    request_s: float  #: Seconds of one request.
    contested_s: float  #: The same while other requests wait for a process.
    wait_s: float  #: Seconds that a request waits for a process.
    waiting_requests: int  #: So many may wait at a time.
    memory_mib: int  #: Beyond what the process has after its setup; the kernel refuses more.
    reply_bytes: int  #: Of one reply.


class LimitedProcesses:
    """Up to `size` processes that run the program `module`, each with the same `setup`.

    Each process has one of `size` places. Any thread may ask: a request takes a place, and starts a
    process there if the place is empty. If all places are taken, the request waits for one.
    `module` is a name as for `python -m`; that program calls `serve`, which hands `setup` to its
    `make_handler`.
    """

    def __init__(self, module: str, setup: bytes, limits: ProcessLimits, size: int) -> None:
        self._module = module
        self._setup = setup
        self._limits = limits
        #: Places that no request has, those used last at the end; None: no process runs there. Who
        #: takes a place out puts it back, so that no more than `size` processes ever run. The last
        #: place is taken first: an empty one there is filled, though others have idle processes.
        self._idle: list[_Child | None] = [None] * size
        #: Held to change `_idle` and the two fields below; each of the two is read without it too.
        self._lock = threading.Lock()
        self._place_is_free = threading.Condition(self._lock)
        self._waiting_requests = 0
        self._is_closed = False

    def ask(self, request: bytes) -> bytes:
        """Return the reply of a process.

        Raises RefusedError if the process refuses the request. Three errors are kinds of it:
        OverLimitError if the request takes too much; BusyError if it finds no process in time,
        makes way for others, or no process can be started; SetupError if no process gets ready. The
        start of a process does not count for the limits of time. A process that ends in the middle,
        or while it starts, may have been killed by somebody: another one tries once more.
        """
        child = self._take_place()
        try:
            if child is None or not child.turn_to(request):
                child = None  # the last one may have ended meanwhile
                child = self._start_child()
            try:
                return child.ask(request, self._is_contested)
            except (DiedError, SetupError) as error:
                if isinstance(error, SetupError) and not error.process_died:
                    raise
                child = self._start_child()
                return child.ask(request, self._is_contested)
        finally:
            self._put_back(child)

    def ask_briefly(self, request: bytes) -> bytes | None:
        """Return the reply if it comes at once; None: `ask` will find it, in another thread.

        This is for an event loop's thread: it waits for the first bytes of the reply for `GLANCE_S`
        at most, which a kernel may round up to 8 ms. Once they are there, it waits for the rest,
        which the process sends in one go, for `contested_s` at most. Raises RefusedError.
        """
        with self._lock:
            child = self._idle[-1] if self._idle else None
            if child is None or not child.is_free or len(request) > BRIEF_BYTES:
                return None
            self._idle.pop()
        try:
            return child.ask_briefly(request)
        except DiedError:
            return None  # `ask` tries again
        finally:
            self._put_back(child)

    def start(self) -> None:
        """Start one process, so that the first request need not; its setup is read meanwhile."""
        child = self._take_place()
        try:
            if child is None:
                child = self._start_child()
        finally:
            self._put_back(child)

    def close(self) -> None:
        """End all idle processes; `ask` raises BusyError from now on.

        A process at work ends with its request.
        """
        with self._lock:
            self._is_closed = True
            children = [child for child in self._idle if child is not None]
            self._idle = []
            self._place_is_free.notify_all()
        for child in children:
            child.end()

    def _take_place(self) -> _Child | None:
        """Take out the place of a process: an idle one, or None if it is to be started.

        Raises BusyError if none becomes free in time, or too many requests wait already.
        """
        with self._lock:
            if self._idle:
                return self._idle.pop()
            if self._waiting_requests >= self._limits.waiting_requests:
                raise BusyError(f"{self._waiting_requests} others wait for it already")
            self._waiting_requests += 1
            try:
                self._place_is_free.wait_for(
                    lambda: self._idle or self._is_closed, self._limits.wait_s
                )
            finally:
                self._waiting_requests -= 1
            if self._is_closed:
                raise BusyError("the gateway ends")
            if not self._idle:
                raise BusyError(f"nothing was free for it within {self._limits.wait_s:g} s")
            return self._idle.pop()

    def _put_back(self, child: _Child | None) -> None:
        """Put a place back, and let the next request have it."""
        if child is not None and child.has_ended:
            child = None
        with self._lock:
            if not self._is_closed:
                self._idle.append(child)
                if self._waiting_requests:
                    self._place_is_free.notify()
                return
        if child is not None:
            child.end()

    def _start_child(self) -> _Child:
        """Start a process, and send it its setup. Raises BusyError or SetupError."""
        if self._is_closed:
            raise BusyError("the gateway ends")
        try:
            child = _Child(self._module, self._limits)
        except OSError as error:  # no more processes, memory or files
            raise BusyError(f"no process can be started for it: {error.strerror}") from None
        child.send_setup(self._setup)
        return child

    def _is_contested(self) -> bool:
        """Return whether requests wait for a process."""
        return self._waiting_requests > 0


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
        self._unanswered: bytes | None = None  #: The request that it has not replied to.
        self._received = bytearray()  #: Of its next reply.
        #: Kills the process: by `end`, when this object is collected, or when the gateway exits.
        self._finalizer = weakref.finalize(self, _end, self._process, self._socket)
        #: The only core that the process may run on; None: it may run on all.
        self._core: int | None = None
        # By the kernel, and not by `settimeout`, which would cost each read a system call more.
        timeout = TIMEVAL.pack(0, round(GLANCE_S * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)

    @property
    def has_ended(self) -> bool:
        """True if the process was killed, or has died and was noticed: it takes no request."""
        return not self._finalizer.alive

    def end(self) -> None:
        """Kill the process, if it has not ended."""
        self._finalizer()

    def send_setup(self, setup: bytes) -> None:
        """Send the setup, and do not wait until the process is ready: `ask` does.

        Raises SetupError.
        """
        # The process gets two of the limits; the length of replies is checked at this end.
        head = SETUP_HEAD.pack(self._limits.request_s, self._limits.memory_mib)
        try:
            self._send(head + setup, START_TIMEOUT_S)
        except OverLimitError as error:
            raise SetupError(error) from None

    @property
    def is_free(self) -> bool:
        """True if the process is ready, and has replied to all that it was asked."""
        return self._is_ready and self._unanswered is None

    def turn_to(self, request: bytes) -> bool:
        """Return whether the process can take a request: it has this one already, or no other.

        While it works on another request, this waits for that reply for `contested_s` and drops
        it; a process that has not replied by then is killed.
        """
        if self._unanswered is not None and self._unanswered != request:
            with contextlib.suppress(RefusedError):
                self._receive(self._limits.contested_s, _never)
        return not self.has_ended

    def ask(self, request: bytes, is_contested: Callable[[], bool]) -> bytes:
        """Return the reply of the process.

        `is_contested` says whether other requests wait for a process. Raises RefusedError; any
        other error ends the process.
        """
        try:
            if not self._is_ready:
                self._await_ready()
            if self._unanswered is None:
                self._begin(request)
            return self._receive(self._limits.request_s, is_contested)
        except RefusedError:
            raise  # whoever raised it has ended the process where that is needed
        except BaseException:
            self.end()  # a reply that was not read would be taken for the next request's
            raise

    def ask_briefly(self, request: bytes) -> bytes | None:
        """Return the reply of a process that is free; None if it does not come at once."""
        try:
            self._begin(request)
            if not self._receive_piece():
                return None
            # The process sends a reply in one go: the rest of a long one is on its way.
            return self._receive(self._limits.contested_s, _never)
        except RefusedError:
            raise
        except BaseException:
            self.end()
            raise

    def _begin(self, request: bytes) -> None:
        """Send a request. Raises OverLimitError."""
        self._bring_here()
        self._send(request, self._limits.request_s)
        self._unanswered = request

    def _await_ready(self) -> None:
        """Wait until the process has read its setup. Raises SetupError."""
        try:
            self._receive(START_TIMEOUT_S, _never)
        except OverLimitError as error:
            raise SetupError(error) from None
        self._is_ready = True

    def _bring_here(self) -> None:
        """Let the process run on the core of this thread, which is about to wait for it.

        To wake another core costs 40 us on a virtual machine, twice as much as all the rest.
        """
        core = current_core()
        if core != self._core:
            self._core = core
            _keep_to(self._process.pid, {core})

    def _let_go(self) -> None:
        """Let the process run on any core, as a request that takes long should.

        The kernel keeps a core for each thread: those that began meanwhile have the first one's.
        """
        if self._core is None:
            return
        self._core = None
        cores = os.sched_getaffinity(0)
        with contextlib.suppress(OSError):  # it has ended
            for thread_id in os.listdir(f"/proc/{self._process.pid}/task"):
                _keep_to(int(thread_id), cores)

    def _send(self, data: bytes, limit_s: float) -> None:
        """Send a request or the setup. Raises OverLimitError."""
        message = LENGTH.pack(len(data)) + data
        try:
            sent_bytes = self._socket.send(message, socket.MSG_DONTWAIT)
            if sent_bytes < len(message):  # the socket's buffer is full
                self._socket.settimeout(limit_s)
                self._socket.sendall(memoryview(message)[sent_bytes:])
                self._socket.settimeout(None)
        except TimeoutError:
            raise self._over_time(limit_s) from None
        except OSError:
            raise self._died() from None

    def _receive(self, limit_s: float, is_contested: Callable[[], bool]) -> bytes:
        """Return the next reply. Raises RefusedError; the process has ended if it cannot go on.

        All of the reply must come within `limit_s`: a process that sends byte by byte, each in
        time, gets no further.
        """
        began_s = time.monotonic()
        while (reply_end := self._reply_end()) is None:
            if self._receive_piece() and self._reply_end() is not None:
                continue
            self._check_time(time.monotonic() - began_s, limit_s, is_contested)
        kind = self._received[0]
        reply = bytes(self._received[REPLY_HEAD.size : reply_end])
        self._received = bytearray()
        self._unanswered = None
        return self._result(kind, reply)

    def _receive_piece(self) -> bool:
        """Receive what has come, or comes within `GLANCE_S`; return whether anything has.

        Raises OverLimitError if the process has ended.
        """
        try:
            piece = self._socket.recv(READ_BYTES)
        except BlockingIOError:  # the time of SO_RCVTIMEO is over
            self._let_go()
            return False
        except OSError:
            raise self._died() from None
        if not piece:
            raise self._died()
        self._received += piece
        return True

    def _reply_end(self) -> int | None:
        """Return where the reply ends in what was received; None if it is not all there.

        Raises OverLimitError if it is too long.
        """
        received = self._received
        if len(received) < REPLY_HEAD.size:
            return None
        length: int = REPLY_HEAD.unpack_from(received)[1]
        if length > self._limits.reply_bytes:
            self.end()
            raise OverLimitError(f"its result has more than {self._limits.reply_bytes} bytes")
        reply_end = REPLY_HEAD.size + length
        return reply_end if len(received) >= reply_end else None

    def _result(self, kind: int, reply: bytes) -> bytes:
        """Return a reply that is a result. Raises RefusedError for the others."""
        if kind == ReplyKind.DONE:
            return reply
        message = reply.decode(errors="replace")
        if kind == ReplyKind.REFUSED:
            raise RefusedError(message)
        self.end()
        raise OverLimitError(message)

    def _check_time(
        self, elapsed_s: float, limit_s: float, is_contested: Callable[[], bool]
    ) -> None:
        """End the process if its request has taken too long, and raise OverLimitError or BusyError."""
        if elapsed_s > limit_s:
            raise self._over_time(limit_s)
        if elapsed_s >= self._limits.contested_s and is_contested():
            self.end()
            message = f"it takes more than {self._limits.contested_s:g} s, and others wait"
            raise BusyError(message)

    def _over_time(self, limit_s: float) -> OverLimitError:
        """Kill the process; return what to raise."""
        self.end()
        return OverLimitError(f"it takes more than {limit_s:g} s")

    def _died(self) -> DiedError:
        """Give up a process that has ended; return what to raise."""
        self.end()
        return DiedError("the process that did it ended: it takes too much memory or time")


def _keep_to(thread_id: int, cores: set[int]) -> None:
    """Let a thread run on these cores only; a process's id is that of its first thread."""
    with contextlib.suppress(OSError):  # it has ended, or the cores were taken away meanwhile
        os.sched_setaffinity(thread_id, cores)


def _never() -> bool:
    return False


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
    gc.freeze()  # what the setup has made stays: no collection need look at it
    cpu_limit = _CpuLimit(request_s)
    _reply(connection, ReplyKind.DONE, b"")
    while (request := _read_request(connection)) is not None:
        cpu_limit.renew()
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


class _CpuLimit:
    """Lets each request compute for `request_s` and `CPU_MARGIN_S`; the kernel then ends the process.

    The kernel counts whole seconds since the process began, so the limit is moved on only where
    another second has begun. The hard limit stays open, because the limit moves.
    """

    def __init__(self, request_s: float) -> None:
        self._request_s = request_s
        self._limit_s = 0  #: What the kernel was told.

    def renew(self) -> None:
        """Begin the time of a request."""
        limit_s = math.ceil(time.process_time() + self._request_s + CPU_MARGIN_S)
        if limit_s != self._limit_s:
            self._limit_s = limit_s
            resource.setrlimit(resource.RLIMIT_CPU, (limit_s, resource.RLIM_INFINITY))


def _read_request(connection: socket.socket) -> bytes | None:
    """Return the next request; None if the other end was closed."""
    data = connection.recv(READ_BYTES)
    if len(data) < LENGTH.size or len(data) < LENGTH.size + LENGTH.unpack_from(data)[0]:
        return _read_rest(connection, bytearray(data))
    return data[LENGTH.size :]


def _read_rest(connection: socket.socket, data: bytearray) -> bytes | None:
    """Return a request that begins with `data`; None if the other end was closed before its end."""
    request_end = LENGTH.size  # and the request's own length, once that has come
    while True:
        if len(data) >= LENGTH.size:
            request_end = LENGTH.size + LENGTH.unpack_from(data)[0]
            if len(data) >= request_end:
                return bytes(data[LENGTH.size :])
        piece = connection.recv(READ_BYTES)
        if not piece:
            return None
        data += piece


def _reply(connection: socket.socket, kind: ReplyKind, reply: bytes) -> None:
    connection.sendall(REPLY_HEAD.pack(kind, len(reply)) + reply)
