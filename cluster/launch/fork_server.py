"""Starts the processes of our own Ray by forking one that has imported everything already.

Before a gateway, a worker, a router, Control or Serve's controller does anything, it imports Ray,
Serve, torch and this package. That takes 2 to 6 s of CPU in each of them. The fork server imports
them once:

    raylet -> fork_client.py, in place of Ray's own script -> the server forks -> Ray's worker script

A forked process must be what it would be if it had been started by itself:

- Ray's library and others read environment variables when they are imported. So the server takes
  the variables of the first request before it imports Ray, and refuses requests that have others.
- Only the thread that forks lives on in the new process. So the server refuses all requests once a
  module that it imported has started a thread.
- Ray draws ids at random, and two processes must not draw the same. The server tries that after
  each import, and refuses all requests if they would.

Whoever is refused, or finds no server any more, is started as Ray does it. Why somebody was refused
stands in `fork_server.log` in the folder of the cluster.

Until the first request has come, the server imports what does not use Ray. Behind it, it answers
requests between two imports: the first process of a cluster, Serve's controller, needs little of
what follows, and needs it soon.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .fork_client import FORKED, LENGTH_BYTES, RAY_SCRIPT, SOCKET, TAKEN
from .processes import end_with_parent

#: Imported before there is a request: these neither import Ray nor read a variable of Ray's.
MODULES_WITHOUT_RAY = (
    "numpy",
    "torch",
    "fastapi",
    "opentelemetry.sdk.trace",
    "prometheus_client",
    "grpc",
    "requests",
    "uvicorn",
    "diptych.engine.cpu_backend",
    "diptych.cluster.worker.core",
    "diptych.cluster.gateway.apis.api",
    "diptych.cluster.control.http",
)
#: Imported behind the first request, and behind Ray itself.
MODULES = (
    "ray.serve",
    "ray.serve._private.replica",
    "ray.serve._private.controller",
    "diptych.cluster.app",
)
SEPARATOR = "then"  #: Between the two lists, as arguments of the server.
#: Beginnings of the names of variables that Ray, or setproctitle for it, adds to those that its
#: processes inherit.
ADDED_BY_RAY = ("RAY_", "SPT_")
#: Ray's switch: whether it starts workers before it knows for which job they are. The job is one of a
#: process's variables, so the server would have to refuse these, or all others.
PRESTART_VARIABLE = "RAY_prestart_worker_first_driver"
QUEUE_LENGTH = 64  #: Requests that wait, at most: a cluster starts a few processes at a time.
REQUEST_BYTES_MAX = 8 << 20  #: An environment has 2 MiB or so at most.
RECEIVE_LIMIT_S = 5.0  #: For a piece of a request, and for the answer of a client.
STANDARD_STREAMS = 3  #: stdin, stdout and stderr
#: The score by which the kernel chooses whom it ends when memory is short. Ray gives its workers one.
OUT_OF_MEMORY_VARIABLE = "RAY_worker_oom_score_adjustment"
OUT_OF_MEMORY_SCORE = "1000"


# ---- in the process that starts Ray ----------------------------------------------------------------

#: Kept, as a `Popen` that is forgotten warns that its process still runs.
_started: list[subprocess.Popen[bytes]] = []


def start(folder: Path) -> None:
    """Start the server for the Ray that this process starts next; it ends with this process.

    Its socket and its log are in `folder`, which must be this user's alone: whoever reaches the
    socket can run code. The environment must be the one that Ray will have. Nothing is done where
    Ray has no script or no name for it that could be replaced. Raises OSError.
    """
    from ray._private import ray_constants

    ray_script = Path(ray_constants.__file__).parent / "workers" / "setup_worker.py"
    if not ray_script.exists() or not hasattr(ray_constants, "SETUP_WORKER_FILENAME"):
        return
    with (
        socket.socket(socket.AF_UNIX) as listener,
        (folder / "fork_server.log").open("wb") as log_file,
    ):
        socket_path = str(folder / "fork_server.sock")
        listener.bind(socket_path)
        listener.listen(QUEUE_LENGTH)
        # Ray joins this name to the folder of its own script, and an absolute path stays what it is.
        # The name is another one because a raylet that has nothing to set up runs the worker without
        # the script, if that is called setup_worker.py.
        ray_constants.SETUP_WORKER_FILENAME = str(Path(__file__).with_name("fork_client.py"))
        os.environ[RAY_SCRIPT] = str(ray_script)
        os.environ[SOCKET] = socket_path
        os.environ[PRESTART_VARIABLE] = "0"
        server = subprocess.Popen(
            # That the modules' names are arguments also makes the command long: a process of Ray has
            # its title in the memory that the command had.
            [
                *(sys.executable, "-P", "-m", "diptych.cluster.launch.fork_server"),
                *(str(listener.fileno()), str(os.getpid())),
                *(*MODULES_WITHOUT_RAY, SEPARATOR, *MODULES),
            ],
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
            process_group=0,  # ^C in a terminal is for `diptych serve`, which ends this server
        )
    _started.append(server)


# ---- in the server ---------------------------------------------------------------------------------


class Refused(Exception):
    """A request that Ray's own script has to fulfil."""


class ForkServer:
    """The server: one thread, which imports and forks."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._inherited = dict(os.environ)  #: Variables, before any module could set one.
        #: The variables that all processes must have; None: no request has come.
        self._environment: dict[str, str] | None = None
        #: Why no process can be forked any more; empty: all is well.
        self._flaw = ""

    def run(self, modules_without_ray: Sequence[str], modules: Sequence[str]) -> list[str]:
        """Serve for ever. Return in each forked process, with the command that it is to run."""
        for module in modules_without_ray:
            importlib.import_module(module)
        to_import = list(modules)
        while True:
            must_import = bool(to_import) and self._environment is not None
            wait_s = 0.0 if must_import else None
            readable, _, _ = select.select([self._listener], [], [], wait_s)
            if readable:
                command = self._serve_one()
                if command is not None:
                    return command
            elif must_import:
                self._import(to_import.pop(0))
                if not to_import:
                    gc.collect()
                    gc.freeze()  # else each process's collector writes to, and copies, all of it

    def _import(self, module: str) -> None:
        """Import Ray or a module that may use it, and see whether processes can still be forked."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a module may wait for a child of its own
        try:
            with _class_ids_of_their_own():
                importlib.import_module(module)
        except Exception as error:
            self._flaw = f"{module} cannot be imported: {error!r}"
            return
        finally:
            _let_kernel_reap()
        if len(os.listdir("/proc/self/task")) > 1:
            self._flaw = f"there is a second thread, at the latest since {module} was imported"
        elif _id_drawn_in_fork() == _id_drawn_in_fork():
            self._flaw = f"since {module} was imported, forked processes draw the same ids"

    def _serve_one(self) -> list[str] | None:
        """Answer one request. Return the command in the forked process, and None in the server."""
        connection, _ = self._listener.accept()
        streams: list[int] = []
        try:
            connection.settimeout(RECEIVE_LIMIT_S)
            request = _receive(connection, streams)
            self._check(request["environment"])
            sys.stdout.flush()  # else the new process would write it once more
            process = os.fork()
        except Exception as error:  # what no client sends, or no memory for a process
            print(f"refused: {error!r}", flush=True)
            _close(connection, streams)  # which says it to whoever asks
            return None
        if process:
            _close(connection, streams)
            return None
        self._listener.close()
        _take_over(request, streams)
        _agree(connection)
        return request["command"]

    def _check(self, environment: dict[str, str]) -> None:
        """Raise Refused if a process that is forked now would not be one with these variables."""
        if self._environment is None:
            _compare(_without_rays(self._inherited), _without_rays(environment))
            self._environment = environment
            for name in self._inherited.keys() - environment.keys():
                os.environ.pop(name, None)
            os.environ.update(environment)
            self._import("ray")
        _compare(self._environment, environment)
        if self._flaw:
            raise Refused(self._flaw)


def _let_kernel_reap() -> None:
    """Let the kernel take note of the ends of children from now on, and take note of those before."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _without_rays(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables without those that Ray may have added."""
    return {name: value for name, value in environment.items() if not name.startswith(ADDED_BY_RAY)}


def _compare(own: dict[str, str], environment: dict[str, str]) -> None:
    """Raise Refused, with their names, if there are variables that are not the same."""
    names = own.keys() | environment.keys()
    differing = sorted(name for name in names if own.get(name) != environment.get(name))
    if differing:
        raise Refused(f"other variables: {', '.join(differing)}")


@contextlib.contextmanager
def _class_ids_of_their_own() -> Iterator[None]:
    """Let `ray.remote` draw the ids of classes otherwise than Ray draws all other ids.

    A module that has such classes draws an id for each when it is imported. Ray's first draw seeds
    its generator, and all forked processes would go on from that seed.
    """
    import ray.actor

    original = ray.actor.ActorClassID
    ray.actor.ActorClassID = _ActorClassIds  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        ray.actor.ActorClassID = original  # type: ignore[misc]


class _ActorClassIds:
    """Stands for Ray's class of these ids while modules are imported."""

    @staticmethod
    def from_random() -> Any:
        """Return an id that is drawn by the kernel."""
        from ray._raylet import ActorClassID

        return ActorClassID(os.urandom(ActorClassID.size()))


def _id_drawn_in_fork() -> bytes:
    """Return the first id that a process draws which is forked now."""
    from ray._raylet import UniqueID

    read_end, write_end = os.pipe()
    if not os.fork():
        try:
            os.write(write_end, UniqueID.from_random().binary())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        return pipe.read()


def _receive(connection: socket.socket, streams: list[int]) -> dict[str, Any]:
    """Return a request; add the descriptors of its standard streams to `streams`.

    Raises OSError or ValueError for what is no request.
    """
    head, descriptors, _, _ = socket.recv_fds(connection, LENGTH_BYTES, STANDARD_STREAMS)
    streams += descriptors
    length = int.from_bytes(head, "big")
    if length > REQUEST_BYTES_MAX:
        raise ValueError(f"a request of {length} bytes")
    body = b""
    while len(body) < length:
        piece = connection.recv(length - len(body))
        if not piece:
            raise ValueError("the request is cut off")
        body += piece
    if len(streams) != STANDARD_STREAMS:
        raise ValueError(f"{len(streams)} streams instead of {STANDARD_STREAMS}")
    request: dict[str, Any] = json.loads(body)
    return request


def _close(connection: socket.socket, streams: Sequence[int]) -> None:
    for stream in streams:
        os.close(stream)
    connection.close()


def _take_over(request: dict[str, Any], streams: Sequence[int]) -> None:
    """Give a forked process what a raylet gives to those that it starts."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.setpgid(0, 0)
    os.chdir(request["folder"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked_signals"])
    resource.setrlimit(resource.RLIMIT_NOFILE, tuple(request["open_files"]))
    score = request["environment"].get(OUT_OF_MEMORY_VARIABLE, OUT_OF_MEMORY_SCORE)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(score)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random:  # Python's own generator does this by itself
        numpy_random.seed()


def _agree(connection: socket.socket) -> None:
    """End this process unless the client, which may have waited too long, still wants it."""
    with connection, contextlib.suppress(OSError):
        connection.sendall(FORKED)
        if connection.recv(1) == TAKEN:
            return
    os._exit(1)


def main(arguments: Sequence[str]) -> None:
    """Serve on the socket whose descriptor is the first argument; the second is the parent's id."""
    descriptor, parent, *modules = arguments
    end_with_parent(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    separator = modules.index(SEPARATOR)
    server = ForkServer(socket.socket(fileno=int(descriptor)))
    sys.argv = server.run(modules[:separator], modules[separator + 1 :])
    script = sys.argv[0]
    sys.path.insert(0, str(Path(script).parent))  # as the interpreter does it
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
