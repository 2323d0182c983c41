"""Makes a pod's volumes as folders of this machine."""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass
from pathlib import Path

from .api import KubernetesApi, Object, path_of

TOKEN_LIFETIME_S = 7200  #: The box does not renew tokens.
TOKEN_MODE = 0o600


@dataclass(frozen=True, slots=True)
class Volume:
    folder: Path
    writable: bool = False
    #: Size of a volume in memory, as mount takes it; empty: the volume is on disk.
    memory_size: str = ""


class VolumeMaker:
    """Makes the volumes of one pod below `folder`. Methods raise httpx.HTTPError and KeyError."""

    def __init__(self, api: KubernetesApi, pod: Object, folder: Path) -> None:
        self._api = api
        self._pod = pod
        self._namespace = pod["metadata"]["namespace"]
        self._folder = folder
        security = pod["spec"].get("securityContext") or {}
        self._group = security.get("fsGroup")
        self._user = security.get("runAsUser")

    def make_all(self) -> dict[str, Volume]:
        volumes = self._pod["spec"].get("volumes") or []
        return {volume["name"]: self._make(volume) for volume in volumes}

    def _make(self, volume: Object) -> Volume:
        if "hostPath" in volume:
            return Volume(Path(volume["hostPath"]["path"]), writable=True)

        folder = self._folder / volume["name"]
        folder.mkdir(parents=True, exist_ok=True)
        if "emptyDir" in volume:
            return self._empty(folder, volume["emptyDir"] or {})
        if "secret" in volume:
            self._write_keys(folder, self._secret(volume["secret"]["secretName"]), volume["secret"])
        elif "configMap" in volume:
            source = volume["configMap"]
            self._write_keys(folder, self._config_map(source["name"]), source)
        elif "projected" in volume:
            for source in volume["projected"]["sources"]:
                self._project(folder, source)
        else:
            raise KeyError(f"volume {volume['name']}: the box makes none of {sorted(volume)}")
        return Volume(folder)

    def _empty(self, folder: Path, source: Object) -> Volume:
        os.chown(folder, 0, self._group or 0)
        folder.chmod(0o2777 if self._group else 0o777)
        memory_size = ""
        if source.get("medium") == "Memory":
            memory_size = source.get("sizeLimit", "").rstrip("i") or "50%"
        return Volume(folder, writable=True, memory_size=memory_size)

    def _project(self, folder: Path, source: Object) -> None:
        if "serviceAccountToken" in source:
            token = self._request_token()
            path = source["serviceAccountToken"]["path"]
            self._write(folder / path, token.encode(), TOKEN_MODE)
        if "configMap" in source:
            part = source["configMap"]
            self._write_keys(folder, self._config_map(part["name"]), part)
        if "secret" in source:
            self._write_keys(folder, self._secret(source["secret"]["name"]), source["secret"])
        if "downwardAPI" in source:
            for item in source["downwardAPI"]["items"]:
                text = self._pod["metadata"][item["fieldRef"]["fieldPath"].split(".")[1]]
                self._write(folder / item["path"], text.encode(), 0o644)

    def _secret(self, name: str) -> dict[str, bytes]:
        data = self._api.get(path_of("secrets", self._namespace, name)).get("data") or {}
        return {key: base64.b64decode(text) for key, text in data.items()}

    def _config_map(self, name: str) -> dict[str, bytes]:
        data = self._api.get(path_of("configmaps", self._namespace, name)).get("data") or {}
        return {key: text.encode() for key, text in data.items()}

    def _request_token(self) -> str:
        account = self._pod["spec"].get("serviceAccountName", "default")
        metadata = self._pod["metadata"]
        bound_to = {
            "kind": "Pod",
            "apiVersion": "v1",
            "name": metadata["name"],
            "uid": metadata["uid"],
        }
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": TOKEN_LIFETIME_S, "boundObjectRef": bound_to},
        }
        path = path_of("serviceaccounts", self._namespace, account, "token")
        return self._api.create(path, request)["status"]["token"]

    def _write_keys(self, folder: Path, data: dict[str, bytes], source: Object) -> None:
        items = source.get("items") or [{"key": key, "path": key} for key in data]
        for item in items:
            mode = source.get("defaultMode", 0o644)
            self._write(folder / item["path"], data[item["key"]], mode)

    def _write(self, path: Path, content: bytes, mode: int) -> None:
        """Write a file that the pod's user can read, as the kubelet does.

        The group of the pod gets it; a token without a group is the user's alone.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        os.chown(path, 0, self._group or 0)
        if self._group is not None:
            path.chmod(mode | 0o040)
        elif mode == TOKEN_MODE and self._user is not None:
            os.chown(path, self._user, 0)
            path.chmod(mode)
        else:
            path.chmod(0o644)
