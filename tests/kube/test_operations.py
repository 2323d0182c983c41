"""What operators do to a release in the box, and what streams noticed of it, on a live server.

Each test that runs under load writes a line into `build/kube/operations.md`, the table of
deploy/README.md. The tests build on each other's release and run in this order.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from diptych.cluster.control.pod_watch import NOT_READY_REASON

from . import box, settings
from .conftest import make_secret
from .release import Release, wait_until

pytestmark = [pytest.mark.timeout(1200)]
TABLE = settings.FOLDER / "operations.md"
LOAD_S = 40
CLUSTER_LOAD_S = 900  #: At most; the load ends soon after the second Ray cluster has taken over.
CHANGE_LIMIT_S = 180.0
NODE_GRACE_S = 20.0  #: After that the box's Kubernetes gives up a node that says nothing.
SERVE_PATIENCE_S = 40.0  #: After 30 s Serve kills replicas that do not answer another head.
HEAD_WAIT_S = 300.0  #: How long another head may take.
UPGRADE_LIMIT_S = 300.0  #: How long a second Ray cluster may take.
UPGRADE_WAIT_S = 600.0  #: How long it is waited for, so that the table has what streams noticed.


@contextmanager
def under_load(
    release: Release,
    operation: str,
    seconds: int = LOAD_S,
    *,
    clients: int = 3,
    may_fail: bool = False,
    ends_with_change: bool = False,
) -> Iterator[None]:
    """Run the block while clients stream; no stream may differ or, unless told so, fail.

    Nor may a call be repeated where none may fail: its first attempt failed. The load takes so many
    seconds, or ends 20 s after the block.
    """
    load = release.start_load(seconds, clients)
    try:
        yield
    except BaseException:
        load.kill()
        raise
    if ends_with_change:
        load.terminate()
    output, _ = load.communicate(timeout=seconds + 120)
    report = output.strip().splitlines()[-1]
    with TABLE.open("a") as table:
        table.write(f"| {operation} | {report} |\n")
    print(f"\n{operation}: {output.strip()}")
    assert " 0 wrong" in report, output
    assert may_fail or " 0 failed" in report, output
    assert may_fail or " 0 repeated" in report, output


def test_the_rendered_objects_are_those_that_the_server_has(release: Release) -> None:
    managers = {
        entry["manager"]: entry["operation"]
        for entry in release.get("rayservice", release.name, "--show-managed-fields")["metadata"][
            "managedFields"
        ]
    }
    assert managers["helm"] == "Apply"

    def is_running() -> bool:
        status = release.get("rayservice", release.name)["status"]
        return status.get("serviceStatus") == "Running"  # the operator notices after the clients

    wait_until(is_running, CHANGE_LIMIT_S, "the RayService is not Running")


def test_kubectl_logs_show_every_process(release: Release) -> None:
    pod = release.pods("all")[0]["metadata"]["name"]
    text = box.kubectl("--namespace", release.namespace, "logs", pod).stdout
    assert "raylet" in text
    assert "PrefillWorker" in text or "DecodeWorker" in text


def test_a_scale_beyond_the_slots_is_refused(release: Release) -> None:
    result = release.diptych("scale", "decode=9")
    assert result.returncode != 0
    assert "decode=9: the fleet has 4 slots of this kind" in result.stderr


def test_scaling_up_and_down(release: Release) -> None:
    with under_load(release, "`diptych scale decode=4 --wait`"):
        assert release.diptych("scale", "decode=4", "--wait").returncode == 0
    assert release.ready("decode") == 4


def test_an_upgrade_after_scaling_keeps_the_size(release: Release) -> None:
    with under_load(release, "`helm upgrade` of the same values, after `scale`"):
        release.upgrade()
    config = release.get("rayservice", release.name)["spec"]["serveConfigV2"]
    assert "num_replicas: 4" in config
    assert release.ready("decode") == 4
    with under_load(release, "`diptych scale decode=3 --wait`"):
        assert release.diptych("scale", "decode=3", "--wait").returncode == 0


def test_a_flip_and_its_way_back(release: Release) -> None:
    decode_workers = [w for w in release.status()["workers"] if w["home"] == "decode"]
    name = decode_workers[0]["id"]
    with under_load(release, "`diptych flip` to prefill and back"):
        assert release.diptych("flip", name, "--to", "prefill", "--wait").returncode == 0
        assert release.diptych("flip", name, "--to", "decode", "--wait").returncode == 0


def test_a_drained_worker_gets_no_requests(release: Release) -> None:
    prefill_workers = [w for w in release.status()["workers"] if w["home"] == "prefill"]
    name = prefill_workers[0]["id"]
    with under_load(release, "`diptych drain` of a worker, and `undrain`"):
        assert release.diptych("drain", name).returncode == 0
        assert release.diptych("undrain", name).returncode == 0


def test_more_pods_come_with_an_upgrade(release: Release) -> None:
    with under_load(release, "`helm upgrade --set groups[0].pods=3`", 90):
        release.upgrade("--set", "groups[0].pods=3")
        wait_until(lambda: len(release.pods("all")) == 3, CHANGE_LIMIT_S, "no third pod")
    cluster = release.get("rayclusters")["items"][0]
    assert cluster["spec"]["workerGroupSpecs"][0]["replicas"] == 3


def test_fewer_pods_come_with_an_upgrade(release: Release) -> None:
    release.upgrade()
    wait_until(lambda: len(release.pods("all")) == 2, CHANGE_LIMIT_S, "there are three pods still")
    release.wait_for_recovery()


def _gateway_pods(release: Release) -> list[str]:
    """Return the pods in which gateways run."""
    names = []
    for pod in release.pods("all"):
        name = pod["metadata"]["name"]
        line = box.exec_command(release.namespace, name, ["pgrep", "-f", "^ray::.*:Gateway"])
        if subprocess.run(line, capture_output=True).returncode == 0:
            names.append(name)
    return names


def _gateway_pod(release: Release) -> str:
    """Return the pod in which the gateway runs, or the first of several."""
    names = _gateway_pods(release)
    assert names, "no pod has a gateway"
    return names[0]


def _pod_without_gateway(release: Release) -> str:
    names = {pod["metadata"]["name"] for pod in release.pods("all")}
    return sorted(names - {_gateway_pod(release)})[0]


@pytest.mark.parametrize("grace", [(), ("--grace-period=0", "--force")], ids=["told", "killed"])
def test_a_pod_of_workers_is_deleted(release: Release, grace: tuple[str, ...]) -> None:
    release.wait_for_recovery()
    pod = _pod_without_gateway(release)
    with under_load(release, f"`kubectl delete pod` of workers {' '.join(grace)}".strip(), 60):
        box.kubectl("--namespace", release.namespace, "delete", "pod", pod, *grace)


def test_a_node_is_drained_as_the_budget_allows(release: Release) -> None:
    release.wait_for_recovery()
    pod = release.get("pod", _pod_without_gateway(release))
    node = pod["spec"]["nodeName"]
    options = ("--ignore-daemonsets", "--delete-emptydir-data", "--timeout=150s")
    selector = ("--pod-selector", "app.kubernetes.io/component=all")
    try:
        with under_load(release, "`kubectl drain` of a node with workers", 75):
            box.kubectl("drain", node, *options, *selector)
    finally:
        box.kubectl("uncordon", node)


def test_a_node_with_the_head_is_not_drained(release: Release) -> None:
    node = release.pods("head")[0]["spec"]["nodeName"]
    selector = ("--pod-selector", "app.kubernetes.io/component=head")
    options = ("--ignore-daemonsets", "--delete-emptydir-data", "--timeout=10s")
    result = box.kubectl("drain", node, *options, *selector, check=False)
    box.kubectl("uncordon", node)
    assert result.returncode != 0
    assert "disruption budget" in result.stderr
    assert len(release.pods("head")) == 1


def _node_of_workers_only(release: Release) -> str:
    """Return a node with workers and without head and gateway; a pod is moved there if need be."""
    needed = {
        release.pods("head")[0]["spec"]["nodeName"],
        release.get("pod", _gateway_pod(release))["spec"]["nodeName"],
    }

    def others() -> list[str]:
        return sorted({pod["spec"]["nodeName"] for pod in release.pods("all")} - needed)

    if not others():
        try:
            for node in needed:
                box.kubectl("cordon", node)
            pod = _pod_without_gateway(release)
            box.kubectl("--namespace", release.namespace, "delete", "pod", pod)
            wait_until(lambda: bool(others()), CHANGE_LIMIT_S, "no pod came up on another node")
        finally:
            for node in needed:
                box.kubectl("uncordon", node)
        release.wait_for_recovery()
    return others()[0]


def test_a_node_dies(release: Release) -> None:
    """No call should be repeated. Some were: the Service leads them to dead pods for a moment."""
    release.wait_for_recovery()
    node = _node_of_workers_only(release)
    try:
        with under_load(release, "a node with workers dies", 60):
            box.kill_node(node)
    finally:
        box.revive_node(node)


def test_the_pod_with_the_only_gateway_is_deleted(release: Release) -> None:
    """Without another gateway, calls fail until it is back; those that are answered are right."""
    release.wait_for_recovery()
    pod = _gateway_pod(release)
    with under_load(release, "`kubectl delete pod` of the only gateway", 60, may_fail=True):
        box.kubectl("--namespace", release.namespace, "delete", "pod", pod)


def test_the_operator_restarts(release: Release) -> None:
    release.wait_for_recovery()
    with under_load(release, "the operator's pod deleted"):
        box.kubectl("--namespace", "kuberay", "delete", "pod", "--all")
    box.kubectl("--namespace", "kuberay", "rollout", "status", "deployment/kuberay-operator")


@pytest.mark.parametrize("grace", [(), ("--grace-period=0", "--force")], ids=["told", "killed"])
def test_the_head_is_lost(release: Release, grace: tuple[str, ...]) -> None:
    """What the head knew is in Redis: workers and gateways serve on, and none is replaced.

    Beside the streams of three clients Ray's agents would not be up in time for a new head.
    """
    release.wait_for_recovery()
    workers = {worker["id"] for worker in release.status()["workers"]}
    head = release.pods("head")[0]["metadata"]["name"]

    def is_back() -> bool:
        return head not in {pod["metadata"]["name"] for pod in release.pods("head")} and (
            release.ready("prefill") == release.ready("decode") == 3
        )

    operation = f"`kubectl delete pod` of the head {' '.join(grace)}".strip()
    with under_load(release, operation, CLUSTER_LOAD_S, clients=1, ends_with_change=True):
        box.kubectl("--namespace", release.namespace, "delete", "pod", head, *grace)
        wait_until(is_back, HEAD_WAIT_S, "no other head", pause_s=3)
        time.sleep(SERVE_PATIENCE_S)
    assert {worker["id"] for worker in release.status()["workers"]} == workers


def _active_cluster(release: Release) -> str:
    status = release.get("rayservice", release.name)["status"]
    return status["activeServiceStatus"]["rayClusterName"]


def _upgraded(release: Release, before: str) -> Callable[[], bool]:
    def condition() -> bool:
        return _active_cluster(release) != before and len(release.pods("head")) == 1

    return condition


@pytest.mark.timeout(2400)
def test_a_secret_and_an_image_are_replaced_and_rolled_back(release: Release) -> None:
    """The upgrade, of both at once, and the rollback each make a second Ray cluster.

    Beside that, one client is what two cores can serve.
    """
    make_secret(release.namespace, "diptych-secret-2")
    release.wait_for_recovery()
    options = ("--set", "secretName=diptych-secret-2", "--set", "image.tag=next")
    operations = {
        f"`helm upgrade {' '.join(options)}`": lambda: release.upgrade(*options),
        "`helm rollback`": lambda: box.helm(
            "rollback", release.name, "--namespace", release.namespace
        ),
    }
    late = {}
    for operation, change in operations.items():
        before = _active_cluster(release)
        with under_load(release, operation, CLUSTER_LOAD_S, clients=1, ends_with_change=True):
            began = time.monotonic()
            change()
            is_upgraded = _upgraded(release, before)
            wait_until(is_upgraded, UPGRADE_WAIT_S, "no other Ray cluster", pause_s=5)
            took_s = time.monotonic() - began
        if took_s > UPGRADE_LIMIT_S:
            late[operation] = took_s
    assert not late, f"longer than {UPGRADE_LIMIT_S:.0f} s"


def test_gateways_on_sockets_of_their_own(release: Release) -> None:
    """Two gateways behind a Service that follows their readiness, without Serve's proxies."""
    before = _active_cluster(release)
    release.upgrade("--set", "gateway.listen=gateway", "--set", "gateway.replicas=2")
    wait_until(_upgraded(release, before), UPGRADE_LIMIT_S, "no other Ray cluster")
    release.service = "gateway"
    release.wait_until_serving()
    release.wait_for_recovery()
    assert len(_gateway_pods(release)) == 2


@pytest.mark.parametrize("grace", [(), ("--grace-period=0", "--force")], ids=["told", "killed"])
def test_one_of_two_gateways_is_deleted(release: Release, grace: tuple[str, ...]) -> None:
    """Only what a killed gateway has in flight may fail; a gateway that is told ends its streams."""
    wait_until(lambda: len(_gateway_pods(release)) == 2, CHANGE_LIMIT_S, "there is one gateway")
    release.wait_for_recovery()
    operation = f"`kubectl delete pod` of one of two gateways {' '.join(grace)}".strip()
    with under_load(release, operation, 60, may_fail=bool(grace)):
        pod = _gateway_pods(release)[0]
        box.kubectl("--namespace", release.namespace, "delete", "pod", pod, *grace)


def test_a_node_with_one_of_two_gateways_dies(release: Release) -> None:
    """What the gateway has in flight fails, and who connects before Control has noticed."""
    release.wait_for_recovery()
    head_node = release.pods("head")[0]["spec"]["nodeName"]
    nodes = {release.get("pod", name)["spec"]["nodeName"] for name in _gateway_pods(release)}
    others = sorted(nodes - {head_node})
    assert others, "both gateways are on the head's node"
    lost_pod = next(
        name
        for name in _gateway_pods(release)
        if release.get("pod", name)["spec"]["nodeName"] == others[0]
    )

    def is_marked_by_control() -> bool:
        conditions = release.get("pod", lost_pod)["status"]["conditions"]
        return any(one.get("reason") == NOT_READY_REASON for one in conditions)

    try:
        with under_load(release, "a node with one of two gateways dies", 60, may_fail=True):
            box.kill_node(others[0])
            wait_until(is_marked_by_control, NODE_GRACE_S, "Control has not marked the pod")
    finally:
        box.revive_node(others[0])
