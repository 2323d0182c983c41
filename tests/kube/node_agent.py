"""The box's kubelet for all its nodes, and the services, policies and DNS of `cluster_network`.

Run by `box.py` inside of the box's network namespace. A node whose name stands in a file below
`state/dead-nodes` is dead: its pods are killed and the API server hears nothing more of it.
"""

from __future__ import annotations

import http.server
import logging
import os
import signal
import ssl
import sys
import threading
import time
from types import FrameType

import httpx

from . import settings
from .api import KubernetesApi, Object, path_of
from .cluster_network import ClusterObjects, Firewall, answer_names
from .images import all_images, find_image
from .newer_groups import GroupMirror
from .pod import DEFAULT_GRACE_S, Pod, timestamp

log = logging.getLogger("node")
HEARTBEAT_S = 5.0
POLL_S = 0.5
FIRST_POD_NUMBER = 10
LAST_POD_NUMBER = 250
KUBELET_PORT = 10250
DEAD_NODES = settings.STATE / "dead-nodes"


class NodeAgent:
    """Runs the pods that the scheduler puts on the box's nodes."""

    def __init__(self) -> None:
        self._api = KubernetesApi()
        self._images = all_images()
        self._firewall = Firewall()
        self._mirror = GroupMirror(self._api)
        self.objects = ClusterObjects()
        self.pods: dict[str, Pod] = {}  #: By uid.
        self._next_number = FIRST_POD_NUMBER
        self._last_heartbeat = 0.0

    def run(self) -> None:
        """Look at the API server again and again, forever."""
        while True:
            try:
                self._step()
            except httpx.HTTPError as error:
                log.warning("the API server: %s", error)
            time.sleep(POLL_S)

    def _step(self) -> None:
        if time.monotonic() - self._last_heartbeat > HEARTBEAT_S:
            for node in settings.NODES:
                if not (DEAD_NODES / node).exists():
                    self._report_node(node)
            self._last_heartbeat = time.monotonic()
        self.objects.services = self._api.list("services")
        self.objects.endpoints = self._api.list("endpoints")
        self.objects.policies = self._api.list("networkpolicies")
        self.objects.namespaces = self._api.list("namespaces")
        self.objects.pods = self._api.list("pods")
        self._firewall.update(self.objects, list(self.pods.values()))
        self._mirror.update()
        for manifest in self.objects.pods:
            self._handle(manifest)
        self._remove_pods_without_object()

    def _handle(self, manifest: Object) -> None:
        """Start or stop a pod, as its object says."""
        metadata = manifest["metadata"]
        node = manifest["spec"].get("nodeName")
        pod = self.pods.get(metadata["uid"])
        if node is None:
            return
        if (DEAD_NODES / node).exists():
            if pod is not None and not pod.removed:
                log.info("%s dies with %s", pod.name, node)
                threading.Thread(target=pod.remove).start()
            return
        if pod is None and "deletionTimestamp" in metadata:
            path = path_of("pods", metadata["namespace"], metadata["name"])
            self._api.delete(path, {"gracePeriodSeconds": 0})
        elif pod is None:
            self._start(manifest)
        elif "deletionTimestamp" in metadata and not pod.stopping:
            pod.stopping = True
            grace_s = metadata.get("deletionGracePeriodSeconds", DEFAULT_GRACE_S)
            threading.Thread(target=pod.stop, args=(grace_s,), daemon=True).start()
        else:
            pod.manifest["metadata"] = metadata

    def _start(self, manifest: Object) -> None:
        image = find_image(self._images, manifest["spec"]["containers"][0]["image"])
        pod = Pod(self._api, manifest, image, self._free_number())
        self.pods[pod.uid] = pod
        services = list(self.objects.services)
        threading.Thread(target=pod.run, args=(services,), daemon=True).start()

    def _free_number(self) -> int:
        """Return a number that no pod has; the one that has been free for longest."""
        used = {pod.network.number for pod in self.pods.values() if not pod.removed}
        while True:
            number = self._next_number
            self._next_number += 1
            if self._next_number > LAST_POD_NUMBER:
                self._next_number = FIRST_POD_NUMBER
            if number not in used:
                return number

    def _remove_pods_without_object(self) -> None:
        uids = {manifest["metadata"]["uid"] for manifest in self.objects.pods}
        for pod in list(self.pods.values()):
            if pod.uid not in uids and not pod.removed:
                log.info("%s was deleted by force", pod.name)
                pod.remove()

    def _report_node(self, name: str) -> None:
        path = path_of("nodes", name=name)
        if self._api.find(path) is None:
            labels = {"kubernetes.io/hostname": name}
            self._api.create(path_of("nodes"), {"metadata": {"name": name, "labels": labels}})
        capacity = {
            "cpu": settings.NODE_CPU,
            "memory": settings.NODE_MEMORY,
            "pods": "50",
            "ephemeral-storage": "50Gi",
        }
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "lastHeartbeatTime": timestamp(),
            "lastTransitionTime": timestamp(),
        }
        status = {
            "capacity": capacity,
            "allocatable": capacity,
            "conditions": [ready],
            "addresses": [{"type": "InternalIP", "address": settings.GATEWAY}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": KUBELET_PORT}},
            "nodeInfo": _node_info(),
        }
        self._api.merge(path_of("nodes", name=name, part="status"), {"status": status})

    def end(self) -> None:
        for pod in self.pods.values():
            pod.remove()

    # ---- kubectl logs ----------------------------------------------------------------------------

    def container_log(self, namespace: str, pod_name: str) -> bytes | None:
        """Return what the containers of this name wrote, also before a restart."""
        for pod in self.pods.values():
            if (pod.namespace, pod.name) == (namespace, pod_name) and pod.log_file.exists():
                return pod.log_file.read_bytes()
        return None


def _node_info() -> dict[str, str]:
    return {
        "kubeletVersion": "v1.29.0-box",
        "kubeProxyVersion": "v1.29.0-box",
        "containerRuntimeVersion": "processes://1",
        "architecture": "amd64",
        "operatingSystem": "linux",
        "osImage": "this machine",
        "kernelVersion": os.uname().release,
        "bootID": "",
        "machineID": "",
        "systemUUID": "",
    }


def serve_logs(agent: NodeAgent) -> None:
    """Answer the API server's questions for `kubectl logs`, forever; nothing else of a kubelet."""

    class LogHandler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # /containerLogs/NAMESPACE/POD/CONTAINER?...
            parts = self.path.partition("?")[0].split("/")
            content = None
            if len(parts) == 5 and parts[1] == "containerLogs":
                content = agent.container_log(parts[2], parts[3])
            self.send_response(404 if content is None else 200)
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = http.server.ThreadingHTTPServer((settings.GATEWAY, KUBELET_PORT), LogHandler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(settings.PKI / "server.crt", settings.PKI / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()


def main() -> None:
    logging.basicConfig(
        stream=sys.stdout, level=logging.INFO, format="%(asctime)s %(name)s %(message)s"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    agent = NodeAgent()

    def end(_signal: int, _frame: FrameType | None) -> None:
        agent.end()
        os._exit(0)  # the pods' threads wait for processes that are gone

    signal.signal(signal.SIGTERM, end)
    DEAD_NODES.mkdir(exist_ok=True)
    for service in (lambda: answer_names(agent.objects), lambda: serve_logs(agent)):
        threading.Thread(target=service, daemon=True).start()
    agent.run()


if __name__ == "__main__":
    main()
