"""Kubernetes' API, as a pod talks to it: by its service account, without a proxy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx

from .serve import ScaleError

#: Where Kubernetes puts a pod's namespace, its token and the authority of the API server.
ACCOUNT_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
REQUEST_TIMEOUT_S = 10.0  #: For one answer of Kubernetes.


class KubernetesApi:
    """The API server that this pod's environment names, or the one at `server_url`."""

    def __init__(
        self, account_folder: Path = ACCOUNT_FOLDER, server_url: str | None = None
    ) -> None:
        self._account_folder = account_folder
        self._server_url = server_url or _server_url_of_this_pod()

    def namespace(self) -> str:
        """Return the namespace that this pod is in."""
        return (self._account_folder / "namespace").read_text().strip()

    def client(self) -> httpx.AsyncClient:
        """Return a client of the API server, for a few calls: its token is valid for a while."""
        # The token is read for each client, as Kubernetes renews it.
        token = (self._account_folder / "token").read_text().strip()
        authority = self._account_folder / "ca.crt"
        verify: Any = str(authority) if authority.exists() else True
        return httpx.AsyncClient(
            base_url=self._server_url,
            headers={"authorization": f"Bearer {token}"},
            verify=verify,
            timeout=REQUEST_TIMEOUT_S,
            # The API server is in the cluster, where no proxy leads. httpx would not see that by
            # the CIDRs that NO_PROXY usually has there.
            trust_env=False,
        )


def raise_if_refused(response: httpx.Response) -> None:
    """Raise ScaleError with Kubernetes' own sentence, or the beginning of whatever came instead."""
    if not response.is_error:
        return
    try:
        message = response.json()["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:200]
    raise ScaleError(f"Kubernetes refuses ({response.status_code}): {message}")


def _server_url_of_this_pod() -> str:
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "")
    if ":" in host:  # the address of an IPv6 cluster, bare
        host = f"[{host}]"
    return f"https://{host}:{port}"
