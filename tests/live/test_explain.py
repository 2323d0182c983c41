"""`diptych explain` and `diptych replay` on a live cluster."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest
from diptych.protos import admin_pb2 as pb
from diptych.protos import admin_pb2_grpc
from google.protobuf.json_format import MessageToDict

from tests.live.test_demo import ANSWER, QUESTION
from tests.support.live import Live, eventually, running

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def ended(live: Live, request: str) -> list[dict]:
    """Its decisions, once the outcome is known."""
    told = json.loads(live.cli("explain", request, "-o", "json").stdout)
    return [one for one in told["decisions"] if one["observed"].get("reason")]


def over_grpc(live: Live, request: str) -> dict:
    with grpc.insecure_channel(f"127.0.0.1:{live.admin_grpc}") as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        status = admin.Status(pb.StatusRequest())
        assert status.state == "healthy" and len(status.replicas) == 3
        with pytest.raises(grpc.RpcError, match="nobody else works as prefill"):
            admin.Drain(pb.DrainRequest(replica="prefill"))
        (told,) = admin.Explain(pb.ExplainRequest(request_id=request)).decisions
    return MessageToDict(told)


def test_a_request_is_explained_and_its_log_replayed(tmp_path: Path) -> None:
    log = ["--set", f"router.log_folder={tmp_path / 'log'}"]
    log += ["--set", "gateway.rehearsal=false"]  # before it, both decode workers cost the same
    with running(tmp_path / "serve.log", "--decode", "2", *log) as live:
        answers = [live.chat(QUESTION, headers={"x-session-id": "talk-7"}) for _ in range(3)]
        assert answers[0].json()["choices"][0]["message"]["content"] == ANSWER
        request = answers[0].json()["id"]
        (decision,) = eventually(lambda: ended(live, request))
        ids = {worker["alias"]: worker["id"] for worker in live.status()["workers"]}
        route = [ids[alias] for alias in answers[0].headers["x-route"].split(",")]
        assert [decision["prefill"], decision["decode"]] == route
        assert decision["observed"]["reason"] == "stop" and decision["observed"]["ttft_ms"] > 0
        assert decision["ttft_s"] > 0 and decision["itl_s"] > 0
        (prefill,), decodes = decision["prefill_options"], decision["decode_options"]
        assert prefill[0] == route[0] and set(prefill[2]) == {"left", "prefill"}
        assert len(decodes) == 2 and decodes[0][0] == route[1]
        assert set(decodes[0][2]) == {"step", "exposed", "memory", "handover"}
        assert decision["session"] == "talk-7"
        assert over_grpc(live, request) == decision
        text = live.cli("explain", request).stdout
        assert route[0] in text and "PREDICTED" in text and "ended: stop" in text
        unknown = live.cli("explain", "nobody")
        assert unknown.returncode == 1 and "nobody" in unknown.stderr
    from diptych.router.replay import read, replay

    with (tmp_path / "log" / "router.jsonl").open("rb") as lines:
        same = replay(read(lines), "diptych")
    assert (same.requests, same.decided, same.equal) == (3, 3, 1.0)
    with (tmp_path / "log" / "router.jsonl").open("rb") as lines:
        other = replay(read(lines), "round_robin")
    assert other.decided == 3 and set(other.policies) == {"diptych (the log's own)", "round_robin"}
