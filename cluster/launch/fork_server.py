"""Starts the processes of our own Ray by forking one that has imported everything already.

Before a gateway, a worker, a router, Control or Serve's controller does anything, it imports Ray,
Serve, torch and this package. That takes 2 to 6 s of CPU in each of them. The fork server imports
them once:

    raylet -> fork_client.py, in place of Ray's own script -> the server forks -> Ray's worker script

A forked process must be what it would be if it had been started by itself:

- Ray's library and others read environment variables when they are imported. So the server takes
  the variables of the first request before it imports Ray, and refuses requests that have others.
- Only the thread that forks lives on in the new process. So the server refuses all requests once a
  module has started a thread.
- Ray draws ids at random, and two processes must not draw the same. The server tries that after
  each import, and refuses all requests if they would.

Whoever is refused, or finds no server any more, is started as Ray does it. Why, stands in
`fork_server.log` in the folder of the cluster.

The server imports in steps, and answers requests between them: the first process of a cluster,
Serve's controller, needs little of it, and needs it soon.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .fork_client import FORKED, LENGTH_BYTES, RAY_SCRIPT, SOCKET
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
#: Imported after the first request.
MODULES = (
    "ray",
    "ray.serve",
    "ray.serve._private.replica",
    "ray.serve._private.controller",
    "diptych.cluster.app",
)
SEPARATOR = "then"  #: Between the two lists, as arguments of the server.
#: Beginnings of the names of variables that Ray adds to those that its processes inherit.
ADDED_BY_RAY = ("RAY_", "SPT_NOENV")
#: Ray's switch: whether it starts workers in advance. For no job yet, they would have other variables
#: than all later ones.
PRESTART_VARIABLE = "RAY_prestart_worker_first_driver"
QUEUE_LENGTH = 64
REQUEST_LIMIT_S = 5.0  #: For a request to arrive whole.
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
    Ray's internals are not those that this builds on.
    """
    from ray._private import ray_constants

    ray_script = Path(ray_constants.__file__).parent / "workers" / "setup_worker.py"
    if not ray_script.exists() or not hasattr(ray_constants, "SETUP_WORKER_FILENAME"):
        return
    # Ray joins this name to the folder of its own script, and an absolute path stays what it is. A
    # raylet leaves a script out that is called setup_worker.py, where it has nothing to set up.
    ray_constants.SETUP_WORKER_FILENAME = str(Path(__file__).with_name("fork_client.py"))
    os.environ[RAY_SCRIPT] = str(ray_script)
    os.environ[SOCKET] = str(folder / "fork_server.sock")
    os.environ[PRESTART_VARIABLE] = "0"
    with (
        socket.socket(socket.AF_UNIX) as listener,
        (folder / "fork_server.log").open("wb") as log_file,
    ):
        listener.bind(os.environ[SOCKET])
        listener.listen(QUEUE_LENGTH)
        server = subprocess.Popen(
            # That the modules' names are arguments also makes the command long: a process of Ray has
            # its title in the memory that the command had.
            [
                *(sys.executable, "-m", "diptych.cluster.launch.fork_server"),
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
                    gc.freeze()  # so that the processes go on sharing the memory of what is there

    def _import(self, module: str) -> None:
        """Import a module that may use Ray, and see whether processes can still be forked."""
        with _class_ids_of_their_own():
            importlib.import_module(module)
        if len(os.listdir("/proc/self/task")) > 1:
            self._flaw = f"{module} has started a thread"
        elif _id_drawn_in_fork() == _id_drawn_in_fork():
            self._flaw = f"after {module}, forked processes draw the same ids"

    def _serve_one(self) -> list[str] | None:
        """Answer one request. Return the command in the forked process, and None in the server."""
        connection, _ = self._listener.accept()
        streams: list[int] = []
        try:
            connection.settimeout(REQUEST_LIMIT_S)
            request = _receive(connection, streams)
            self._check(request["environment"])
        except (OSError, ValueError, KeyError, Refused) as error:
            print(f"refused: {error!r}", flush=True)
            _close(connection, streams)  # which says it to whoever asks
            return None
        if os.fork():
            _close(connection, streams)
            return None
        self._listener.close()
        _take_over(request, streams)
        connection.sendall(
            FORKED
        )  # raises where nobody waits any more, and Ray has started another
        connection.close()
        return request["command"]

    def _check(self, environment: dict[str, str]) -> None:
        """Raise Refused if a process that is forked now would not be one with these variables."""
        if self._environment is None:
            own = _without_rays(dict(os.environ))
            _compare(own, _without_rays(environment))
            self._environment = environment
            os.environ.update(environment)
            self._import("ray")
        _compare(self._environment, environment)
        if self._flaw:
            raise Refused(self._flaw)


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
        os.write(write_end, UniqueID.from_random().binary())
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
    body = b""
    while len(body) < length:
        piece = connection.recv(length - len(body))
        if not piece:
            raise ValueError("the request is cut off")
        body += piece
    if len(streams) != STANDARD_STREAMS:
        raise ValueError(f"{len(streams)} streams instead of {STANDARD_STREAMS}")
    return json.loads(body)


def _close(connection: socket.socket, streams: Sequence[int]) -> None:
    for stream in streams:
        os.close(stream)
    connection.close()


def _take_over(request: dict[str, Any], streams: Sequence[int]) -> None:
    """Make a forked process what one is that a raylet starts."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.setpgid(0, 0)
    os.chdir(request["folder"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked_signals"])
    score = request["environment"].get(OUT_OF_MEMORY_VARIABLE, OUT_OF_MEMORY_SCORE)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(score)


def main(arguments: Sequence[str]) -> None:
    """Serve on the socket whose descriptor is the first argument; the second is the parent's id."""
    descriptor, parent, *modules = arguments
    end_with_parent(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel takes note of the ends of children
    separator = modules.index(SEPARATOR)
    server = ForkServer(socket.socket(fileno=int(descriptor)))
    sys.argv = server.run(modules[:separator], modules[separator + 1 :])
    script = sys.argv[0]
    sys.path[0] = str(Path(script).parent)  # as the interpreter does it
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
