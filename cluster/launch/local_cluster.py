"""Starts a cluster: checks, Ray (or joins a Ray that runs), Serve, progress, clean shutdown.

The application is deployed as a Serve config, not by `serve.run`: the same config with other counts
scales it in place (`control/serve.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import SECRET, ClusterConfig, ConfigError, GatewaySettings, host_and_port
from ..control.serve import APP, HOMES
from ..worker import cores
from .checkpoint import Checkpoint, check_memory, find
from .ray_cluster import RayAccess, StartError, check_environment, join_ray, start_ray

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

START_S = 600.0
CLOSE_S = 3.0  #: for gateways to tell their clients that the cluster ends
GRPC_SERVICES = [
    "diptych.protos.inference_pb2_grpc.add_InferenceServicer_to_server",
    "grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server",
]

Say = Callable[[str], None]


class Cluster:
    """A running cluster; `stop` ends it, whatever state it is in."""

    def __init__(
        self, config: ClusterConfig, checkpoint: Checkpoint, ray_address: str | None = None
    ) -> None:
        self.config, self.checkpoint, self._address = config, checkpoint, ray_address
        self._router: DeploymentHandle | None = None
        self._temp = ""
        #: None: Ray was started by others, or is not up yet.
        self.ray_access: RayAccess | None = None

    def start(self, say: Say) -> None:
        """Starts Ray and deploys. Raises ConfigError or StartError."""
        if self._address:
            say(f"joining Ray at {self._address}")
            join_ray(self._address, self.config.ray.auth)
        else:
            self._check_ports()
            cores.offer(self.config)
            say("starting Ray")
            self._start_ray()
        say("starting Serve")
        self._deploy(say)

    def _check_ports(self) -> None:
        gateway, control = self.config.gateway, self.config.control
        check_port(gateway.host, gateway.http_port, "gateway.http_port")
        check_port(gateway.host, gateway.grpc_port, "gateway.grpc_port")
        check_port(control.host, control.port, "control.port")
        check_port(control.host, control.grpc_port, "control.grpc_port")

    def _start_ray(self) -> None:
        os.environ[SECRET] = self.config.secret
        self._temp = tempfile.mkdtemp(prefix="dip", dir="/tmp")  # unix socket paths must be short
        cpus = max(os.cpu_count() or 1, 2)
        self.ray_access = start_ray(Path(self._temp), self.config.ray.auth, cpus)

    def _deploy(self, say: Say) -> None:
        from ray import serve
        from ray.serve.config import gRPCOptions
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        gateway = self.config.gateway
        proxies = gateway.listen == "serve"
        proxied = gRPCOptions(port=gateway.grpc_port, grpc_servicer_functions=GRPC_SERVICES)
        serve.start(
            proxy_location="EveryNode" if proxies else "Disabled",
            http_options={"host": gateway.host, "port": gateway.http_port},
            grpc_options=proxied if proxies else None,
        )
        say("starting workers")
        application = serve_config(self.config, self.checkpoint)
        client = _get_global_client()
        assert client, "Serve was started above"
        client.deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))
        self._wait(say)

    def _wait(self, say: Say) -> None:
        """Until every deployment is healthy and the gateway is ready; tells what happens."""
        from ray import serve

        said: dict[str, str] = {}
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            application = serve.status().applications.get(APP)
            if application is not None:
                for name, deployment in application.deployments.items():
                    line = f"{name}: {deployment.status.value.lower()}"
                    if deployment.status.value in ("DEPLOY_FAILED", "UNHEALTHY"):
                        raise StartError(_cause(name, deployment.message))
                    if said.get(name) != line and "healthy" in line:
                        said[name] = line
                        say(line)
                self._say_loading(say, said)
                if application.status.value == "RUNNING" and self.ready():
                    return
                if application.status.value == "DEPLOY_FAILED":
                    raise StartError(_cause("the application", application.message))
            time.sleep(0.1)
        raise StartError(f"the cluster was not ready after {START_S:.0f} s; logs: {self.logs}")

    def _say_loading(self, say: Say, said: dict[str, str]) -> None:
        """Workers' own words, once the router is up to pass them on."""
        if "Router" not in said:
            return
        progress = self._router_handle().progress.remote().result()
        for worker, (note, fraction) in progress.items():
            if fraction < 1.0 and said.get(worker) != note:
                said[worker] = note
                say(f"{worker}: {note} ({fraction:.0%})")

    def ready(self) -> bool:
        import httpx

        try:
            return httpx.get(f"{self.url}/ready", timeout=2.0, verify=False).status_code == 200
        except httpx.HTTPError:
            return False

    @property
    def url(self) -> str:
        gateway = self.config.gateway
        scheme = "https" if gateway.tls_cert else "http"
        return f"{scheme}://{host_and_port(gateway.host, gateway.http_port)}"

    @property
    def logs(self) -> Path:
        return Path(self._temp) / "ray" / "session_latest" / "logs"

    def stop(self) -> None:
        import ray
        from ray import serve

        if ray.is_initialized():
            with _quiet(), contextlib.suppress(Exception):  # Serve may not have come up
                self._close_gateways()
                if self._address:
                    serve.delete(APP)
                else:
                    serve.shutdown()
                ray.shutdown()
        if self._temp:
            shutil.rmtree(self._temp, ignore_errors=True)

    def _close_gateways(self) -> None:
        """Open answers end with an error that says so, before Serve ends their gateways."""
        with contextlib.suppress(Exception):  # there may be no router
            self._router_handle().close_gateways.remote().result(timeout_s=CLOSE_S)

    def _router_handle(self) -> DeploymentHandle:
        from ray import serve

        if self._router is None:
            self._router = serve.get_deployment_handle("Router", APP)
            self._router._init(_run_router_in_separate_loop=True)  # no event loop runs here
        return self._router


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides what Ray writes about the actors that it ends itself."""
    sys.stdout.flush()
    null = os.open(os.devnull, os.O_WRONLY)
    kept = [(number, os.dup(number)) for number in (1, 2)]
    for number, _ in kept:
        os.dup2(null, number)
    try:
        yield
    finally:
        sys.stdout.flush()
        for number, copy in kept:
            os.dup2(copy, number)
            os.close(copy)
        os.close(null)


def serve_config(config: ClusterConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    """The application in a Serve config file. Its arguments must not change when it is scaled.

    The secret is no argument, as Serve logs these: the builder takes it from the environment of
    Ray's nodes, or makes one.
    """
    args = config.model_dump(mode="json", exclude={"secret"})
    args["model"] |= {"path": str(checkpoint.folder), "name": checkpoint.name}
    pools = [
        {"name": deployment, "num_replicas": getattr(config.pools, home).replicas}
        for home, deployment in HOMES.items()
        if getattr(config.pools, home).replicas
    ]
    path = "diptych.cluster.app:application"
    return {
        "name": APP,
        "import_path": path,
        "route_prefix": "/",
        "args": args,
        "deployments": pools,
    }


def prepare(config: ClusterConfig, ray_address: str | None = None) -> Cluster:
    """Checks everything that can be checked before a process starts. Raises ConfigError."""
    check_environment(config.ray.auth)
    checkpoint = find(config)
    if ray_address is None:
        check_memory(config, checkpoint.spec)
        check_gateway(config.gateway)
    return Cluster(config, checkpoint, ray_address)


def check_gateway(settings: GatewaySettings) -> None:
    """Its files are there. Raises ConfigError."""
    from ..gateway.edge.keys import KeyFileError, read_keys

    try:
        if settings.api_keys_file:
            read_keys(Path(settings.api_keys_file))
        for file in (settings.tls_cert, settings.tls_key):
            if file:
                Path(file).read_bytes()
    except KeyFileError as error:
        raise ConfigError(f"gateway.api_keys_file: {error}; make one: diptych keys add") from None
    except OSError as error:
        raise ConfigError(f"gateway.tls_*: {error.filename}: {error.strerror}") from None


def check_port(host: str, port: int, key: str) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} on {host} cannot be used ({error.strerror}): stop what uses "
                f"it or choose another with --set {key}=PORT"
            ) from None


def _cause(name: str, message: str) -> str:
    """The last line of a worker's traceback: our errors say in it what is wrong."""
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    told = [line for line in lines if "Error: " in line or line.startswith("diptych.")]
    return f"{name} did not start: {(told or lines or ['no reason given'])[-1]}"
