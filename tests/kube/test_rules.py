"""The box's own rules, without a box: services, network policies, DNS, CRDs for an old server."""

from __future__ import annotations

import struct

from .api import Object
from .cluster_network import (
    ClusterObjects,
    dns_answer,
    policy_rules,
    refusal_rules,
    resolve,
    selects,
    service_rules,
)
from .crds import _without_new_rules
from .environment import quantity


def named(name: str, labels: dict[str, str] | None = None, namespace: str = "one") -> Object:
    return {"metadata": {"name": name, "namespace": namespace, "labels": labels or {}}}


def service(name: str, address: str) -> Object:
    return named(name) | {"spec": {"clusterIP": address, "ports": [{"name": "http", "port": 80}]}}


def endpoints(name: str, *addresses: str) -> Object:
    subset = {
        "addresses": [{"ip": address} for address in addresses],
        "ports": [{"name": "http", "port": 8000}],
    }
    return named(name) | {"subsets": [subset]}


def test_calls_of_a_service_are_shared_by_its_endpoints() -> None:
    objects = ClusterObjects(
        services=[service("web", "10.96.0.9"), service("none", "10.96.0.10")],
        endpoints=[endpoints("web", "10.78.0.11", "10.78.0.12")],
    )
    rules = [rule for rule in service_rules(objects) if "DNAT" in rule]
    assert [rule.partition("--probability ")[2] for rule in rules] == [
        "0.50000 -j DNAT --to-destination 10.78.0.11:8000",
        "1.00000 -j DNAT --to-destination 10.78.0.12:8000",
    ]
    (refused,) = refusal_rules(objects)
    assert "-d 10.96.0.10/32" in refused


def test_a_policy_admits_whom_it_names_and_nobody_else() -> None:
    friend = named("friend", {"app": "friend"}) | {"status": {"podIP": "10.78.0.21"}}
    stranger = named("stranger", {"app": "other"}) | {"status": {"podIP": "10.78.0.22"}}
    rule = {
        "from": [{"podSelector": {"matchLabels": {"app": "friend"}}}],
        "ports": [{"port": 8000, "endPort": 8003}],
    }
    policy = named("policy") | {"spec": {"podSelector": {}, "ingress": [rule]}}
    objects = ClusterObjects(policies=[policy], pods=[friend, stranger])
    rules = policy_rules(objects, named("server"), "10.78.0.20")
    assert "-A INPUT -s 10.78.0.21/32 -p tcp --dport 8000:8003 -j ACCEPT" in rules
    assert not any("10.78.0.22" in rule for rule in rules)
    assert rules[-1] == "-A INPUT -j DROP"
    assert policy_rules(objects, named("elsewhere", namespace="two"), "10.78.0.30") == []


def test_label_selectors() -> None:
    labels = {"component": "all"}
    assert selects({}, labels)
    assert not selects({"matchLabels": {"component": "head"}}, labels)
    expression = {"key": "component", "operator": "NotIn", "values": ["head"]}
    assert selects({"matchExpressions": [expression]}, labels)
    assert not selects({"matchExpressions": [{"key": "gone", "operator": "Exists"}]}, labels)


def test_names_of_services() -> None:
    objects = ClusterObjects(
        services=[service("web", "10.96.0.9"), service("headless", "None")],
        endpoints=[endpoints("headless", "10.78.0.11")],
    )
    assert resolve(objects, "web.one.svc.cluster.local") == ["10.96.0.9"]
    assert resolve(objects, "headless.one.svc.cluster.local") == ["10.78.0.11"]
    assert resolve(objects, "web.two.svc.cluster.local") is None
    assert resolve(objects, "example.org") is None


def test_a_dns_answer_carries_the_address() -> None:
    objects = ClusterObjects(services=[service("web", "10.96.0.9")])
    labels = ("web", "one", "svc", "cluster", "local")
    question = b"".join(bytes([len(label)]) + label.encode() for label in labels) + b"\0"
    message = b"id" + struct.pack(">HHHHH", 256, 1, 0, 0, 0) + question + struct.pack(">HH", 1, 1)
    answer = dns_answer(objects, message)
    assert answer.startswith(b"id")
    assert answer.endswith(bytes([10, 96, 0, 9]))


def test_quantities() -> None:
    assert [quantity(text) for text in ("2", "500m", "6Gi", "3M")] == [2, 1, 6 << 30, 3_000_000]


def test_crds_lose_what_an_old_server_refuses() -> None:
    schema = {
        "x-kubernetes-validations": [{"rule": "true"}],
        "properties": {"name": {"type": "string", "default": ""}, "size": {"default": 1}},
    }
    fitting = {"properties": {"name": {"type": "string"}, "size": {"default": 1}}}
    assert _without_new_rules(schema) == fitting
