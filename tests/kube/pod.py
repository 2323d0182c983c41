"""The life of one pod: volumes, init containers, its container with probes and restarts, and its end.

One thread runs the pod and one each of its probes. A pod has one container here; KubeRay's
autoscaler sidecar and the like are left out.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from . import sandbox, settings
from .api import KubernetesApi, Object, path_of
from .environment import container_environment
from .images import Image
from .probes import Probe
from .sandbox import ContainerOrder, Network
from .volumes import VolumeMaker

log = logging.getLogger("pod")
API_ATTEMPTS = 120  #: A second apart: an API server that is away does not end a pod.
BACKOFF_LIMIT_S = 60.0
DEFAULT_GRACE_S = 30


def timestamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Pod:
    """One pod on this machine. `run` and `stop` block, so they have threads of their own."""

    def __init__(self, api: KubernetesApi, manifest: Object, image: Image | None, number: int):
        self.manifest = manifest
        self.network = Network(number)
        #: The rules that are in force in the pod's network, as text.
        self.firewall_rules = ""
        #: It is being stopped, or its node is dead: nothing of it starts again.
        self.stopping = False
        #: Nothing of it is left here.
        self.removed = False
        self._api = api
        self._image = image
        self._folder = settings.PODS / str(number)
        self._container: Object = manifest["spec"]["containers"][0]
        self._environment: dict[str, str] = {}
        self._starter: subprocess.Popen[bytes] | None = None
        self._process_id: int | None = None
        self._starts = 0  #: Of its container, without init containers.
        self._layers = 0  #: Made for starts, those of init containers too.
        self._phase = "Pending"
        self._waiting_for = "ContainerCreating"
        self._initialized = False
        self._ready = False
        self._started_at: str | None = None
        self._last_state: Object = {}

    # ---- names -----------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.manifest["metadata"]["name"]

    @property
    def namespace(self) -> str:
        return self.manifest["metadata"]["namespace"]

    @property
    def uid(self) -> str:
        return self.manifest["metadata"]["uid"]

    @property
    def node(self) -> str:
        return self.manifest["spec"]["nodeName"]

    @property
    def log_file(self) -> Path:
        return settings.LOGS / f"{self.namespace}_{self.name}_{self._container['name']}.log"

    @property
    def _process_file(self) -> Path:
        """The file that says which process is the container's first one, for `box.py exec`."""
        return settings.PODS / f"{self.namespace}_{self.name}"

    # ---- life ------------------------------------------------------------------------------------

    def run(self, services: list[Object]) -> None:
        """Run the pod until it ends or is stopped. `services` are those that its environment names."""
        try:
            self._run(services)
        except Exception as error:
            log.exception("%s could not start", self.name)
            self._waiting_for = "RunContainerError"
            self.warn("FailedCreatePodSandBox", str(error))
            self.report_status()

    def _run(self, services: list[Object]) -> None:
        if self._image is None:
            self._waiting_for = "ErrImageNeverPull"
            self.report_status()
            self.warn("Failed", f"the box has no image {self._container['image']}")
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        self.network.make()
        for container in self.manifest["spec"].get("initContainers") or []:
            self._run_init_container(container, services)
        self._initialized = True
        backoff_s = 1.0
        while not self.stopping:
            exit_code = self._run_container(services)
            if exit_code is None or self.stopping or not self._restarts_after(exit_code):
                return
            self._waiting_for = "CrashLoopBackOff"
            self.report_status()
            self.warn("BackOff", f"the container ended with {exit_code}")
            time.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_LIMIT_S)

    def _run_init_container(self, container: Object, services: list[Object]) -> None:
        backoff_s = 1.0
        self._waiting_for = "PodInitializing"
        self.report_status()
        while not self.stopping:
            order = self._prepare(container, services)
            if order is None:
                return
            file = self.log_file.with_suffix(f".{container['name']}.log")
            with file.open("ab") as output:
                self._starter = sandbox.start(order, output)
                exit_code = self._starter.wait()
            log.info("%s init container %s ended with %d", self.name, container["name"], exit_code)
            if exit_code == 0:
                return
            time.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_LIMIT_S)

    def _prepare(self, container: Object, services: list[Object]) -> ContainerOrder | None:
        """Return what the container's start needs; None if the pod is stopped before all is there.

        As in Kubernetes, a pod waits for Secrets and config maps that are missing.
        """
        assert self._image is not None
        while not self.stopping:
            try:
                self._environment = self._image.environment | container_environment(
                    self._api, self.manifest, container, services, self.network.address
                )
                self._layers += 1
                return ContainerOrder(
                    container=container,
                    pod=self.manifest,
                    image=self._image,
                    network=self.network,
                    volumes=VolumeMaker(
                        self._api, self.manifest, self._folder / "volumes"
                    ).make_all(),
                    environment=self._environment,
                    folder=self._folder / f"container-{self._layers}",
                )
            except (httpx.HTTPError, KeyError) as error:
                self._waiting_for = "CreateContainerConfigError"
                self.report_status()
                self.warn("FailedMount", str(error))
                time.sleep(2)
        return None

    def _run_container(self, services: list[Object]) -> int | None:
        """Start the container and return its exit code; None if it was stopped before."""
        order = self._prepare(self._container, services)
        if order is None:
            return None
        self._starts += 1
        started = time.monotonic()
        with self.log_file.open("ab") as output:
            starter = sandbox.start(order, output)
        self._starter = starter
        while starter.poll() is None:
            self._process_id = sandbox.first_process(starter)
            if self._process_id is not None:
                break
            time.sleep(0.05)
        self._process_file.write_text(str(self._process_id))
        self._started_at = timestamp()
        self._phase = "Running"
        self._begin_probes()
        self.report_status()
        log.info("%s runs as process %s on %s", self.name, self._process_id, self.node)

        exit_code = starter.wait()
        if exit_code < 0:  # a signal, as a shell counts it
            exit_code = 128 - exit_code
        self._process_id = None
        self._process_file.unlink(missing_ok=True)
        self._ready = False
        self._last_state = {
            "exitCode": exit_code,
            "reason": "Error" if exit_code else "Completed",
            "startedAt": self._started_at,
            "finishedAt": timestamp(),
        }
        seconds = time.monotonic() - started
        log.info("%s: its container ended with %d after %.0f s", self.name, exit_code, seconds)
        return exit_code

    def _restarts_after(self, exit_code: int) -> bool:
        policy = self.manifest["spec"].get("restartPolicy", "Always")
        if policy == "Always" or (policy == "OnFailure" and exit_code):
            return True
        self._phase = "Failed" if exit_code else "Succeeded"
        self.report_status()
        return False

    # ---- probes ----------------------------------------------------------------------------------

    def _begin_probes(self) -> None:
        self._ready = "readinessProbe" not in self._container
        kinds: tuple[str, ...] = ("readinessProbe", "livenessProbe")
        names = [name for name in kinds if name in self._container]
        if "startupProbe" in self._container:
            self._ready = False
            names.insert(0, "startupProbe")
        threading.Thread(target=self._probe, args=(names, self._starts), daemon=True).start()

    def _probe(self, names: list[str], start: int) -> None:
        """Ask the probes of one start of the container until it ends."""
        if names and names[0] == "startupProbe":
            probe = Probe(self._container["startupProbe"], self._container, self.network.address)
            while not probe.ask(self.execute):
                if probe.has_failed:
                    self._kill(f"startupProbe failed: {probe.message}")
                    return
            self._ready = "readinessProbe" not in self._container
            self.report_status()
            names = names[1:]
        for name in names:
            threading.Thread(target=self._watch, args=(name, start), daemon=True).start()

    def _watch(self, name: str, start: int) -> None:
        probe = Probe(self._container[name], self._container, self.network.address)
        while not self.removed and self._starts == start and self._phase == "Running":
            probe.ask(self.execute)
            if name == "livenessProbe":
                if probe.has_failed and not self.stopping:
                    self._kill(f"livenessProbe failed: {probe.message}")
                    return
                continue
            ready = probe.has_succeeded or (self._ready and not probe.has_failed)
            if ready != self._ready and not self.stopping:
                self._ready = ready
                log.info("%s is %s %s", self.name, "ready" if ready else "NOT ready", probe.message)
                self.report_status()

    def _kill(self, reason: str) -> None:
        log.info("%s is killed: %s", self.name, reason)
        self.warn("Unhealthy", reason)
        self._signal(signal.SIGKILL)

    def execute(self, command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run a command in the container, as its user.

        Raises sandbox.SandboxError where no container runs and subprocess.TimeoutExpired.
        """
        process_id = self._process_id
        if process_id is None or self._image is None:
            raise sandbox.SandboxError("no container runs")
        options = sandbox.user_options(self.manifest, self._container, self._image)
        return subprocess.run(
            [*sandbox.enter_command(process_id), *options, *command],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    # ---- what Kubernetes is told -----------------------------------------------------------------

    def report_status(self) -> None:
        """Tell the API server how the pod is; wait while it is away."""
        if self.removed:
            return
        body = {"metadata": {"uid": self.uid}, "status": self._status()}
        path = path_of("pods", self.namespace, self.name, "status")
        for _ in range(API_ATTEMPTS):
            try:
                self._api.merge(path, body)
                return
            except httpx.HTTPStatusError as error:
                log.warning("%s: its status was refused: %s", self.name, error.response.text[:200])
                return
            except httpx.HTTPError:
                time.sleep(1)

    def _status(self) -> Object:
        state: Object = {"waiting": {"reason": self._waiting_for}}
        if self._phase in ("Failed", "Succeeded"):
            state = {"terminated": self._last_state}
        elif self._process_id is not None:
            state = {"running": {"startedAt": self._started_at}}
        container_status: Object = {
            "name": self._container["name"],
            "image": self._container["image"],
            "imageID": "",
            "ready": self._ready,
            "started": self._process_id is not None,
            "restartCount": max(self._starts - 1, 0),
            "state": state,
            "lastState": {"terminated": self._last_state} if self._last_state else {},
        }
        conditions = {
            "PodScheduled": True,
            "Initialized": self._initialized,
            "ContainersReady": self._ready,
            "Ready": self._ready,
        }
        return {
            "phase": self._phase,
            "podIP": self.network.address,
            "podIPs": [{"ip": self.network.address}],
            "hostIP": settings.GATEWAY,
            "startTime": self._started_at or timestamp(),
            "conditions": [
                {"type": kind, "status": str(holds), "lastTransitionTime": timestamp()}
                for kind, holds in conditions.items()
            ],
            "containerStatuses": [container_status],
        }

    def warn(self, reason: str, message: str) -> None:
        """Make an event of it; one that cannot be made is only logged."""
        log.info("%s: %s: %s", self.name, reason, message)
        event: dict[str, Any] = {
            "metadata": {"generateName": f"{self.name[:40]}.", "namespace": self.namespace},
            "involvedObject": {
                "kind": "Pod",
                "namespace": self.namespace,
                "name": self.name,
                "uid": self.uid,
            },
            "reason": reason,
            "message": message[:900],
            "type": "Warning",
            "firstTimestamp": timestamp(),
            "lastTimestamp": timestamp(),
            "source": {"component": "kubelet"},
        }
        try:
            self._api.create(path_of("events", self.namespace), event)
        except httpx.HTTPError as error:
            log.info("%s: no event: %s", self.name, error)

    # ---- its end ---------------------------------------------------------------------------------

    def stop(self, grace_s: float) -> None:
        """End the pod as Kubernetes does: preStop, SIGTERM, and SIGKILL after the grace period."""
        began = time.monotonic()
        self.stopping = True
        self._ready = False
        self.report_status()
        self._run_pre_stop(grace_s)
        hook_s = time.monotonic() - began
        self._signal(signal.SIGTERM)
        # A container gets two seconds even where the hook took the whole period.
        deadline = began + max(grace_s, hook_s + 2)
        while self._process_id is not None and time.monotonic() < deadline:
            time.sleep(0.1)
        ended = "by SIGKILL" if self._process_id is not None else "by itself"
        self.remove()
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}}
        self._delete_object(options)
        seconds = time.monotonic() - began
        log.info("%s ended %s: preStop %.1f s, in all %.1f s", self.name, ended, hook_s, seconds)

    def _run_pre_stop(self, grace_s: float) -> None:
        hook = ((self._container.get("lifecycle") or {}).get("preStop") or {}).get("exec")
        if hook is None or self._process_id is None:
            return
        try:
            result = self.execute(hook["command"], grace_s)
        except subprocess.TimeoutExpired:
            log.info("%s: preStop took the whole grace period", self.name)
            return
        text = (result.stdout + result.stderr).strip()[-300:]
        log.info("%s: preStop ended with %d: %s", self.name, result.returncode, text)

    def _delete_object(self, options: Object) -> None:
        path = path_of("pods", self.namespace, self.name)
        for _ in range(API_ATTEMPTS):
            try:
                self._api.delete(path, options)
                return
            except httpx.HTTPError:
                time.sleep(1)

    def _signal(self, number: signal.Signals) -> None:
        if self._process_id is not None:
            with suppress(ProcessLookupError):
                os.kill(self._process_id, number)

    def remove(self) -> None:
        """Kill what is left of the pod on this machine, without a word to the API server."""
        self.stopping = True
        self.removed = True
        self._signal(signal.SIGKILL)
        if self._starter is not None and self._starter.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._starter.pid, signal.SIGKILL)
        self.network.remove()
        shutil.rmtree(self._folder, ignore_errors=True)
