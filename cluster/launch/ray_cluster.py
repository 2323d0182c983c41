"""Starts Ray on this machine or joins a Ray that runs, and decides who may talk to it.

Whoever may call one of Ray's processes can run code in it. So each of these processes asks its
callers for a token (`RAY_AUTH_MODE=token`), unless the setting `ray.auth` is "disabled".
`start_ray` makes a token for its one cluster, in a file that nobody but this user can read.
`join_ray` uses the token that Ray itself would take. Both call the running cluster once without a
token, where Ray uses no TLS and its address is not `ray://`, and fail if the answer contradicts
`ray.auth`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shlex
import signal
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import grpc

from ..config import ConfigError
from . import fork_server

AuthMode = Literal["token", "disabled"]

#: Defaults that every Ray process inherits and reads at import. Variables that are set already win.
ENVIRONMENT = {
    # Serve's calls go by gRPC. A replica runs user code and Serve's router in its main event loop,
    # instead of in a thread each: streams need not change threads.
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's periodic work is done less often than by default, or never (task events at 0, and
    # metrics): it takes CPU from the engines.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",
    # Serve replaces its HTTP proxy after three failed checks. With its own period and limit of 10 s a
    # dead proxy was missed for 28 s, and one that hangs after SIGTERM for 45 s.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "4",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_gcs_pull_resource_loads_period_milliseconds": "5000",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_enable_metrics_collection": "0",
    # 15 by default: gateways, too, would yield to whatever else runs here. Engines' threads do so by
    # themselves (`engine/priority.py`).
    "RAY_worker_niceness": "0",
    "OMP_NUM_THREADS": "1",  # an engine sets its own number (`threads` of the engine's options)
    # numpy starts its threads when it is imported, and nobody here computes much with it.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    # How often libgomp looks before it sleeps at a barrier. Its default (300,000: 3 ms and more)
    # holds a core that another process wants; 0, as "passive" alone has it, makes a system call of
    # every barrier. 32 small linears on two cores, two threads: 7.1 ms at 0, 3.6 at 2,000, 3.3 at
    # 20,000 and by default. With others on both cores: 6.2, 8.2, 27, and 7.3 by default, but every
    # tenth step 300.
    "GOMP_SPINCOUNT": "2000",
    "TOKENIZERS_PARALLELISM": "false",
    "NIXL_LOG_LEVEL": "WARN",
}

#: What all of Ray's processes need besides, where Ray keeps what its head knows in a store (GCS fault
#: tolerance), so that another head can follow. A head whose node dies closes no connection, and
#: Ray's processes would wait for it for seven minutes. Serve gives its replicas 30 s to answer a new
#: head, and then kills them. Either all processes have these or none: a GCS without them closes the
#: connections of those who ask for a sign of life so often.
LOST_HEAD_ENVIRONMENT = {
    "RAY_grpc_client_keepalive_time_ms": "10000",
    "RAY_grpc_client_keepalive_timeout_ms": "5000",
}

AUTH_MODE = "RAY_AUTH_MODE"  #: Ray's variable: whether its processes ask callers for a token.
TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"  #: Ray's variable: the file with the token.
#: Variables that would make `start_ray`'s token worthless: the first takes precedence over
#: `TOKEN_PATH`, and with the second Ray's processes ask Kubernetes whether a token is right.
OVERRIDING_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_ENABLE_K8S_TOKEN_AUTH")
#: Ray replaces 127.0.0.1 by the machine's own address, unless this variable says that there are no
#: clusters of several nodes here, as on Windows. Then Ray's own processes listen on 127.0.0.1 only,
#: and the token, which travels unencrypted, does not leave the machine.
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
#: UCX, below NIXL, asks nobody for a proof: whoever reaches its port can write a worker's memory.
#: Workers on one machine need no other network device; a value that is set already is kept.
UCX_DEVICES = {"UCX_NET_DEVICES": "lo"}

#: Ray's GCS, the head's process that every other one calls, answers this call, sent with an empty
#: message, and changes nothing.
HARMLESS_CALL = "/ray.rpc.NodeInfoGcsService/CheckAlive"
CALL_TIMEOUT_S = 10.0  #: How long that call waits for its answer.
CONNECT_LIMIT_S = 1.0  #: For the GCS's machine, this one, to take a connection.
#: gRPC's options for a channel that ignores `http_proxy`, as Ray's own connections do.
NO_PROXY = [("grpc.enable_http_proxy", 0)]
#: Where Ray's GCS keeps the secret that no file and no variable gives (`shared_secret`).
SECRET_KEY = "secret"
SECRET_NAMESPACE = "diptych"


class StartError(Exception):
    """The cluster could not be started or joined; the message says why."""


@dataclass(frozen=True, slots=True)
class RayAccess:
    """What a terminal of this user needs for `ray` and `serve`."""

    gcs_address: str  #: host:port
    token_file: Path | None  #: None: this Ray asks nobody for a token

    def export_line(self, dashboard_url: str) -> str:
        """Return the shell command after which `ray status` and `serve status` work.

        `dashboard_url` is where Ray's command `serve` asks. Ray's own dashboard does not run: the
        cluster's Control process answers there (control/ray_dashboard.py).
        """
        variables = {AUTH_MODE: "disabled"}
        if self.token_file:
            variables = {AUTH_MODE: "token", TOKEN_PATH: str(self.token_file)}
        variables |= LOOPBACK_ONLY
        variables["RAY_AUTH_TOKEN"] = ""  # a token that the terminal has already would win
        variables |= {"RAY_ADDRESS": self.gcs_address, "RAY_DASHBOARD_ADDRESS": dashboard_url}
        pairs = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
        return " ".join(["export", *pairs])


def check_environment(auth: AuthMode) -> None:
    """Raise ConfigError if the inherited `RAY_AUTH_MODE` contradicts `auth`, or is no mode of Ray.

    `auth` is the setting `ray.auth`, here and below.
    """
    inherited = os.environ.get(AUTH_MODE, "")
    if inherited.lower() in ("", auth):
        return
    if auth == "disabled":
        raise ConfigError(
            f"ray.auth is disabled, and the environment says {AUTH_MODE}={inherited}: unset it, or "
            "leave ray.auth at token"
        )
    if inherited.lower() != "disabled":
        raise ConfigError(f"{AUTH_MODE}={inherited} in the environment is no mode: unset it")
    raise ConfigError(
        f"{AUTH_MODE}={inherited} is set in the environment: whoever reaches one of Ray's ports "
        "could run code as this user; unset it, or accept that with --set ray.auth=disabled"
    )


def start_ray(folder: Path, auth: AuthMode, cpus: int, with_fork_server: bool = False) -> RayAccess:
    """Start Ray on this machine, listening on loopback, with its sessions and token in `folder`.

    `folder` must be this user's alone (0700), as Ray lets everybody into its own folders below it.
    `cpus` is how many cores Ray is told that this machine has. `with_fork_server`: Ray's processes are
    forked from one that has imported everything already (fork_server.py), where that can be started.
    Ray ends with `ray.shutdown`, at the latest with this process. Raises ConfigError where the
    environment contradicts `auth`, and StartError where Ray does not start or answer, or treats a
    caller without a token otherwise than `auth` says.
    """
    check_environment(auth)
    _set_environment(auth)
    # A variable that is set already is kept against UCX_DEVICES, and replaced by LOOPBACK_ONLY.
    os.environ |= {**UCX_DEVICES, **os.environ, **LOOPBACK_ONLY}
    for name in OVERRIDING_VARIABLES:
        os.environ.pop(name, None)
    token_file = _make_and_export_token(folder) if auth == "token" else None
    if with_fork_server:
        with contextlib.suppress(OSError):  # Ray does without
            fork_server.start(folder)
    import ray

    _start_no_log_monitor()
    try:
        _init_ray(
            address="local",
            num_cpus=cpus,
            include_dashboard=False,
            object_store_memory=100 << 20,  # hardly used: KV and frames do not travel through Ray
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(folder / "ray"),
        )
    except Exception as error:  # of any kind, among them plain `Exception`s
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise StartError(
            f"Ray did not start: {reason[0]} Is the machine overloaded, or short of memory or of "
            f"room in {folder.parent}?"
        ) from None
    gcs_address = ray.get_runtime_context().gcs_address
    try:
        _check_stranger_policy(gcs_address, auth)
    except ConnectionError as error:
        raise StartError(f"Ray at {gcs_address} does not answer: {error}") from None
    return RayAccess(gcs_address, token_file)


def join_ray(address: str, auth: AuthMode) -> None:
    """Connect to the Ray cluster at `address` with the token that Ray itself would take.

    Ray takes `RAY_AUTH_TOKEN`, else the file that `RAY_AUTH_TOKEN_PATH` names, else
    `~/.ray/auth_token`. Through `ray://` nothing can be checked here; the application's builder
    (app.py), which runs on that cluster, refuses a Ray that asks for no token.
    Raises ConfigError where the environment contradicts `auth`, StartError where no Ray answers,
    the token is missing or wrong, or whether this Ray asks for one contradicts `auth`.
    """
    check_environment(auth)
    _set_environment(auth)
    # Set by the export line of a cluster on this machine. With it Ray would take 127.0.0.1 for this
    # machine's address, also towards a cluster of several nodes.
    for name in LOOPBACK_ONLY:
        os.environ.pop(name, None)
    if address == "auto":  # as Ray means it: the address of its own variable, else one on this host
        address = os.environ.get("RAY_ADDRESS") or address
    from ray.exceptions import AuthenticationError

    try:
        if not address.startswith("ray://"):
            address = _check_before_joining(address, auth)
        _init_ray(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except AuthenticationError as error:
        reason = str(error).split(". ")[0]  # the rest is advice on how to make a shared token
        raise StartError(f"no usable token for Ray at {address}: {reason}") from None
    except (ConnectionError, ValueError) as error:
        raise StartError(f"no Ray at {address}: {error}") from None


def shared_secret() -> str:
    """Return the secret that is the same for everybody who asks in this Ray cluster.

    It is the one that `set_shared_secret` was given, if it was. Else the first to ask draws it. Ray's
    GCS keeps it for the others, who need Ray's token to read it. Must be called in a process of Ray.
    """
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

    drawn = secrets.token_hex(16)
    _internal_kv_put(SECRET_KEY, drawn, overwrite=False, namespace=SECRET_NAMESPACE)
    return _internal_kv_get(SECRET_KEY, namespace=SECRET_NAMESPACE).decode()


def set_shared_secret(secret: str) -> None:
    """Make `secret` what `shared_secret` returns from now on. Ray must have been joined."""
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(SECRET_KEY, secret, overwrite=True, namespace=SECRET_NAMESPACE)


def _init_ray(**settings: Any) -> None:
    """Call `ray.init` with these settings; a SIGTERM stays with the handler that it has now.

    Ray's own handler prints a stack and calls the handler before it, but three seconds later it
    aborts the process, which then has not stopped the cluster yet.
    """
    import ray

    handler = signal.getsignal(signal.SIGTERM)
    ray.init(**settings)
    if callable(handler) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _start_no_log_monitor() -> None:
    """Let the Ray that this process starts do without a log monitor; `ray.init` has no such setting.

    The monitor reads all logs again and again, to send what workers write to the driver, and keeps
    a descriptor open for each log that there ever was. Our driver wants none of it (`log_to_driver`).
    """
    from ray._private.node import Node

    def start_none(node: Node) -> None:
        """Stand in for the method that starts the monitor."""

    setattr(Node, "start_log_monitor", start_none)  # noqa: B010  # mypy takes no assignment


def ended_ray_processes() -> dict[str, int]:
    """Return the exit codes of processes of our own Ray that have ended, by Ray's names for them.

    A Ray that others started has none: its processes are not this one's children.
    """
    return {
        name: process.returncode
        for name, process in _ray_node().dead_processes()
        if process.returncode is not None
    }


def gcs_is_closed(gcs_address: str) -> bool:
    """Return whether nobody listens at the address (host:port) of Ray's GCS.

    After a SIGTERM a GCS closes its port, and then neither answers nor ends. A GCS that is only
    frozen or slow has its port open, and whether it answers is not asked.
    """
    host, _, port = gcs_address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_LIMIT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:  # so many wait for a frozen one that the kernel takes no more
        return False
    return False


def ray_process_ids() -> set[int]:
    """Return the ids of all processes that our own Ray's start has started."""
    processes = _ray_node().all_processes.values()
    return {info.process.pid for infos in processes for info in infos}


def _ray_node() -> Any:
    from ray._private import worker

    assert worker._global_node is not None, "Ray was started or joined"
    return worker._global_node


def _check_before_joining(address: str, auth: AuthMode) -> str:
    """Return the address (host:port) of a GCS that treats strangers as `auth` says.

    With "token" it also takes our token. Otherwise the error says in one sentence what `ray.init`
    reports after 20 s in 20 lines, or not at all. Raises StartError, ConnectionError, ValueError.
    """
    from ray._private.services import canonicalize_bootstrap_address_or_die

    if address == "local":
        raise ValueError("local would start another Ray; leave --ray-address out for that")
    gcs_address = canonicalize_bootstrap_address_or_die(address)
    _check_stranger_policy(gcs_address, auth)
    if auth == "token" and not _token_is_accepted(gcs_address):
        raise StartError(
            f"no token, or a wrong one, for Ray at {address}: export {TOKEN_PATH}=FILE with the "
            "token that its nodes were started with"
        )
    return gcs_address


def _check_stranger_policy(gcs_address: str, auth: AuthMode) -> None:
    """Raise StartError if Ray's treatment of a caller without a token contradicts `auth`."""
    if _uses_tls():  # without a certificate nobody gets an answer
        return
    refused = refuses_strangers(gcs_address)
    if auth == "token" and not refused:
        raise StartError(
            f"Ray at {gcs_address} asks nobody for a token: whoever reaches it can run code there; "
            f"start its nodes with {AUTH_MODE}=token, or accept that with --set ray.auth=disabled"
        )
    if auth == "disabled" and refused:
        raise StartError(
            f"Ray at {gcs_address} asks for a token: leave ray.auth at token, "
            f"and export {TOKEN_PATH}=FILE"
        )


def refuses_strangers(gcs_address: str) -> bool:
    """Return whether Ray's GCS refuses a harmless call because it carries no token.

    Raises ConnectionError where no GCS answers within `CALL_TIMEOUT_S`.
    """
    with grpc.insecure_channel(gcs_address, NO_PROXY) as channel:
        return not _is_answered(channel)


def _token_is_accepted(gcs_address: str) -> bool:
    """Return whether Ray finds a token in this environment, and the GCS takes it."""
    from ray._private.grpc_utils import init_grpc_channel
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    if not AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
        return False
    with init_grpc_channel(gcs_address, NO_PROXY) as channel:  # it adds the token to each call
        return _is_answered(channel)


def _is_answered(channel: grpc.Channel) -> bool:
    """Send Ray's GCS a harmless call. True: it answers; False: it refuses, as no right token came.

    Raises ConnectionError for any other outcome: then nobody is there, or somebody else.
    """
    try:
        channel.unary_unary(HARMLESS_CALL)(b"", timeout=CALL_TIMEOUT_S)
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.UNAUTHENTICATED:
            return False
        raise ConnectionError(f"{error.code().name}: {error.details()}") from None
    return True


def _set_environment(auth: AuthMode) -> None:
    """Set what Ray's processes inherit: defaults where nothing is set, and the mode in any case."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ[AUTH_MODE] = auth


def _make_and_export_token(folder: Path) -> Path:
    """Write a new token to a file that only this user can read, and name the file to Ray.

    Raises StartError where the file cannot be written.
    """
    token_file = folder / "ray_token"
    try:
        descriptor = os.open(token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
    except OSError as error:
        raise StartError(f"cannot write Ray's token to {token_file}: {error.strerror}") from None
    os.environ[TOKEN_PATH] = str(token_file)
    return token_file


def _uses_tls() -> bool:
    """Return whether Ray's variables ask for TLS between its processes, with certificates."""
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")
