"""Every socket on which a cluster listens, and what each of them answers to a stranger."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import msgspec
import psutil
from diptych.cluster.launch.ray_cluster import HARMLESS_CALL
from diptych.protos.frames import Challenge, Hello
from diptych.protos.handshake import HANDSHAKE_BYTES_MAX, LENGTH, with_length

from .live import Live
from .ray_token import RAYLET_CALL, SERVE_CALL, WORKER_CALL, call

WILDCARDS = ("0.0.0.0", "::")
#: The title of a replica in front of its deployment: it has the name of the application.
REPLICA = re.compile(r"ray::ServeReplica:diptych[a-z0-9-]*:")
GREETING_S = 5.0  #: for the first word of a listener; UCX says none, and is waited for in vain
ANSWER_S = 20.0  #: for an answer, or for the end of the connection
HTTP2_SETTINGS = b"\x04"  #: the type of the frame with which a gRPC server begins
#: One call of each service of the cluster, sent with an empty message.
CALLS = {
    HARMLESS_CALL: "GCS",
    RAYLET_CALL: "node manager",
    "/ray.rpc.ObjectManagerService/Push": "object manager",
    "/ray.rpc.LogService/ListLogs": "agent, gRPC",
    WORKER_CALL: "core worker",
    SERVE_CALL: "Serve's calls",
    "/diptych.v1.Inference/ListModels": "API, gRPC",
    "/diptych.v1.Admin/Status": "admin API, gRPC",
}
#: Who asks for a secret over HTTP, by process.
HTTP_CHANNELS = {
    "Gateway": "API, HTTP",
    "Control": "admin API, HTTP",
    "DashboardAgent": "agent, HTTP",
    "RuntimeEnvAgent": "environments, HTTP",
}
#: What is asked over HTTP; `/metrics` comes first, since whoever answers it is an exporter.
PATHS = (
    "/metrics",
    "/",
    "/health",
    "/ping",
    "/ready",
    "/docs",
    "/openapi.json",
    "/version",
    "/load",
    "/v1/models",
    "/dashboard",
    "/metrics/targets",
    "/admin/v1/cluster",
    "/admin/v1/config",
    "/api/serve/applications/",
    "/api/job_agent/jobs/",
    "/api/local_raylet_healthz",
)


@dataclass(frozen=True, slots=True)
class ListeningSocket:
    """A TCP socket on which a process of the cluster listens."""

    title: str  #: of the process
    process: str  #: the same in a word
    host: str
    port: int

    @property
    def address(self) -> str:
        host = "127.0.0.1" if self.host in WILDCARDS else self.host
        return f"{host}:{self.port}"

    @property
    def reach(self) -> str:
        """From where it can be reached."""
        if self.host in WILDCARDS:
            return "every address"
        return "loopback" if self.host == "127.0.0.1" else "the machine's address"


@dataclass(frozen=True, slots=True)
class StrangerAnswer:
    """What a stranger gets from one socket."""

    channel: str  #: what listens there, by its answers; "unknown" where nothing is recognized
    #: Calls and paths that were answered without a secret; the health of gRPC servers is not asked.
    answered: frozenset[str] = frozenset()


def processes_of(live: Live) -> list[psutil.Process]:
    """Return `diptych serve` and all processes below it."""
    root = psutil.Process(live.process.pid)
    return [root, *root.children(recursive=True)]


def listening_sockets(live: Live) -> list[ListeningSocket]:
    """Return every TCP socket on which the cluster listens."""
    sockets = []
    for process in processes_of(live):
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                words = process.cmdline()
                title = " ".join(words)[:60]
                if title.startswith("ray::"):  # Ray appends the method that runs: `...Router.ask`
                    title = title.partition(".")[0].strip()
                host = connection.laddr.ip.removeprefix("::ffff:")
                port = connection.laddr.port
                sockets.append(ListeningSocket(title, _process_word(title, words), host, port))
    return sockets


def _process_word(title: str, words: list[str]) -> str:
    if title.startswith("ray::"):
        return REPLICA.sub("", title).removeprefix("ray::")
    if "serve" in words:
        return "diptych serve"
    program = next((word for word in words if word.endswith(".py")), words[0])
    return Path(program).name


def ask_as_stranger(listener: ListeningSocket) -> StrangerAnswer:
    """Ask one socket for everything, without any secret."""
    first_bytes = _first_bytes(listener)
    if first_bytes.startswith(b"HTTP/1."):
        return _ask_by_http(listener)
    if first_bytes[3:4] == HTTP2_SETTINGS:
        return _ask_by_grpc(listener)
    if b"challenge" in first_bytes:
        return _ask_by_frames(listener)
    is_mute_worker = not first_bytes and listener.process in ("PrefillWorker", "DecodeWorker")
    return StrangerAnswer("UCX" if is_mute_worker else "unknown")


def _first_bytes(listener: ListeningSocket) -> bytes:
    """Return what is said first to somebody who speaks HTTP/1.1: each protocol gives itself away.

    Empty where the listener hangs up, or says nothing within `GREETING_S`.
    """
    host, port = listener.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=GREETING_S) as stranger:
        try:
            stranger.sendall(f"GET / HTTP/1.1\r\nhost: {listener.address}\r\n\r\n".encode())
            return stranger.recv(64)
        except OSError:
            return b""


def _ask_by_grpc(listener: ListeningSocket) -> StrangerAnswer:
    codes = {method: call(listener.address, method) for method in CALLS}
    unauthenticated = grpc.StatusCode.UNAUTHENTICATED
    channels = [CALLS[method] for method, code in codes.items() if code == unauthenticated]
    #: Whatever is neither refused nor missing was carried out, be it with an error.
    harmless = (unauthenticated, grpc.StatusCode.UNIMPLEMENTED)
    answered = frozenset(method for method, code in codes.items() if code not in harmless)
    return StrangerAnswer(channels[0] if len(channels) == 1 else "unknown", answered)


def _ask_by_http(listener: ListeningSocket) -> StrangerAnswer:
    answered = set()
    statuses = set()
    with httpx.Client(base_url=f"http://{listener.address}", timeout=ANSWER_S) as client:
        for path in PATHS:
            response = client.get(path)
            statuses.add(response.status_code)
            if response.is_success or response.is_redirect:
                answered.add(path)
            if path == "/metrics" and response.is_success and "# HELP" in response.text:
                return StrangerAnswer("metrics", frozenset([path]))
    refuses = 401 in statuses
    channel = HTTP_CHANNELS.get(listener.process, "unknown") if refuses else "unknown"
    return StrangerAnswer(channel, frozenset(answered))


def _ask_by_frames(listener: ListeningSocket) -> StrangerAnswer:
    """Answer the Challenge with what cannot be a proof, and expect to be hung up on."""
    host, port = listener.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=GREETING_S) as stranger:
        stranger.settimeout(ANSWER_S)
        size = LENGTH.unpack(stranger.recv(LENGTH.size, socket.MSG_WAITALL))[0]
        challenge = stranger.recv(min(size, HANDSHAKE_BYTES_MAX), socket.MSG_WAITALL)
        assert msgspec.msgpack.decode(challenge, type=Challenge).nonce
        for kind in ("worker", "kv"):
            hello = Hello("prefill/stranger", kind, nonce=b"n" * 16, proof=b"p" * 32)
            try:
                stranger.sendall(with_length(msgspec.msgpack.encode(hello)))
            except ConnectionError:
                break
        answered = frozenset(["Welcome"]) if _says_something(stranger) else frozenset[str]()
    return StrangerAnswer("frames", answered)


def _says_something(stranger: socket.socket) -> bool:
    """Return whether the listener says anything before it hangs up. Raises TimeoutError."""
    try:
        return bool(stranger.recv(1))
    except ConnectionError:
        return False
