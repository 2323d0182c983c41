"""Where the box lies, and the addresses in it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "build/kube"  #: Git ignores it.
#: kube-apiserver, kube-controller-manager, kube-scheduler, etcd, kubectl and helm.
PROGRAMS = FOLDER / "bin"
STATE = FOLDER / "state"  #: What a running box writes; a new box starts without it.
PKI = STATE / "pki"
KUBECONFIG = PKI / "kubeconfig"
LOGS = STATE / "logs"
PODS = STATE / "pods"

NAMESPACE = "diptych-box"  #: The network namespace in which everything runs.
BRIDGE = "kube0"
GATEWAY = "10.78.0.1"  #: The bridge's address: API server, DNS and kubelet are there.
SUBNET = "10.78.0"
API_URL = f"https://{GATEWAY}:6443"
SERVICE_RANGE = "10.96.0.0/24"
FIRST_SERVICE_ADDRESS = "10.96.0.1"  #: Kubernetes gives it to the service `kubernetes`.

NODES = ("node-1", "node-2", "node-3")
NODE_CPU = "16"  #: Promised by each node; nothing enforces it.
NODE_MEMORY = "32Gi"

#: The release's namespace, and the operator's, as in deploy/README.md.
RELEASE_NAMESPACE = "diptych"
OPERATOR_NAMESPACE = "kuberay"


def operator_program() -> Path | None:
    """Return the binary of KubeRay's operator that `KUBERAY_OPERATOR` names, or None if unset.

    Raises SystemExit if the variable names no file.
    """
    name = os.environ.get("KUBERAY_OPERATOR")
    if not name:
        return None
    path = Path(name).resolve()
    if not path.is_file():
        raise SystemExit(f"KUBERAY_OPERATOR={name}: there is no such file")
    return path


def crd_folder() -> Path | None:
    """Return the folder with CRDs (deploy/README.md says how to get them), or None."""
    folder = Path(os.environ.get("DIPTYCH_CRD_DIR", REPOSITORY.parent / "shared/crds"))
    return folder if folder.is_dir() else None


def python_folder() -> Path:
    """Return the virtual environment that runs this; the pods use it too."""
    return Path(sys.prefix)
