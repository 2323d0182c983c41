"""Starts a cluster and ends it: `diptych serve`.

1. `prepare` checks the settings, the models and, for a Ray of our own, this machine.
2. `LocalCluster.start` starts Ray, or joins a Ray that runs, and then Serve.
3. The applications are deployed, one in front and one for each model. They are deployed as a Serve
   config, not by `serve.run`, because the same config with other replica counts scales an
   application in place (`control/serve.py`).
4. `start` reports progress until every deployment is healthy and the gateway is ready.
5. `watch` waits until Ray has lost a process without which no replica lives for long.
6. `stop` closes the gateways, so that open answers end with an error that says why, and then ends
   Serve and Ray, or only our applications on a Ray that others started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..applications import (
    FRONT_APPLICATION,
    FRONT_BUILDER,
    MODEL_BUILDER,
    ONLY_MODEL_SLUG,
    POOL_DEPLOYMENTS,
    ROUTER_DEPLOYMENT,
    application_names,
    is_of_diptych,
    model_application_name,
    serve_details,
)
from ..config import (
    SECRET,
    ClusterConfig,
    ConfigError,
    ControlSettings,
    GatewaySettings,
    ModelSettings,
    host_and_port,
)
from ..control.serve import change_applications
from ..model_entries import front_args, model_args, slug_of
from ..worker import cores
from .checkpoint import Checkpoint, check_memory, find_checkpoint
from .engine_environment import check_python
from .processes import reap_orphans
from .ray_cluster import (
    RayAccess,
    StartError,
    check_environment,
    ended_ray_processes,
    gcs_is_closed,
    join_ray,
    ray_process_ids,
    set_shared_secret,
    start_ray,
)

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle
    from ray.serve.schema import ApplicationStatusOverview

START_LIMIT_S = 600.0  #: From the deployment until requests can be served: large models load long.
POLL_INTERVAL_S = 0.1  #: Between two looks at a start's progress.
PROGRESS_LIMIT_S = 2.0  #: For the router to say what the workers load.
READY_TIMEOUT_S = 2.0  #: For the gateway to say whether it is ready.
CLOSE_LIMIT_S = 3.0  #: For gateways to tell their clients that the cluster ends.
#: What Serve's gRPC proxy serves, where it listens in place of the gateways.
GRPC_SERVICES = [
    "diptych.protos.inference_pb2_grpc.add_InferenceServicer_to_server",
    "grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server",
]
LOGS_PREFIX = "diptych-logs-"  #: Of folders for the logs of starts that failed.
KEPT_LOGS = 3  #: So many of these folders are kept.
WATCH_INTERVAL_S = 1.0  #: Between two looks at Ray's own processes.
VITAL_PROCESSES = ("gcs_server", "raylet")  #: As Ray names them.
FAILED_STATES = ("DEPLOY_FAILED", "UNHEALTHY")  #: Of a Serve deployment.

#: Takes a line for the user now and then.
ReportProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model that was found and can be served."""

    application: str  #: The name of the model's Serve application.
    config: ClusterConfig  #: The configuration that serves the model.
    checkpoint: Checkpoint


class LocalCluster:
    """A cluster from before its start to its end. `stop` ends it in whatever state it is.

    `ray_address` is that of the Ray to join; None: a new one is started on this machine.
    """

    def __init__(
        self,
        config: ClusterConfig,
        models: Sequence[PreparedModel],
        ray_address: str | None = None,
    ) -> None:
        self.config = config
        self.models = list(models)  #: At least one.
        #: What `ray` and `serve` in a terminal need; None if Ray was started by others, or is not
        #: up yet.
        self.ray_access: RayAccess | None = None
        #: The Ray to join; None: a new one is started.
        self._ray_address = ray_address
        self._gateway_host = config.gateway.host  #: Where `url` leads.
        self._routers: dict[str, DeploymentHandle] = {}  #: By application.
        #: The folder of our own Ray; empty if there is none.
        self._ray_folder = ""
        #: By deployment or worker: the progress that was reported last.
        self._reported: dict[str, str] = {}

    def start(
        self, report_progress: ReportProgress, note_folder: Callable[[str], None] | None = None
    ) -> None:
        """Start Ray, deploy, and return once requests can be served.

        `note_folder` takes the folder of our own Ray before anything is in it. Raises ConfigError
        or StartError.
        """
        if self._ray_address:
            report_progress(f"joining Ray at {self._ray_address}")
            join_ray(self._ray_address, self.config.ray.auth)
            if "secret" in self.config.model_fields_set:
                set_shared_secret(self.config.secret)
        else:
            self._check_ports()
            cores.offer([model.config for model in self.models])
            report_progress("starting Ray")
            self._make_folder()
            if note_folder:
                note_folder(self._ray_folder)
            self._start_ray()
        try:
            report_progress("starting Serve")
            self._start_serve()
            report_progress("starting workers")
            self._deploy()
            self._wait_until_ready(report_progress)
        except StartError as error:
            raise StartError(f"{error}{self._kept_logs()}") from None

    def _check_ports(self) -> None:
        """Raise ConfigError for a port that is taken, before Ray takes its seconds to start."""
        gateway = self.config.gateway
        control = self.config.control
        check_port(gateway.host, gateway.http_port, "gateway.http_port")
        check_port(gateway.host, gateway.grpc_port, "gateway.grpc_port")
        check_port(control.host, control.port, "control.port")
        check_port(control.host, control.grpc_port, "control.grpc_port")

    def _make_folder(self) -> None:
        # Paths of Unix sockets must be short, so the folder is not in TMPDIR.
        self._ray_folder = tempfile.mkdtemp(prefix="dip", dir="/tmp")

    def _start_ray(self) -> None:
        # The applications' builders, which run in processes of Ray, take the secret from here.
        os.environ[SECRET] = self.config.secret
        # What Ray places actors by; it binds none of them to a core.
        cpus = max(os.cpu_count() or 1, 2)
        ray = self.config.ray
        self.ray_access = start_ray(Path(self._ray_folder), ray.auth, cpus, ray.fork_server)

    def _start_serve(self) -> None:
        from ray import serve
        from ray.serve.config import gRPCOptions

        logging.getLogger("ray.serve").setLevel(logging.ERROR)  # progress is told in our words
        gateway = self.config.gateway
        http_options = {"host": gateway.host, "port": gateway.http_port}
        if gateway.listen == "serve":
            serve.start(  # Serve's proxies take the requests; else each gateway has sockets
                proxy_location="EveryNode",
                http_options=http_options,
                grpc_options=gRPCOptions(
                    port=gateway.grpc_port, grpc_servicer_functions=GRPC_SERVICES
                ),
            )
        else:
            serve.start(proxy_location="Disabled", http_options=http_options)

    def _deploy(self) -> None:
        """Let Serve run the cluster's applications, beside those that others deployed there.

        Applications that an earlier cluster left behind are deleted. Raises StartError if Serve
        does not take ours.
        """
        applications = serve_applications(self.config, self.models)

        def with_ours(deployed: list[dict[str, Any]]) -> list[dict[str, Any]]:
            of_others = [application for application in deployed if not is_of_diptych(application)]
            return [*of_others, *applications]

        try:
            asyncio.run(change_applications(with_ours))
        except ValueError as error:  # two applications of one name, or of one route
            raise StartError(f"Serve refuses the applications: {error}") from None

    def _wait_until_ready(self, report_progress: ReportProgress) -> None:
        """Report progress until every deployment is healthy and the gateway is ready.

        Raises StartError when a deployment fails, or after `START_LIMIT_S`.
        """
        from ray import serve

        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            statuses = serve.status().applications
            for name in self._application_names:
                if name in statuses:
                    self._report_application(name, statuses[name], report_progress)
            all_run = all(
                name in statuses and statuses[name].status.value == "RUNNING"
                for name in self._application_names
            )
            if all_run and self.ready():
                return
            time.sleep(POLL_INTERVAL_S)
        hosts = ", ".join(self._gateway_hosts())
        elsewhere = (
            f"; gateways run on {hosts}, and gateway.host says who can reach them" if hosts else ""
        )
        raise StartError(
            f"no gateway at {self.url} was ready after {START_LIMIT_S:.0f} s{elsewhere}"
        )

    def _kept_logs(self) -> str:
        """Return where the logs of our own Ray are kept, as the end of an error's sentence.

        The folder of our own Ray is deleted when the cluster ends, so the logs are copied. Those of
        the last `KEPT_LOGS` failed starts are kept: whoever starts again and again fills no disk.
        """
        if not self._ray_folder or not self.logs.is_dir():
            return ""
        earlier = sorted(Path(tempfile.gettempdir()).glob(f"{LOGS_PREFIX}*"), key=_modified_at)
        for folder in earlier[: -KEPT_LOGS + 1]:
            shutil.rmtree(
                folder, ignore_errors=True
            )  # others' folders stay: they cannot be deleted
        kept = tempfile.mkdtemp(prefix=LOGS_PREFIX)
        # Ray's processes still write and rotate: what can be copied is worth having.
        with contextlib.suppress(shutil.Error, OSError):
            shutil.copytree(self.logs, kept, dirs_exist_ok=True)
        return f"; Ray's logs are in {kept}"

    @property
    def _application_names(self) -> list[str]:
        """The applications that the cluster starts with; `diptych model` may change them later."""
        return [FRONT_APPLICATION, *(model.application for model in self.models)]

    def _report_application(
        self, name: str, application: ApplicationStatusOverview, report_progress: ReportProgress
    ) -> None:
        """Report what is new of an application. Raises StartError if it failed."""
        model = next((model for model in self.models if model.application == name), None)
        # With several models each has deployments and workers of the same names.
        prefix = f"{model.checkpoint.name}/" if model and len(self.models) > 1 else ""
        self._report_deployments(prefix, application, report_progress)
        if model:
            self._report_loading(prefix, name, report_progress)
        if application.status.value == "DEPLOY_FAILED":
            raise StartError(_describe_failure("the application", application.message))

    def _report_deployments(
        self, prefix: str, application: ApplicationStatusOverview, report_progress: ReportProgress
    ) -> None:
        """Report deployments that became healthy. Raises StartError if one failed."""
        for deployment_name, deployment in application.deployments.items():
            name = f"{prefix}{deployment_name}"
            state = deployment.status.value
            if state in FAILED_STATES:
                raise StartError(_describe_failure(name, deployment.message))
            line = f"{name}: {state.lower()}"
            # "UNHEALTHY" is a failure, and "UPDATING" says nothing.
            if state == "HEALTHY" and self._reported.get(name) != line:
                self._reported[name] = line
                report_progress(line)

    def _report_loading(
        self, prefix: str, application: str, report_progress: ReportProgress
    ) -> None:
        """Report what a model's workers load, once there is a router that knows it."""
        if f"{prefix}{ROUTER_DEPLOYMENT}" not in self._reported:
            return
        try:
            response = self._router_handle(application).progress.remote()
            # By worker: what it loads now, and the fraction that is done.
            progress = response.result(timeout_s=PROGRESS_LIMIT_S)
        except Exception:  # of Ray and Serve, of many types: a router may be away for a moment
            return
        for name, (phase, fraction) in progress.items():
            worker = f"{prefix}{name}"
            if fraction < 1.0 and self._reported.get(worker) != phase:
                self._reported[worker] = phase
                report_progress(f"{worker}: {phase} ({fraction:.0%})")

    def ready(self) -> bool:
        """Return whether a gateway says that requests for every model can be served.

        A gateway of this machine is asked. Where none listens, as Serve put all of them on other
        nodes of the Ray that was joined, these are asked, and `url` leads to the one that is ready.
        """
        answer = self._ask_whether_ready(self.url)
        if answer is not None:
            return answer
        for host in self._gateway_hosts():
            if self._ask_whether_ready(self._url_at(host)):
                self._gateway_host = host
                return True
        return False

    def _ask_whether_ready(self, url: str) -> bool | None:
        """Return whether the gateway there can serve every model; None if nobody listens there."""
        import httpx

        for model in self.models:
            question = {"model": model.checkpoint.name}
            # Unverified: a certificate for the cluster's public name is not one for this address.
            try:
                # `trust_env=False`: no proxy of the environment knows a gateway of this cluster.
                response = httpx.get(
                    f"{url}/ready",
                    params=question,
                    timeout=READY_TIMEOUT_S,
                    verify=False,
                    trust_env=False,
                )
            except (httpx.ConnectError, httpx.ConnectTimeout):
                return None
            except httpx.HTTPError:  # it listens, and does not answer in time
                return False
            if response.status_code != httpx.codes.OK:
                return False
        return True

    def _gateway_hosts(self) -> list[str]:
        """Return the hosts of all gateways that a router knows, where Ray may have several nodes."""
        if not self._ray_address:
            return []
        try:
            response = self._router_handle(self.models[0].application).gateway_hosts.remote()
            hosts: list[str] = response.result(timeout_s=PROGRESS_LIMIT_S)
        except Exception:  # of Ray and Serve, of many types: a router may be away for a moment
            return []
        return hosts

    @property
    def url(self) -> str:
        """The gateway's URL; with several on other nodes, that of one of them."""
        return self._url_at(self._gateway_host)

    @property
    def grpc_address(self) -> str:
        """Where the same gateway takes gRPC, as `host:port`."""
        return host_and_port(self._gateway_host, self.config.gateway.grpc_port)

    def _url_at(self, host: str) -> str:
        gateway = self.config.gateway
        scheme = "https" if gateway.tls_cert else "http"
        return f"{scheme}://{host_and_port(host, gateway.http_port)}"

    @property
    def logs(self) -> Path:
        """The folder of our own Ray's logs; of no use where the cluster joined another Ray."""
        return Path(self._ray_folder) / "ray" / "session_latest" / "logs"

    def watch(self, report_progress: ReportProgress) -> str:
        """Wait until the cluster is lost, and return why.

        Without Ray's GCS or raylet no replica lives for long. The end of another process of Ray's
        is only reported: replicas live on, and Ray replaces what it needs. A GCS of our own Ray that
        has closed its port is lost too, though its process may live on.
        """
        looks_at_closed_port = 0  #: One after the other: a GCS that ends closes its port first.
        while True:
            dead = ended_ray_processes()
            for name, exit_code in dead.items():
                line = f"Ray's {name} has ended (exit code {exit_code})"
                if name in VITAL_PROCESSES:
                    return line
                if self._reported.get(name) != line:
                    self._reported[name] = line
                    report_progress(line)
            if self.ray_access and gcs_is_closed(self.ray_access.gcs_address):
                looks_at_closed_port += 1
            else:
                looks_at_closed_port = 0
            if looks_at_closed_port > 1:
                return "Ray's gcs_server listens no more"
            reap_orphans(spare=ray_process_ids())
            time.sleep(WATCH_INTERVAL_S)

    def stop(self) -> None:
        """End the cluster. Never raises, as what is ended may not have come up."""
        import ray
        from ray import serve

        if ray.is_initialized():
            with _hidden_output(), contextlib.suppress(Exception):
                names = self._present_applications()
                self._close_gateways(names)
                if self._ray_address:
                    _delete_applications(names)
                else:
                    serve.shutdown()
                ray.shutdown()
        if self._ray_folder:
            shutil.rmtree(self._ray_folder, ignore_errors=True)

    def _present_applications(self) -> list[str]:
        """Return our applications that Serve has now: models may have been added and removed.

        They are those of the start if Serve's controller does not answer within `CLOSE_LIMIT_S`.
        """
        try:
            return application_names(asyncio.run(asyncio.wait_for(serve_details(), CLOSE_LIMIT_S)))
        except Exception:  # of Ray and Serve, of many types: Serve may not be up, or be gone
            return self._application_names

    def _close_gateways(self, applications: list[str]) -> None:
        """End open answers with an error that says why, before Serve ends their gateways.

        Each gateway is connected to every model's router, and ends the requests of all models when
        one router says so. The first router among `applications` that answers is enough.
        """
        for name in applications:
            if name == FRONT_APPLICATION:
                continue
            with contextlib.suppress(Exception):  # of Ray and Serve: a router may be gone
                closing = self._router_handle(name).close_gateways.remote()
                closing.result(timeout_s=CLOSE_LIMIT_S)
                return

    def _router_handle(self, application: str) -> DeploymentHandle:
        from ray import serve

        handle = self._routers.get(application)
        if handle is None:
            handle = serve.get_deployment_handle(ROUTER_DEPLOYMENT, application)
            handle._init(_run_router_in_separate_loop=True)  # no event loop runs here
            self._routers[application] = handle
        return handle


def _modified_at(folder: Path) -> float:
    """Return when a folder was changed, by the wall clock; 0 if it is gone."""
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0


@contextlib.contextmanager
def _hidden_output() -> Iterator[None]:
    """Hide what Ray writes to stdout and stderr about the actors that Ray ends itself."""
    # By file descriptors, as Ray also writes from C++, past `sys.stdout`.
    sys.stdout.flush()
    null_descriptor = os.open(os.devnull, os.O_WRONLY)
    saved_descriptors = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    for descriptor in saved_descriptors:
        os.dup2(null_descriptor, descriptor)
    try:
        yield
    finally:
        sys.stdout.flush()
        for descriptor, saved_descriptor in saved_descriptors.items():
            os.dup2(saved_descriptor, descriptor)
            os.close(saved_descriptor)
        os.close(null_descriptor)


def _delete_applications(names: list[str]) -> None:
    """Delete our applications and wait until they are gone; other applications stay."""
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    if client:
        client.delete_apps(names)


def serve_applications(
    config: ClusterConfig, models: Sequence[PreparedModel]
) -> list[dict[str, Any]]:
    """Return the applications as a Serve config file has them: the front one, and the models'.

    Their arguments must not change when a model is scaled. The secret is no argument, as Serve logs
    these: builders take it from the environment of Ray's nodes, or draw one together.
    """
    front = {
        "name": FRONT_APPLICATION,
        "import_path": FRONT_BUILDER,
        # Where gateways have sockets of their own, others on this Serve may have the route.
        "route_prefix": "/" if config.gateway.listen == "serve" else None,
        "args": front_args(config.model_dump(mode="json", exclude={"secret"})),
    }
    return [front, *(serve_model_application(model) for model in models)]


def serve_model_application(model: PreparedModel) -> dict[str, Any]:
    """Return a model's application as a Serve config file has it."""
    tree = model.config.model_dump(mode="json", exclude={"secret"})
    checkpoint = model.checkpoint
    tree["model"] |= {
        "path": str(checkpoint.folder),
        "name": checkpoint.name,
        "adapters": checkpoint.adapter_settings,
    }
    deployments = []
    for pool, deployment_name in POOL_DEPLOYMENTS.items():
        replicas = model.config.pools.of(pool).replicas
        if replicas:  # Serve allows no deployment with 0 replicas
            deployments.append({"name": deployment_name, "num_replicas": replicas})
    return {
        "name": model.application,
        "import_path": MODEL_BUILDER,
        "route_prefix": None,  # clients' calls go to the front application
        "args": model_args(tree),
        "deployments": deployments,
    }


def prepare(config: ClusterConfig, ray_address: str | None = None) -> LocalCluster:
    """Check settings and models, and this machine if Ray starts here. Raises ConfigError.

    With `ray_address` other machines run the processes, so this one's memory and the files of
    gateways and Control are not checked. The checkpoint must be here too. The cluster that is
    returned has not been started.
    """
    check_environment(config.ray.auth)
    check_ports_differ(config)
    if config.models:
        models = [_prepare_model(config.of_model(name), slug_of(name)) for name in config.models]
    else:
        models = [_prepare_model(config, ONLY_MODEL_SLUG)]
    if not ray_address:
        check_memory([(model.config, model.checkpoint) for model in models])
        check_gateway(config.gateway)
        check_control(config.control)
        for model in models:
            if model.config.engine.python is not None:
                check_python(model.config.engine.python)
            check_chat_template(model.config.model.chat_template)
    return LocalCluster(config, models, ray_address)


def _prepare_model(config: ClusterConfig, slug: str) -> PreparedModel:
    """Find a model and check that it can be served. Raises ConfigError."""
    check_formats(config.model)
    return PreparedModel(model_application_name(slug), config, find_checkpoint(config))


def check_gateway(settings: GatewaySettings) -> None:
    """Check that the gateway's files can be read. Raises ConfigError."""
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


def check_control(settings: ControlSettings) -> None:
    """Check that Control's files can be read. Raises ConfigError."""
    files = {
        "key_file": settings.key_file,
        "tls_cert": settings.tls_cert,
        "tls_key": settings.tls_key,
    }
    for key, file in files.items():
        try:
            if file:
                Path(file).read_bytes()
        except OSError as error:
            raise ConfigError(f"control.{key}: {file}: {error.strerror}") from None


def check_formats(settings: ModelSettings) -> None:
    """Check that there are formats of the names that are configured. Raises ConfigError."""
    from ..gateway.text.formats.registry import find_reasoning_format, find_tool_format

    # The template matters for `auto` only, which is never an error.
    try:
        find_tool_format(settings.tool_format, template="")
    except ValueError as error:
        raise ConfigError(f"model.tool_format: {error}") from None
    try:
        find_reasoning_format(settings.reasoning_format, template="")
    except ValueError as error:
        raise ConfigError(f"model.reasoning_format: {error}") from None


def check_chat_template(template_file: str | None) -> None:
    """Check that a file has a chat template that can be read. Raises ConfigError."""
    if template_file is None:
        return
    import jinja2

    from ..gateway.text.sandbox import TemplateSandbox

    try:
        TemplateSandbox().parse(Path(template_file).read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text"
        raise ConfigError(f"model.chat_template: {template_file}: {reason}") from None
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"model.chat_template: {template_file}, line {error.lineno}: {error.message}"
        ) from None


def check_ports_differ(config: ClusterConfig) -> None:
    """Check that no two servers get one port. Raises ConfigError.

    The sockets of HTTP and gRPC share their ports with those of other gateways (SO_REUSEPORT), so
    the kernel would not refuse it: it would give each of the two a part of the connections.
    """
    ports = {
        "gateway.http_port": config.gateway.http_port,
        "gateway.grpc_port": config.gateway.grpc_port,
        "control.port": config.control.port,
        "control.grpc_port": config.control.grpc_port,
    }
    key_by_port: dict[int, str] = {}
    for key, port in ports.items():
        other = key_by_port.setdefault(port, key)
        if other != key:
            raise ConfigError(
                f"{other} and {key} are both {port}: choose another with --set {key}=PORT"
            )


def check_port(host: str, port: int, key: str) -> None:
    """Check that the port is free. Raises ConfigError, which names the setting `key`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} on {host} cannot be used ({error.strerror}): stop what uses "
                f"it or choose another with --set {key}=PORT"
            ) from None


def _describe_failure(name: str, message: str) -> str:
    """Return why `name` did not start: the last line of a traceback that names an error.

    `message` is Serve's, a traceback in most cases; our own errors begin with the package's name.
    """
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    error_lines = [line for line in lines if "Error: " in line or line.startswith("diptych.")]
    reasons = error_lines or lines or ["no reason given"]
    return f"{name} did not start: {reasons[-1]}"
