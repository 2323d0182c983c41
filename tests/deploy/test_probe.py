"""The readiness probe that the chart gives its pods, run against servers on the ports it asks."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from deploy import render
from tests.deploy.test_render import container_of, groups_of, service, two_gateways

WITHOUT = [name for name in ("wget", "unshare", "ip") if shutil.which(name) is None]

#: Runs the probe in a network of its own: the ports are fixed, and others may have them here.
#: Arguments: the probe's command, then port=path=status=body of each server.
SCRIPT = """
import subprocess, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

def serve(port, path, status, body):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(int(status) if self.path == path else 404)
            self.end_headers()
            self.wfile.write(body.encode())
        def log_message(self, *arguments):
            pass
    server = ThreadingHTTPServer(("127.0.0.1", int(port)), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()

subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
for words in sys.argv[2:]:
    serve(*words.split("="))
probe = subprocess.run(["bash", "-c", sys.argv[1]], stderr=subprocess.DEVNULL)
print("ready" if probe.returncode == 0 else "not ready")
"""

RAY = "52365=/api/local_raylet_healthz=200=success"
PROXY = "8000=/-/healthz=200=success"
READY = "8000=/ready=200={}"


def answer(command: str, *servers: str) -> str:
    """What the probe says of a pod in which these servers run."""
    alone = ["unshare", "--net", "--map-root-user"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("no network namespace can be made here")
    told = subprocess.run(
        [*alone, sys.executable, "-c", SCRIPT, command, *servers],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert told.returncode == 0, told.stderr
    return told.stdout.strip()


def probe_of(container: dict) -> str:
    return container["readinessProbe"]["exec"]["command"][-1]


needs_tools = pytest.mark.skipif(bool(WITHOUT), reason=f"needs {', '.join(WITHOUT)}")


@needs_tools
@pytest.mark.parametrize(
    ("servers", "told"),
    [
        ((RAY, PROXY), "ready"),
        ((PROXY,), "not ready"),
        ((RAY,), "not ready"),
        ((RAY, "8000=/-/healthz=503=draining"), "not ready"),
        ((RAY, "8000=/-/healthz=200=draining"), "not ready"),
        (("52365=/api/local_raylet_healthz=503=failed", PROXY), "not ready"),
        (("52365=/api/local_raylet_healthz=200=failed", PROXY), "not ready"),
    ],
    ids=[
        "both",
        "no raylet",
        "no proxy",
        "draining",
        "draining, says so alone",
        "ill raylet",
        "ill raylet, says so alone",
    ],
)
def test_a_pod_is_ready_where_its_raylet_and_its_proxy_say_so(
    servers: tuple[str, ...], told: str
) -> None:
    assert answer(probe_of(container_of(render.render({"groups": groups_of()}))), *servers) == told


@needs_tools
@pytest.mark.parametrize(
    ("group", "servers", "told"),
    [
        ("front", (RAY, READY), "ready"),
        ("front", (RAY, "8000=/ready=503={}"), "not ready"),
        ("work", (RAY,), "ready"),
        ("work", (), "not ready"),
    ],
)
def test_a_pod_with_a_gateway_of_its_own_is_ready_as_the_gateway_is(
    group: str, servers: tuple[str, ...], told: str
) -> None:
    groups = service(two_gateways())["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (chosen,) = [one for one in groups if one["groupName"] == group]
    assert answer(probe_of(chosen["template"]["spec"]["containers"][0]), *servers) == told


def test_one_slow_answer_takes_no_pod_out_of_its_service() -> None:
    probe = container_of(render.render({"groups": groups_of()}))["readinessProbe"]
    assert probe["failureThreshold"] > 1
    # The two questions are asked one after the other, each with a limit of its own.
    limits = [int(word) for word in probe["exec"]["command"][-1].split() if word.isdigit()]
    assert len(limits) == 2 and sum(limits) < probe["timeoutSeconds"]
