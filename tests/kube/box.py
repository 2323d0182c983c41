"""A Kubernetes in a box: brings it up, runs commands in it, and takes it away.

    python -m tests.kube.box up
    python -m tests.kube.box kubectl get pods -A
    python -m tests.kube.box helm list -A
    python -m tests.kube.box exec NAMESPACE POD COMMAND...
    python -m tests.kube.box kill-node node-2
    python -m tests.kube.box revive-node node-2
    python -m tests.kube.box down

`KUBERAY_OPERATOR` names the binary of KubeRay's operator; without it the box has none.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from . import settings
from .api import Object
from .crds import fitting_crds
from .node_agent import DEAD_NODES
from .pki import make_pki

HERE = Path(__file__).parent
WAIT_LIMIT_S = 120.0
STOP_LIMIT_S = 20.0
#: The programs in the order of their start; they are stopped in the reverse one.
SERVICES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "node-agent")
CONTROLLER_OPTIONS = (
    "--node-monitor-grace-period=20s",
    "--feature-gates=BoundServiceAccountTokenVolume=true",
)


class BoxError(Exception):
    """The box cannot do what it is told. The message says why, and what to do."""


# ---- up ------------------------------------------------------------------------------------------


def up() -> None:
    """Bring the box up with the operator, if one is given. Raises BoxError."""
    _check_machine()
    if is_up():
        raise BoxError("the box is up already; `make kube-down` takes it away")
    shutil.rmtree(settings.STATE, ignore_errors=True)
    settings.LOGS.mkdir(parents=True)
    make_pki()
    _make_network()
    for service in SERVICES:
        _start(service)
        if service == "etcd":
            _wait_for("etcd", _etcd_answers)
        if service == "kube-apiserver":
            _wait_for("the API server", _api_server_answers)
    _wait_for("the nodes", _nodes_are_ready)
    _install_crds()
    if settings.operator_program() is not None:
        kubectl("apply", "--filename", str(HERE / "operator.yaml"))
        kubectl(
            *("--namespace", settings.OPERATOR_NAMESPACE, "rollout", "status"),
            *("deployment/kuberay-operator", "--timeout", f"{WAIT_LIMIT_S:.0f}s"),
        )


def _check_machine() -> None:
    if os.geteuid() != 0:
        raise BoxError("the box makes network namespaces: it needs root")
    for program in ("ip", "iptables-restore", "nsenter", "openssl", "setpriv", "unshare"):
        if shutil.which(program) is None:
            raise BoxError(
                f"{program} is missing: apt-get install iproute2 iptables openssl util-linux"
            )
    for program in ("etcd", "kube-apiserver", "kubectl", "helm"):
        if not (settings.PROGRAMS / program).exists():
            raise BoxError(f"{settings.PROGRAMS / program} is missing: run `make kube`")


def is_up() -> bool:
    return any(_process_id(service) is not None for service in SERVICES)


def _make_network() -> None:
    _remove_network()
    bridge = settings.BRIDGE
    _run("ip", "netns", "add", settings.NAMESPACE)
    inside = ("ip", "-n", settings.NAMESPACE)
    _run(*inside, "link", "set", "lo", "up")
    _run(*inside, "link", "add", bridge, "type", "bridge")
    _run(*inside, "addr", "add", f"{settings.GATEWAY}/24", "dev", bridge)
    _run(*inside, "link", "set", bridge, "up")
    # Services' addresses are nobody's until they are translated, but they need a way.
    _run(*inside, "route", "add", "default", "dev", bridge)
    folder = Path("/etc/netns") / settings.NAMESPACE
    folder.mkdir(parents=True, exist_ok=True)
    search = "svc.cluster.local cluster.local"
    (folder / "resolv.conf").write_text(f"nameserver {settings.GATEWAY}\nsearch {search}\n")


def _remove_network() -> None:
    subprocess.run(["ip", "netns", "del", settings.NAMESPACE], capture_output=True)
    shutil.rmtree(Path("/etc/netns") / settings.NAMESPACE, ignore_errors=True)


def _command(service: str) -> list[str]:
    pki = settings.PKI
    kubeconfig = f"--kubeconfig={settings.KUBECONFIG}"
    match service:
        case "etcd":
            options = [
                f"--data-dir={settings.STATE / 'etcd'}",
                "--listen-client-urls=http://127.0.0.1:2379",
                "--advertise-client-urls=http://127.0.0.1:2379",
                "--listen-peer-urls=http://127.0.0.1:2380",
                "--log-level=error",
                "--heartbeat-interval=1000",
                "--election-timeout=10000",
                "--unsafe-no-fsync",
            ]
        case "kube-apiserver":
            options = [
                "--etcd-servers=http://127.0.0.1:2379",
                f"--service-cluster-ip-range={settings.SERVICE_RANGE}",
                "--bind-address=0.0.0.0",
                "--secure-port=6443",
                f"--advertise-address={settings.GATEWAY}",
                f"--tls-cert-file={pki}/server.crt",
                f"--tls-private-key-file={pki}/server.key",
                f"--client-ca-file={pki}/ca.crt",
                f"--token-auth-file={pki}/tokens.csv",
                f"--service-account-key-file={pki}/accounts.pub",
                f"--service-account-signing-key-file={pki}/accounts.key",
                "--service-account-issuer=https://kubernetes.default.svc",
                "--api-audiences=https://kubernetes.default.svc",
                "--authorization-mode=RBAC",
                "--feature-gates=BoundServiceAccountTokenVolume=true",
                "--kubelet-preferred-address-types=InternalIP",
            ]
        case "kube-controller-manager":
            options = [
                kubeconfig,
                f"--service-account-private-key-file={pki}/accounts.key",
                f"--root-ca-file={pki}/ca.crt",
                "--leader-elect=false",
                *CONTROLLER_OPTIONS,
            ]
        case "kube-scheduler":
            options = [kubeconfig, "--leader-elect=false"]
        case "node-agent":
            return [sys.executable, "-m", "tests.kube.node_agent"]
        case _:
            raise BoxError(f"no service {service}")
    return [str(settings.PROGRAMS / service), *options]


def _start(service: str) -> None:
    in_network = ["ip", "netns", "exec", settings.NAMESPACE]
    with (settings.LOGS / f"{service}.log").open("ab") as log:
        process = subprocess.Popen(
            [*in_network, *_command(service)],
            cwd=settings.REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    (settings.STATE / f"{service}.pid").write_text(str(process.pid))


def _wait_for(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise BoxError(f"{what} did not get ready in {WAIT_LIMIT_S:.0f} s: see {settings.LOGS}")
        time.sleep(0.5)


def _etcd_answers() -> bool:
    result = _inside("curl", "-sf", "http://127.0.0.1:2379/health")
    return '"health":"true"' in result.stdout


def _api_server_answers() -> bool:
    return kubectl("get", "--raw", "/readyz", check=False).stdout == "ok"


def _nodes_are_ready() -> bool:
    condition = 'jsonpath={.items[*].status.conditions[?(@.type=="Ready")].status}'
    return kubectl("get", "nodes", "--output", condition).stdout.split().count("True") == len(
        settings.NODES
    )


def _install_crds() -> None:
    """Install the CRDs, and wait until the server answers for them."""
    kubectl("create", "--filename", str(HERE / "crds.yaml"))
    folder = settings.crd_folder()
    if folder is not None:
        file = settings.STATE / "crds.yaml"
        file.write_text(fitting_crds(folder))
        kubectl("create", "--validate=false", "--filename", str(file))
    _wait_for("the CRDs", _crds_are_established)


def _crds_are_established() -> bool:
    crds = json.loads(kubectl("get", "crds", "--output", "json").stdout)["items"]
    return all(_is_established(crd) for crd in crds)


def _is_established(crd: Object) -> bool:
    conditions = crd.get("status", {}).get("conditions") or []
    return any(
        condition["type"] == "Established" and condition["status"] == "True"
        for condition in conditions
    )


# ---- commands inside -----------------------------------------------------------------------------


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return _checked(subprocess.run(command, capture_output=True, text=True))


def _checked(result: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    if result.returncode:
        message = (result.stderr or result.stdout).strip()
        raise BoxError(f"{shlex.join(result.args)[:200]}: {message}")
    return result


def _inside(*command: str) -> subprocess.CompletedProcess[str]:
    line = ["ip", "netns", "exec", settings.NAMESPACE, *command]
    environment = os.environ | {"KUBECONFIG": str(settings.KUBECONFIG)}
    return subprocess.run(line, capture_output=True, text=True, env=environment)


def kubectl(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run kubectl as the administrator. Raises BoxError with its words, unless told not to."""
    result = _inside(str(settings.PROGRAMS / "kubectl"), *arguments)
    return _checked(result) if check else result


def helm(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run Helm as the administrator. Raises BoxError with its words, unless told not to."""
    result = _inside(str(settings.PROGRAMS / "helm"), *arguments)
    return _checked(result) if check else result


def exec_command(namespace: str, pod: str, command: list[str]) -> list[str]:
    """Return what runs a command in a pod, as `kubectl exec` does elsewhere. Raises BoxError."""
    file = settings.PODS / f"{namespace}_{pod}"
    if not file.exists():
        raise BoxError(f"no container of {namespace}/{pod} runs here")
    process_id = file.read_text()
    variables = Path(f"/proc/{process_id}/environ").read_bytes().decode().split("\0")
    entered = ["nsenter", "--target", process_id, "--net", "--mount", "--uts", "--ipc", "--pid"]
    identity = ["setpriv", "--reuid", "1000", "--regid", "1000", "--clear-groups"]
    environment = ["env", "--ignore-environment", *(entry for entry in variables if "=" in entry)]
    return [*entered, "--root", "--wd", *identity, *environment, *command]


# ---- faults and the end --------------------------------------------------------------------------


def kill_node(name: str) -> None:
    """Kill all pods of a node, from which the API server hears nothing more."""
    (DEAD_NODES / name).touch()


def revive_node(name: str) -> None:
    """Let a dead node report again. Its old pods stay dead: they are deleted."""
    pods = json.loads(kubectl("get", "pods", "--all-namespaces", "--output", "json").stdout)
    for pod in pods["items"]:
        if pod["spec"].get("nodeName") == name:
            metadata = pod["metadata"]
            names = ("--namespace", metadata["namespace"], metadata["name"])
            kubectl("delete", "pod", *names, "--force", "--grace-period=0")
    (DEAD_NODES / name).unlink(missing_ok=True)


def down() -> None:
    """End everything that `up` started, the pods first."""
    for service in reversed(SERVICES):
        process_id = _process_id(service)
        if process_id is None:
            continue
        os.killpg(process_id, signal.SIGTERM)
        deadline = time.monotonic() + STOP_LIMIT_S
        while _process_id(service) is not None and time.monotonic() < deadline:
            time.sleep(0.1)
        if _process_id(service) is not None:
            os.killpg(process_id, signal.SIGKILL)
    _remove_network()


def _process_id(service: str) -> int | None:
    """Return the process of a service, or None if it does not run."""
    try:
        process_id = int((settings.STATE / f"{service}.pid").read_text())
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None
    return None if state == "Z" else process_id


def main(arguments: list[str]) -> int:
    match arguments:
        case ["up"]:
            up()
        case ["down"]:
            down()
        case ["kubectl" | "helm" as program, *rest]:
            line = ["ip", "netns", "exec", settings.NAMESPACE, str(settings.PROGRAMS / program)]
            environment = os.environ | {"KUBECONFIG": str(settings.KUBECONFIG)}
            return subprocess.run([*line, *rest], env=environment).returncode
        case ["exec", namespace, pod, *command] if command:
            return subprocess.run(exec_command(namespace, pod, command)).returncode
        case ["kill-node", name]:
            kill_node(name)
        case ["revive-node", name]:
            revive_node(name)
        case _:
            print(__doc__)
            return 2
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BoxError as problem:
        sys.exit(f"kube: {problem}")
