"""One release of the chart in the box: what the tests ask it and order of it."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx

from . import box, settings
from .api import Object

SERVING_LIMIT_S = 240.0
ORDER_LIMIT_S = 120.0
RECOVERY_LIMIT_S = 180.0


class Release:
    def __init__(self, namespace: str, name: str, chart: Path, values: Path) -> None:
        self.namespace = namespace
        self.name = name
        self.service = "serve-svc"  #: what the Service's name ends with, behind which gateways are
        self._chart = chart
        self._values = values

    @property
    def url(self) -> str:
        """The gateways' Service, as pods reach it."""
        return f"http://{self.name}-{self.service}.{self.namespace}.svc.cluster.local:8000"

    def upgrade(self, *options: str) -> None:
        """Install the chart, or upgrade it. Raises box.BoxError with Helm's words."""
        line = ("upgrade", self.name, str(self._chart), "--install", "--namespace", self.namespace)
        box.helm(*line, "--values", str(self._values), *options)

    def get(self, kind: str, name: str = "", *options: str) -> Object:
        line = ["--namespace", self.namespace, "get", kind, *([name] if name else []), *options]
        return json.loads(box.kubectl(*line, "--output", "json").stdout)

    def pods(self, component: str) -> list[Object]:
        """Return the running pods of the head or of a group, those that end left out."""
        label = f"app.kubernetes.io/component={component}"
        pods = self.get("pods", "", "--selector", label)["items"]
        return [
            pod
            for pod in pods
            if pod.get("status", {}).get("phase") == "Running"
            and "deletionTimestamp" not in pod["metadata"]
        ]

    def diptych(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the command line in the head's pod, as an operator. It may fail."""
        return self.run_in_head("diptych", *arguments)

    def run_in_head(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the head's pod, with the operators' key in the environment."""
        head = self.pods("head")[0]["metadata"]["name"]
        variable = f"DIPTYCH_ADMIN_TOKEN={self._admin_key()}"
        line = box.exec_command(self.namespace, head, ["env", variable, *command])
        return subprocess.run(line, capture_output=True, text=True, timeout=ORDER_LIMIT_S)

    def _admin_key(self) -> str:
        cluster = self.get("rayservice", self.name)["spec"]["rayClusterConfig"]
        secret = cluster["authOptions"]["secretName"]
        return base64.b64decode(self.get("secret", secret)["data"]["admin"]).decode()

    def status(self) -> Object:
        """Return what Control says of the cluster. Raises ValueError while Control is away."""
        head = self.pods("head")[0]["metadata"]["name"]
        question = (
            "import httpx, sys; print(httpx.get('http://127.0.0.1:8001/admin/v1/cluster', "
            "headers={'authorization': 'Bearer ' + sys.argv[1]}).text)"
        )
        command = ["python", "-c", question, self._admin_key()]
        line = box.exec_command(self.namespace, head, command)
        result = subprocess.run(line, capture_output=True, text=True, timeout=ORDER_LIMIT_S)
        return json.loads(result.stdout)

    def ready(self, pool: str) -> int:
        """Return how many workers of a pool are ready; 0 while Control is away."""
        with suppress(ValueError, KeyError, IndexError, box.BoxError):
            return self.status()["pools"][pool]["ready"]
        return 0

    def wait_until_serving(self) -> None:
        wait_until(self._serves, SERVING_LIMIT_S, "the release does not serve")

    def _serves(self) -> bool:
        probe = f"import httpx; print(httpx.get('{self.url}/health', timeout=3).status_code)"
        return _run_as_client(probe).stdout.strip() == str(httpx.codes.OK)

    def wait_for_recovery(self) -> None:
        """Wait until both pods and all six workers are ready, none of them drained."""

        def has_recovered() -> bool:
            statuses = [
                status["ready"]
                for pod in self.pods("all")
                for status in pod["status"]["containerStatuses"]
            ]
            return self._worker_states() == ["ready"] * 6 and statuses == [True, True]

        wait_until(has_recovered, RECOVERY_LIMIT_S, "the release has not recovered")

    def _worker_states(self) -> list[str]:
        """Return the states of all workers; none while Control is away."""
        with suppress(ValueError, KeyError, IndexError, box.BoxError):
            return [worker["state"] for worker in self.status()["workers"]]
        return []

    def ask(self) -> str:
        """Have a short chat, and return its id. Raises AssertionError if it fails."""
        body = {
            "model": "demo",
            "max_tokens": 8,
            "messages": [{"role": "user", "content": "Hello"}],
        }
        probe = (
            f"import httpx; answer = httpx.post('{self.url}/v1/chat/completions', json={body}, "
            "timeout=30); print(answer.raise_for_status().headers['x-request-id'])"
        )
        result = _run_as_client(probe)
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    def start_load(self, seconds: int, clients: int = 3) -> subprocess.Popen[str]:
        """Start clients that stream chats for so long; their report is the output's last line."""
        load = [sys.executable, "-m", "tests.kube.load", self.url, str(seconds), str(clients)]
        return subprocess.Popen(
            ["ip", "netns", "exec", settings.NAMESPACE, *load],
            cwd=settings.REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def wait_until(
    condition: Callable[[], bool], limit_s: float, failure: str, *, pause_s: float = 1.0
) -> None:
    """Wait for the condition; fail with the sentence and where the logs are."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"{failure} after {limit_s:.0f} s: see {settings.LOGS}"
        time.sleep(pause_s)


def _run_as_client(program: str) -> subprocess.CompletedProcess[str]:
    """Run a line of Python in the box's network, outside of all pods."""
    line = ["ip", "netns", "exec", settings.NAMESPACE, sys.executable, "-c", program]
    return subprocess.run(line, capture_output=True, text=True)
