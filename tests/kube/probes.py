"""Asks one probe of a container, with the times and thresholds that it names."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable

import httpx

from .api import Object
from .sandbox import SandboxError

Execute = Callable[[list[str], float], subprocess.CompletedProcess[str]]
FAILURES = (httpx.HTTPError, OSError, SandboxError, subprocess.TimeoutExpired)


class Probe:
    def __init__(self, definition: Object, container: Object, address: str) -> None:
        self.message = ""  #: Of the last answer.
        self._definition = definition
        self._container = container
        self._address = address
        self._successes = 0  #: Since the last failure.
        self._failures = 0  #: Since the last success.
        self._asked_before = False

    @property
    def has_succeeded(self) -> bool:
        return self._successes >= self._definition.get("successThreshold", 1)

    @property
    def has_failed(self) -> bool:
        return self._failures >= self._definition.get("failureThreshold", 3)

    def ask(self, execute: Execute) -> bool:
        """Wait for the probe's next time, ask, and return whether the answer is good."""
        if self._asked_before:
            time.sleep(self._definition.get("periodSeconds", 10))
        else:
            time.sleep(self._definition.get("initialDelaySeconds", 0))
            self._asked_before = True
        try:
            good = self._answer(execute)
        except FAILURES as error:
            self.message = str(error)[-200:]
            good = False
        self._successes = self._successes + 1 if good else 0
        self._failures = 0 if good else self._failures + 1
        return good

    def _answer(self, execute: Execute) -> bool:
        timeout_s = self._definition.get("timeoutSeconds", 1)
        if "exec" in self._definition:
            result = execute(self._definition["exec"]["command"], timeout_s)
            self.message = (result.stdout + result.stderr).strip()[-200:]
            return result.returncode == 0
        if "httpGet" in self._definition:
            request = self._definition["httpGet"]
            url = f"http://{self._address}:{self._port(request)}{request.get('path', '/')}"
            response = httpx.get(url, timeout=timeout_s)
            self.message = f"HTTP {response.status_code}"
            return response.status_code < 400
        if "tcpSocket" in self._definition:
            place = (self._address, self._port(self._definition["tcpSocket"]))
            socket.create_connection(place, timeout=timeout_s).close()
            return True
        raise OSError(f"the box knows no probe of {sorted(self._definition)}")

    def _port(self, source: Object) -> int:
        port = source["port"]
        if isinstance(port, int):
            return port
        for entry in self._container.get("ports") or []:
            if entry.get("name") == port:
                return entry["containerPort"]
        raise OSError(f"the container has no port {port}")
