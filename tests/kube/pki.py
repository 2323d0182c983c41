"""Makes the box's keys: an authority, the API server's certificate, the accounts' key, one token."""

from __future__ import annotations

import os
import secrets
import subprocess
from pathlib import Path

import yaml

from . import settings

NAMES = (
    f"IP:127.0.0.1,IP:{settings.FIRST_SERVICE_ADDRESS},IP:{settings.GATEWAY},"
    "DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,DNS:localhost"
)
DAYS = "30"


def make_pki() -> None:
    folder = settings.PKI
    folder.mkdir(parents=True)
    folder.chmod(0o700)
    _openssl(
        *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", DAYS, "-subj", "/CN=box"),
        *("-keyout", "ca.key", "-out", "ca.crt"),
    )
    (folder / "names").write_text(f"subjectAltName={NAMES}\n")
    _openssl(
        *("req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=kube-apiserver"),
        *("-keyout", "server.key", "-out", "server.csr"),
    )
    _openssl(
        *("x509", "-req", "-in", "server.csr", "-CA", "ca.crt", "-CAkey", "ca.key"),
        *("-CAcreateserial", "-days", DAYS, "-extfile", "names", "-out", "server.crt"),
    )
    _openssl("genrsa", "-out", "accounts.key", "2048")
    _openssl("rsa", "-in", "accounts.key", "-pubout", "-out", "accounts.pub")
    token = secrets.token_hex(12)
    (folder / "tokens.csv").write_text(f"{token},admin,admin,system:masters\n")
    settings.KUBECONFIG.write_text(_kubeconfig(token, folder))
    for key in folder.iterdir():
        os.chmod(key, 0o600)


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=settings.PKI, check=True, capture_output=True)


def _kubeconfig(token: str, folder: Path) -> str:
    cluster = {
        "server": settings.API_URL,
        "certificate-authority": str(folder / "ca.crt"),
    }
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "box", "cluster": cluster}],
        "users": [{"name": "admin", "user": {"token": token}}],
        "contexts": [{"name": "box", "context": {"cluster": "box", "user": "admin"}}],
        "current-context": "box",
    }
    return yaml.safe_dump(content)
