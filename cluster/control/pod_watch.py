"""Tells Kubernetes early which pods nobody reaches any more, so that its Services leave them out.

Kubernetes gives a node up when it has heard nothing of it for 40 s. Until then its Services lead
clients to the pods of a node that is dead, and each of these connections ends in a timeout. Control
knocks at every worker pod of its Ray cluster. Of one whose host is silent it says what Kubernetes
itself would say later: that the pod is not ready. A kubelet that lives takes that back within
seconds, as it reports what it sees itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from .kuberay import RAYCLUSTER_VARIABLE, runs_on_kuberay
from .kubernetes import KubernetesApi, raise_if_refused
from .rayservice import KubernetesObject

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0  #: From the end of a look at the pods to the next one.
KNOCK_LIMIT_S = 1.0  #: For a pod's host to answer.
SILENT_LOOKS = (
    3  #: Looks in a row in which a pod's host has to be silent. With one, a packet may be lost.
)
#: The port of Ray's agent in a worker pod. Any port does: a host that refuses a connection lives.
KNOCK_PORT = 52365
REASON = "Unreachable"  #: By which Kubernetes' users see who said that a pod is not ready.
MESSAGE = "Diptych's Control gets no answer from this pod's host"
STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"


@dataclass(frozen=True, slots=True)
class WorkerPod:
    """A worker pod of the Ray cluster, as Kubernetes has it."""

    name: str
    address: str  #: Its IP.
    is_ready: bool  #: Whether Services lead to it.


class SilenceCounter:
    """Which pods to give up (pure)."""

    def __init__(self) -> None:
        self._silent_looks: dict[str, int] = {}  #: In a row, until now; by the pod's name.

    def lost_pods(self, pods: Sequence[WorkerPod], answering: Iterable[str]) -> list[WorkerPod]:
        """Return the ready pods that have been silent for `SILENT_LOOKS` looks, this one included.

        `pods` are all that there are, `answering` the names of those whose hosts have answered. If
        none has, nobody is given up: then it may well be Control's host that nobody reaches.
        """
        answering = set(answering)
        if not answering:
            self._silent_looks = {}
            return []
        self._silent_looks = {
            pod.name: self._silent_looks.get(pod.name, 0) + 1
            for pod in pods
            if pod.name not in answering
        }
        return [
            pod
            for pod in pods
            if pod.is_ready and self._silent_looks.get(pod.name, 0) >= SILENT_LOOKS
        ]


def worker_pods(answer: KubernetesObject) -> list[WorkerPod]:
    """Return the pods of a list that have an address and were not told to end (pure)."""
    pods = []
    for item in answer["items"]:
        status = item.get("status", {})
        address = status.get("podIP")
        if not address or "deletionTimestamp" in item["metadata"]:
            continue
        ready = [one["status"] for one in status.get("conditions", []) if one["type"] == "Ready"]
        pods.append(WorkerPod(item["metadata"]["name"], address, is_ready=ready == ["True"]))
    return pods


def not_ready_patch(now: datetime) -> KubernetesObject:
    """Return what is merged into a pod's status so that Services leave the pod out (pure)."""
    condition = {
        "type": "Ready",
        "status": "False",
        "reason": REASON,
        "message": MESSAGE,
        "lastTransitionTime": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    return {"status": {"conditions": [condition]}}


async def host_answers(address: str, port: int = KNOCK_PORT) -> bool:
    """Return whether the host of a pod answers a knock, if only by a refusal."""
    try:
        async with asyncio.timeout(KNOCK_LIMIT_S):
            _, writer = await asyncio.open_connection(address, port)
    except ConnectionError:
        return True
    except OSError:  # no route to the host, and the limit of time
        return False
    writer.close()
    return True


class PodWatch:
    """Knocks at the worker pods of the Ray cluster `cluster`, and reports those that are lost."""

    def __init__(
        self,
        cluster: str,
        kubernetes: KubernetesApi,
        answers: Callable[[str], Awaitable[bool]] = host_answers,
    ) -> None:
        self._cluster = cluster
        self._kubernetes = kubernetes
        self._answers = answers
        self._counter = SilenceCounter()

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            try:
                await self.look()
            except Exception as error:  # Kubernetes and the network raise many types
                log.warning("the pods are not watched: %s", str(error) or type(error).__name__)
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def look(self) -> None:
        """Look once. Raises ScaleError where Kubernetes refuses, and whatever httpx raises."""
        namespace = self._kubernetes.namespace()
        async with self._kubernetes.client() as client:
            response = await client.get(
                f"/api/v1/namespaces/{namespace}/pods",
                params={
                    "labelSelector": f"ray.io/cluster={self._cluster},ray.io/node-type=worker",
                    "resourceVersion": "0",  # from the server's cache
                },
            )
            raise_if_refused(response)
            pods = worker_pods(response.json())
            answers = await asyncio.gather(*(self._answers(pod.address) for pod in pods))
            answering = [pod.name for pod, answer in zip(pods, answers, strict=True) if answer]
            for pod in self._counter.lost_pods(pods, answering):
                response = await client.patch(
                    f"/api/v1/namespaces/{namespace}/pods/{pod.name}/status",
                    json=not_ready_patch(datetime.now(UTC)),
                    headers={"content-type": STRATEGIC_MERGE_PATCH},
                )
                raise_if_refused(response)
                log.warning("pod %s (%s) is silent: it gets no clients", pod.name, pod.address)


def find_pod_watch() -> PodWatch | None:
    """Return the watch over the pods of this Ray cluster; None where this is no pod of KubeRay."""
    cluster = os.environ.get(RAYCLUSTER_VARIABLE)
    if not cluster or not runs_on_kuberay():
        return None
    return PodWatch(cluster, KubernetesApi())
