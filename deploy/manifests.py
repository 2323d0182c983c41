"""How the checks read manifests: parsed objects, the parts of a RayService, and quantities."""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

Manifest = dict[str, Any]  #: a Kubernetes object, or a part of one
QUANTITY = re.compile(r"(\d+\.?\d*|\.\d+)([KMGTPE]i?|m|k)?")  #: a number and its suffix
#: suffix of a quantity -> what the number is multiplied by; "K" without "i" is none
SCALES = {
    "": 1,
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
    "E": 1e18,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
    "Pi": 2**50,
    "Ei": 2**60,
}


def parse_quantity(value: str | float) -> float:
    """Returns a Kubernetes quantity, such as "64Gi" or "500m", as a number of whole units.

    NaN if it is none. Quantities with an exponent ("1e3") or a sign are not understood: NaN too.
    """
    match = QUANTITY.fullmatch(str(value))
    if match is None:
        return math.nan
    number, suffix = match.groups()
    return float(number) * SCALES.get(suffix or "", math.nan)


def read(text: str) -> Any:
    """Returns the one YAML document of `text`."""
    return yaml.load(text, Loader=yaml.CSafeLoader)


def ray_cluster(service: Manifest) -> Manifest:
    """Returns the specification of the Ray cluster that a RayService starts."""
    return service["spec"]["rayClusterConfig"]


def groups(service: Manifest) -> list[Manifest]:
    """The worker groups of a RayService."""
    return ray_cluster(service).get("workerGroupSpecs", [])


def templates(service: Manifest) -> dict[str, Manifest]:
    """Returns the pod templates by the names of their groups; the head's is `head`."""
    head = {"head": ray_cluster(service)["headGroupSpec"]["template"]}
    return head | {group["groupName"]: group["template"] for group in groups(service)}


def container_of(template: Manifest) -> Manifest:
    """Returns the container that runs Ray: KubeRay takes a pod's first one for it."""
    return template["spec"]["containers"][0]


def serve_config(service: Manifest) -> Manifest:
    """Returns what Ray Serve is to run; a RayService holds it as a text of YAML."""
    return read(service["spec"]["serveConfigV2"])


def settings(config: Manifest) -> Manifest:
    """Returns Diptych's configuration: the arguments of a Serve config's applications together."""
    arguments: Manifest = {}
    for application in config["applications"]:
        arguments |= application.get("args", {})
    return arguments
