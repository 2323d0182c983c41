"""`diptych serve --ray-address` on a Ray where others run applications of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from diptych.engine.demo import CHECKPOINT

from tests.live.test_ray_token import head
from tests.support.live import running
from tests.support.ray_token import token_environment

pytestmark = [pytest.mark.long, pytest.mark.cluster]

#: An application that a team deploys by a config, as `serve deploy` does, at the usual route.
TEAMS_APPLICATION = """
from ray import serve

@serve.deployment
class Echo:
    def __call__(self) -> str:
        return "echo"

application = Echo.bind()
"""
DEPLOY = """
import sys, ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema
ray.init(address=sys.argv[1], log_to_driver=False)
serve.start(proxy_location="Disabled")
teams = {"name": "teams", "import_path": "teams_application:application", "route_prefix": "/"}
config = ServeDeploySchema.model_validate({"applications": [teams]})
_get_global_client().deploy_apps(config, _blocking=True)
"""
STATUSES = """
import sys, json, ray
from ray import serve
ray.init(address=sys.argv[1], log_to_driver=False)
found = {name: one.status.value for name, one in serve.status().applications.items()}
print(json.dumps(found))
"""


def test_applications_of_others_are_let_alone(tmp_path: Path) -> None:
    (tmp_path / "teams_application.py").write_text(TEAMS_APPLICATION)
    environment = {**token_environment(tmp_path), "PYTHONPATH": str(tmp_path)}

    def python(script: str, address: str) -> str:
        told = subprocess.run(
            [sys.executable, "-c", script, address],
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert told.returncode == 0, told.stderr
        return told.stdout

    def statuses(address: str) -> dict[str, str]:
        found: dict[str, str] = json.loads(python(STATUSES, address).splitlines()[-1])
        return found

    with head(environment) as address:
        python(DEPLOY, address)
        assert statuses(address) == {"teams": "RUNNING"}
        flags = ["--ray-address", address, "--set", "kv_transfer.transport=tcp"]
        with running(tmp_path / "serve.log", *flags, environment=environment) as live:
            reply = live.chat("What is prefill?", max_tokens=8)
            assert reply.json()["usage"]["completion_tokens"] == 8, reply.text
            # A model that is added later is ended with the others.
            small = [f"pools.{pool}.engine.kv_mib=16" for pool in ("prefill", "decode")]
            settings = [word for setting in small for word in ("--set", setting)]
            added = live.cli("model", "add", "second", str(CHECKPOINT), *settings, "--wait")
            assert added.returncode == 0, added.stderr
            found = statuses(address)
            assert found.pop("teams") == "RUNNING" and len(found) == 3
        assert statuses(address) == {"teams": "RUNNING"}
