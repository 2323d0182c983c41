"""Marks worker pods that Control cannot reach as not ready, long before Kubernetes does.

Kubernetes gives a node up when it has heard nothing of it for 40 or 50 s, by its defaults. Until
then its Services lead clients to the pods of a node that is dead, and their connections end in
timeouts. So Control knocks at the address of every worker pod of its Ray cluster. If nothing comes
back, Control sets the pod's condition `Ready` to False, as Kubernetes would do later, and Services
leave the pod out. If the pod's kubelet is alive, it restores the condition with its next report,
after 10 s or so. Control itself restores nothing, and marks a pod again only after that has
answered once.

Not covered: the head's pod, where Control is, and a cluster in which most pods are silent. Then it
may well be Control's own node that is cut off.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Awaitable, Callable, Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime

import httpx

from .kuberay import RAYCLUSTER_VARIABLE, runs_on_kuberay
from .kubernetes import KubernetesApi, raise_if_refused
from .rayservice import KubernetesObject
from .serve import ScaleError

log = logging.getLogger(__name__)

LOOK_PAUSE_S = 1.0  #: Between two looks at the pods.
KNOCK_LIMIT_S = 0.5  #: How long a knock waits for an answer.
#: A look that takes longer than its knocks may, by so much, says nothing: this process was held up.
STALL_S = 0.2
#: A pod is marked after so many silent looks in a row. A single one may be a lost packet.
SILENT_LOOKS = 2
#: Nobody listens there: the refusal is the answer, and no process is bothered.
KNOCK_PORT = 1
CLIENT_LOOKS = 100  #: Looks with one connection to Kubernetes, which renews the pod's token.
NOT_READY_REASON = "UnreachableFromControl"  #: `kubectl describe pod` shows it, and the message.
NOT_READY_MESSAGE = "Diptych's Control gets no answer from this pod's address"
STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"


@dataclass(frozen=True, slots=True)
class WorkerPod:
    """A worker pod of the Ray cluster, as Kubernetes has it."""

    name: str
    address: str  #: Its IP.
    is_ready: bool  #: Whether its condition `Ready` is True.


class SilenceCounter:
    """Counts each pod's silent looks in a row; does no input or output."""

    def __init__(self) -> None:
        self._silent_looks: dict[str, int] = {}  #: In a row, by the pod's name.
        self._marked: set[str] = set()  #: Names of marked pods that have not answered since.

    def count_look(self, pods: Sequence[WorkerPod], answering: Set[str]) -> list[WorkerPod]:
        """Count a look, and return the ready pods that have been silent for `SILENT_LOOKS` or more.

        `pods` are those that were knocked at, `answering` the names of those that answered. A pod
        that was marked is not returned again before it has answered. If more than half are silent,
        none is returned and all counts begin anew.
        """
        silent = [pod.name for pod in pods if pod.name not in answering]
        self._marked &= set(silent)
        if 2 * len(silent) > len(pods):
            self._silent_looks = {}
            return []
        self._silent_looks = {name: self._silent_looks.get(name, 0) + 1 for name in silent}
        return [
            pod
            for pod in pods
            if pod.is_ready
            and pod.name not in self._marked
            and self._silent_looks.get(pod.name, 0) >= SILENT_LOOKS
        ]

    def note_marked(self, pod: WorkerPod) -> None:
        """Note that Kubernetes has taken the pod for not ready."""
        self._marked.add(pod.name)


def worker_pods(pod_list: KubernetesObject) -> list[WorkerPod]:
    """Return the pods of a list that have an address and are not being deleted (pure)."""
    pods = []
    for item in pod_list["items"]:
        status = item.get("status", {})
        address = status.get("podIP")
        if not address or "deletionTimestamp" in item["metadata"]:
            continue
        is_ready = any(
            condition["type"] == "Ready" and condition["status"] == "True"
            for condition in status.get("conditions", [])
        )
        pods.append(WorkerPod(item["metadata"]["name"], address, is_ready))
    return pods


def not_ready_patch(now: datetime) -> KubernetesObject:
    """Return what is merged into a pod's status so that Services leave the pod out (pure)."""
    condition = {
        "type": "Ready",
        "status": "False",
        "reason": NOT_READY_REASON,
        "message": NOT_READY_MESSAGE,
        "lastTransitionTime": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    return {"status": {"conditions": [condition]}}


async def knock(address: str, port: int = KNOCK_PORT) -> bool:
    """Return whether something answers at a pod's address, if only by a refusal.

    Raises OSError where this process cannot ask, as without free file descriptors.
    """
    try:
        async with asyncio.timeout(KNOCK_LIMIT_S):
            _, writer = await asyncio.open_connection(address, port)
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    except OSError as error:
        if error.errno == errno.EHOSTUNREACH:
            return False
        raise
    writer.close()
    return True


class PodWatch:
    """Knocks at the worker pods of the Ray cluster `cluster`, and marks the lost ones not ready."""

    def __init__(
        self,
        cluster: str,
        kubernetes: KubernetesApi,
        knock_at: Callable[[str], Awaitable[bool]] = knock,
    ) -> None:
        self._cluster = cluster
        self._kubernetes = kubernetes
        self._knock_at = knock_at
        self._counter = SilenceCounter()

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            try:
                async with self._kubernetes.client() as client:
                    for _ in range(CLIENT_LOOKS):
                        await self.look(client)
                        await asyncio.sleep(LOOK_PAUSE_S)
            except Exception as error:  # Kubernetes and the network raise many types
                log.warning("a look at the pods failed: %s", str(error) or type(error).__name__)
                await asyncio.sleep(LOOK_PAUSE_S)

    async def look(self, client: httpx.AsyncClient) -> None:
        """Knock at every pod once, and mark those that are lost.

        Raises ScaleError where Kubernetes refuses to list the pods, and whatever httpx raises.
        """
        path = f"/api/v1/namespaces/{self._kubernetes.namespace()}/pods"
        pods = await self._list_pods(client, path)
        answering = await self._knock_at_all(pods)
        if answering is None:
            return
        for pod in self._counter.count_look(pods, answering):
            if await _mark_not_ready(client, path, pod):
                self._counter.note_marked(pod)

    async def _list_pods(self, client: httpx.AsyncClient, path: str) -> list[WorkerPod]:
        selector = f"ray.io/cluster={self._cluster},ray.io/node-type=worker"
        # Version 0: from the server's memory, which may be a moment old, and costs it little.
        parameters = {"labelSelector": selector, "resourceVersion": "0"}
        response = await client.get(path, params=parameters)
        raise_if_refused(response)
        return worker_pods(response.json())

    async def _knock_at_all(self, pods: Sequence[WorkerPod]) -> set[str] | None:
        """Return the names of the pods that answer; None if this process was held up meanwhile.

        Then limits of time may have passed though answers were there.
        """
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        answers = await asyncio.gather(*(self._knock_at(pod.address) for pod in pods))
        if loop.time() - began_at > KNOCK_LIMIT_S + STALL_S:
            return None
        return {pod.name for pod, answer in zip(pods, answers, strict=True) if answer}


async def _mark_not_ready(client: httpx.AsyncClient, path: str, pod: WorkerPod) -> bool:
    """Patch a pod's status, and return whether Kubernetes has taken it.

    A failure is only logged: the other pods are to be marked, too.
    """
    try:
        response = await client.patch(
            f"{path}/{pod.name}/status",
            json=not_ready_patch(datetime.now(UTC)),
            headers={"content-type": STRATEGIC_MERGE_PATCH},
        )
        raise_if_refused(response)
    except (ScaleError, httpx.HTTPError) as error:
        reason = str(error) or type(error).__name__
        log.warning("pod %s is silent, and stays ready: %s", pod.name, reason)
        return False
    log.warning("pod %s (%s) is silent: marked as not ready", pod.name, pod.address)
    return True


def make_pod_watch() -> PodWatch | None:
    """Return a watch over the pods of this Ray cluster; None where KubeRay has not made it."""
    cluster = os.environ.get(RAYCLUSTER_VARIABLE)
    if not cluster or not runs_on_kuberay():
        return None
    return PodWatch(cluster, KubernetesApi())
