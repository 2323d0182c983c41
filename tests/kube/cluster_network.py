"""Services, network policies and DNS: what kube-proxy, a network plugin and CoreDNS do elsewhere.

The rules are pure functions of the cluster's objects; `Firewall` loads them into the pods' networks.
"""

from __future__ import annotations

import logging
import socket
import struct
import subprocess
import threading
from dataclasses import dataclass, field

from . import settings
from .api import Object
from .pod import Pod

log = logging.getLogger("network")
DOMAIN = ["svc", "cluster", "local"]
ADDRESS_RECORD = 1
ANSWERED = 0x8580
NO_SUCH_NAME = 0x8583
RECORD_LIFETIME_S = 2


@dataclass(slots=True)
class ClusterObjects:
    """What the API server had when it was last asked."""

    services: list[Object] = field(default_factory=list)
    endpoints: list[Object] = field(default_factory=list)
    policies: list[Object] = field(default_factory=list)
    namespaces: list[Object] = field(default_factory=list)
    pods: list[Object] = field(default_factory=list)

    def subsets(self, service: Object) -> list[Object]:
        """Return the subsets of a service's endpoints."""
        for endpoints in self.endpoints:
            if _identity(endpoints) == _identity(service):
                return endpoints.get("subsets") or []
        return []


def _identity(found: Object) -> tuple[str, str]:
    return found["metadata"]["namespace"], found["metadata"]["name"]


def selects(selector: Object, labels: dict[str, str]) -> bool:
    """Return whether a label selector picks an object with these labels."""
    for key, value in (selector.get("matchLabels") or {}).items():
        if labels.get(key) != value:
            return False
    for rule in selector.get("matchExpressions") or []:
        present = rule["key"] in labels
        listed = labels.get(rule["key"]) in rule.get("values", [])
        holds = {
            "In": listed,
            "NotIn": not listed,
            "Exists": present,
            "DoesNotExist": not present,
        }
        if not holds[rule["operator"]]:
            return False
    return True


# ---- services ------------------------------------------------------------------------------------


def service_rules(objects: ClusterObjects) -> list[str]:
    """Return iptables rules that lead calls of services to their endpoints, each as often."""
    rules = ["*nat", ":OUTPUT ACCEPT [0:0]"]
    for service in objects.services:
        address = service["spec"].get("clusterIP", "None")
        if address == "None":
            continue
        for port in service["spec"].get("ports", []):
            targets = _targets(objects.subsets(service), port.get("name"))
            match = f"-A OUTPUT -d {address}/32 -p tcp --dport {port['port']}"
            for index, target in enumerate(targets):
                share = 1 / (len(targets) - index)
                chance = f"-m statistic --mode random --probability {share:.5f}"
                rules.append(f"{match} {chance} -j DNAT --to-destination {target}")
    rules.append("COMMIT")
    return rules


def refusal_rules(objects: ClusterObjects) -> list[str]:
    """Return rules that refuse calls of services without endpoints, as kube-proxy does."""
    rules: list[str] = []
    for service in objects.services:
        address = service["spec"].get("clusterIP", "None")
        if address == "None":
            continue
        for port in service["spec"].get("ports", []):
            if not _targets(objects.subsets(service), port.get("name")):
                match = f"-A OUTPUT -d {address}/32 -p tcp --dport {port['port']}"
                rules.append(f"{match} -j REJECT --reject-with tcp-reset")
    return rules


def _targets(subsets: list[Object], port_name: str | None) -> list[str]:
    """Return addresses with ports, in a fixed order."""
    targets: list[str] = []
    for subset in subsets:
        for port in subset.get("ports") or []:
            if port.get("name") == port_name:
                for address in subset.get("addresses") or []:
                    targets.append(f"{address['ip']}:{port['port']}")
    return sorted(targets)


# ---- network policies ----------------------------------------------------------------------------


def policy_rules(objects: ClusterObjects, pod: Object, address: str) -> list[str]:
    """Return the iptables rules for calls of a pod; none where no policy picks the pod."""
    namespace = pod["metadata"]["namespace"]
    labels = pod["metadata"].get("labels") or {}
    policies = [
        policy["spec"]
        for policy in objects.policies
        if policy["metadata"]["namespace"] == namespace
        and "Ingress" in policy["spec"].get("policyTypes", ["Ingress"])
        and selects(policy["spec"]["podSelector"], labels)
    ]
    if not policies:
        return []
    rules = [
        "-A INPUT -i lo -j ACCEPT",
        "-A INPUT -m state --state ESTABLISHED,RELATED -j ACCEPT",
        f"-A INPUT -s {settings.GATEWAY}/32 -j ACCEPT",  # probes
        f"-A INPUT -s {address}/32 -j ACCEPT",
    ]
    for policy in policies:
        for rule in policy.get("ingress") or []:
            sources = _sources(objects, namespace, rule.get("from"))
            for source in sources:
                for port in _port_matches(rule.get("ports")):
                    rules.append(f"-A INPUT {source} {port} -j ACCEPT")
    rules.append("-A INPUT -p tcp --syn -j REJECT --reject-with tcp-reset")
    rules.append("-A INPUT -j DROP")
    return rules


def _port_matches(ports: list[Object] | None) -> list[str]:
    if not ports:
        return [""]
    matches = []
    for port in ports:
        last = port.get("endPort", port["port"])
        protocol = port.get("protocol", "TCP").lower()
        matches.append(f"-p {protocol} --dport {port['port']}:{last}")
    return matches


def _sources(objects: ClusterObjects, namespace: str, peers: list[Object] | None) -> list[str]:
    """Return one match for each pod that the peers pick; one that matches everybody without peers."""
    if not peers:
        return [""]
    namespace_labels = {
        found["metadata"]["name"]: (found["metadata"].get("labels") or {})
        | {"kubernetes.io/metadata.name": found["metadata"]["name"]}
        for found in objects.namespaces
    }
    addresses: set[str] = set()
    for pod in objects.pods:
        address = (pod.get("status") or {}).get("podIP")
        pod_namespace = pod["metadata"]["namespace"]
        for peer in peers:
            if "namespaceSelector" in peer:
                labels = namespace_labels.get(pod_namespace, {})
                in_namespace = selects(peer["namespaceSelector"], labels)
            else:
                in_namespace = pod_namespace == namespace
            picked = selects(peer.get("podSelector", {}), pod["metadata"].get("labels") or {})
            if address and in_namespace and picked:
                addresses.add(address)
    return [f"-s {address}/32" for address in sorted(addresses)]


class Firewall:
    """Loads the rules into the pods' networks and the box's own one, where they changed."""

    def __init__(self) -> None:
        self._own_rules = ""
        self._lock = threading.Lock()

    def update(self, objects: ClusterObjects, pods: list[Pod]) -> None:
        with self._lock:
            services = service_rules(objects)
            refusals = refusal_rules(objects)
            filters = ["*filter", ":INPUT ACCEPT [0:0]", ":OUTPUT ACCEPT [0:0]"]
            for pod in pods:
                if pod.removed or not pod.network.exists():
                    continue
                policies = policy_rules(objects, pod.manifest, pod.network.address)
                lines = [*services, *filters, *policies, *refusals, "COMMIT", ""]
                rules = "\n".join(lines)
                if rules != pod.firewall_rules:
                    _load(["ip", "netns", "exec", pod.network.name, "iptables-restore"], rules)
                    pod.firewall_rules = rules
            own_rules = "\n".join([*services, *filters, *refusals, "COMMIT", ""])
            if own_rules != self._own_rules:
                _load(["iptables-restore"], own_rules)
                self._own_rules = own_rules


def _load(command: list[str], rules: str) -> None:
    result = subprocess.run(command, input=rules, text=True, capture_output=True)
    if result.returncode:
        log.warning("iptables refuses: %s", result.stderr[:300])


# ---- DNS -----------------------------------------------------------------------------------------


def resolve(objects: ClusterObjects, name: str) -> list[str] | None:
    """Return the addresses of a service's name, or None if there is no such name.

    A headless service has those of its endpoints, and its pods' host names one each.
    """
    labels = name.lower().split(".")
    if len(labels) < 5 or labels[-3:] != DOMAIN:
        return None
    identity = (labels[-4], labels[-5])
    host_name = labels[-6] if len(labels) > 5 else ""
    for service in objects.services:
        if _identity(service) != identity:
            continue
        address = service["spec"].get("clusterIP", "None")
        if address != "None":
            return None if host_name else [address]
        addresses: list[str] = []
        for subset in objects.subsets(service):
            for entry in subset.get("addresses") or []:
                if not host_name or entry.get("hostname") == host_name:
                    addresses.append(entry["ip"])
        return addresses
    return None


def answer_names(objects: ClusterObjects) -> None:
    """Answer DNS questions on the bridge's address, forever."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    listener.bind((settings.GATEWAY, 53))
    while True:
        message, client = listener.recvfrom(1500)
        try:
            listener.sendto(dns_answer(objects, message), client)
        except (struct.error, IndexError, UnicodeDecodeError, OSError) as error:
            log.warning("DNS: %s", error)


def dns_answer(objects: ClusterObjects, message: bytes) -> bytes:
    """Return the answer to one question; anything but IPv4 addresses gets an empty one."""
    labels: list[str] = []
    position = 12  # behind the header
    while message[position]:
        length = message[position]
        labels.append(message[position + 1 : position + 1 + length].decode())
        position += length + 1
    end = position + 5  # the closing zero, type and class
    (record_type,) = struct.unpack(">H", message[position + 1 : position + 3])
    addresses = resolve(objects, ".".join(labels))
    status = ANSWERED if addresses is not None else NO_SUCH_NAME
    records = b""
    count = 0
    if record_type == ADDRESS_RECORD:
        for address in addresses or []:
            head = struct.pack(">HHIH", ADDRESS_RECORD, 1, RECORD_LIFETIME_S, 4)
            records += b"\xc0\x0c" + head + socket.inet_aton(address)
            count += 1
    header = message[:2] + struct.pack(">HHHHH", status, 1, count, 0, 0)
    return header + message[12:end] + records
