"""The cluster at a glance, from everybody's statistics."""

from __future__ import annotations

from typing import Any

import pytest
from diptych.cluster.cli.status import goodput_rows, headline, pool_row, show, unreached_lines
from diptych.cluster.config import ClusterConfig
from diptych.cluster.control.serve import PoolObservation
from diptych.cluster.control.status import summarize, summarize_models


def worker(name: str, role: str = "", **fields: Any) -> dict[str, Any]:
    home = name.partition("/")[0]
    blocks = {"total": 100, "active": 20, "reserved": 5, "free": 75, "cached": 0}
    engine = {"kv_blocks": blocks, "running": 3, "ready": 1, "prefilling": 0, "waiting": 2}
    given = {
        "id": name,
        "home": home,
        "role": role or home,
        "state": "ready",
        "jobs": 4,
        "gpu": "cpu",
    }
    return {**given, "engine": engine, "note": "", **fields}


REQUESTS = {"running": 2, "finished": 8, "good": 6, "refused": 2, "cancelled": 1, "retries": 0}
GATEWAY = {"id": "gateway/a", "pid": 1, "model": "demo", "uptime_s": 90.0, "requests": REQUESTS}
ROUTER = {
    "pid": 2,
    "waiting": 7,
    "hit_tokens": 25,
    "prompt_tokens": 100,
    "recent": {"ttft_p95_ms": 312.4, "itl_p95_ms": 24.08},
    "goodput": {
        "window_s": 300.0,
        "requests": 20,
        "share": 0.6,
        "classes": {"batch": {"requests": 20, "share": 0.6, "ttft": 0.7, "itl": 0.9}},
        "tenants": {"": {"requests": 20, "share": 0.6, "ttft": 0.7, "itl": 0.9}},
    },
    "loading": {},
    "gateways": [GATEWAY, {**GATEWAY, "id": "gateway/b", "uptime_s": 30.0}],
}
WORKERS = [worker("prefill/a"), worker("decode/a"), worker("decode/b")]


def seen(prefill: int = 1, decode: int = 2, **more: PoolObservation) -> dict[str, PoolObservation]:
    pools = {
        "prefill": PoolObservation(prefill, [], [], []),
        "decode": PoolObservation(decode, [], [], []),
    }
    return pools | more


def told(workers: list[dict], router: dict | None = ROUTER, **more: Any) -> dict[str, Any]:
    return summarize(ClusterConfig(), seen(**more), router, workers)


def test_a_whole_cluster_is_healthy_and_its_gateways_are_added_up() -> None:
    cluster = told(WORKERS)
    assert cluster["state"] == "healthy" and cluster["missing"] == []
    assert cluster["requests"] == {name: 2 * count for name, count in REQUESTS.items()}
    assert headline(cluster).startswith(
        "HEALTHY   model demo   up 90 s   running 4   goodput 60.0% of 20 (5 min)"
    )
    rows = list(goodput_rows(cluster["router"]["goodput"]))
    assert rows[0] == ("classes", "batch", "20", "60.0%", "70.0%", "90.0%")
    assert rows[1][:2] == ("tenants", "-")
    prefill, decode = (pool_row(name, pool) for name, pool in cluster["pools"].items())
    assert prefill == (
        *("prefill", "1/1", "1", "1 prefill", "cpu", "9", "4", "25%", "25%", "312 ms", "-", ""),
    )
    assert decode == (
        *("decode", "2/2", "2", "2 decode", "cpu", "4", "8", "25%", "-", "-", "24.1 ms", ""),
    )


def test_a_flipped_worker_counts_at_home_and_works_elsewhere() -> None:
    pools = told([*WORKERS[:2], worker("decode/b", "prefill")])["pools"]
    assert pools["decode"]["ready"] == 2
    assert pools["decode"]["roles"] == {"decode": 1, "prefill": 1}
    assert pools["prefill"]["running"] == 8, "what it does is counted where it does it"
    assert pools["decode"]["notes"] == ["decode/b works as prefill"]


def test_who_is_told_to_drain_is_no_defect_but_who_leaves_is_gone() -> None:
    draining = [*WORKERS[:2], worker("decode/b", state="draining")]
    cluster = told(draining)
    assert cluster["state"] == "healthy"
    assert cluster["pools"]["decode"]["notes"] == ["decode/b draining (4 left)"]
    leaving = [*WORKERS[:2], worker("decode/b", state="leaving")]
    assert told(leaving)["pools"]["decode"]["ready"] == 1
    assert told(leaving)["state"] == "degraded" and told(leaving, decode=1)["state"] == "healthy"


def test_what_is_missing_is_named() -> None:
    assert told(WORKERS[:1])["missing"] == ["decode"]
    assert told(WORKERS, None)["missing"] == ["router"]
    assert told(WORKERS, {**ROUTER, "gateways": []})["missing"] == ["gateway"]
    only = [worker("prefill/a"), worker("decode/a", state="flipping")]
    assert told(only, decode=1)["missing"] == ["decode"], "whoever flips serves nobody now"
    for mode in ("never", "auto"):
        alone = ClusterConfig.model_validate({"router": {"disaggregate": mode}})
        assert summarize(alone, seen(0), ROUTER, WORKERS[1:])["state"] == "healthy"


def test_a_missing_gateway_is_a_reason_though_the_others_serve() -> None:
    three = ClusterConfig.model_validate({"gateway": {"replicas": 3}})
    cluster = summarize(three, seen(), ROUTER, WORKERS)
    assert cluster["state"] == "degraded" and cluster["missing"] == []
    assert cluster["reasons"] == ["gateways: 2 of 3"]


def test_a_worker_that_loads_or_does_not_come_up_is_noted() -> None:
    router = {**ROUTER, "loading": {"decode/new": ("loading weights, layer 3/4", 0.75)}}
    starting = PoolObservation(3, [], ["new"], [])
    notes = told(WORKERS, router, decode=starting.target)["pools"]["decode"]["notes"]
    assert notes == ["decode/new loading weights, layer 3/4 (75 %)"]
    failed = PoolObservation(2, [], [], [], "ConfigError: no memory")
    cluster = summarize(ClusterConfig(), {**seen(), "decode": failed}, ROUTER, WORKERS)
    assert cluster["pools"]["decode"]["notes"] == ["ConfigError: no memory"]


def with_shares(requests: int, ttft: float, itl: float, **recent: float | None) -> dict[str, Any]:
    group = {"requests": requests, "share": min(ttft, itl), "ttft": ttft, "itl": itl}
    goodput = {"window_s": 300.0, "requests": requests, "classes": {"": group}, "tenants": {}}
    latest = {"ttft_p95_ms": 100.0, "itl_p95_ms": 10.0, **recent}
    return {**ROUTER, "goodput": goodput, "recent": latest}


def test_a_target_out_of_reach_is_named_with_what_is_reachable() -> None:
    config = ClusterConfig.model_validate({"slo": {"ttft_ms": 2000, "itl_ms": 50}})
    router = with_shares(320, 0.97, 0.12, itl_p95_ms=107.3)
    cluster = summarize(config, seen(), router, WORKERS)
    (unreached,) = cluster["unreached"]
    assert unreached["target"] == "itl" and unreached["reachable_ms"] == 107.3
    (line,) = unreached_lines(cluster)
    assert line == (
        "itl<=50ms is out of reach at this load: 12% of 320 requests kept it; "
        "95% of the latest got 107.3ms"
    )
    both = with_shares(320, 0.3, 0.12, itl_p95_ms=107.3, ttft_p95_ms=9000.0)
    names = [found["target"] for found in summarize(config, seen(), both, WORKERS)["unreached"]]
    assert names == ["ttft", "itl"]


def test_a_target_that_differs_by_request_is_judged_by_each_one_s_own() -> None:
    config = ClusterConfig.model_validate({"slo": {"ttft": "max(1s,3x)", "itl_ms": 50}})
    late = with_shares(320, 0.3, 0.97, ttft_p95_ms=9000.0, ttft_share_p95=1.8)
    cluster = summarize(config, seen(), late, WORKERS)
    assert list(unreached_lines(cluster)) == [
        "ttft<=max(1s, 3x) is out of reach at this load: 30% of 320 requests kept it; "
        "95% of the latest got 9000ms, 1.8 times their target"
    ]
    assert "slo ttft<=max(1s, 3x) itl<=50ms" in headline({**cluster, "router": None})
    # Long prompts may take 9 s: what was served was in time, so the misses were refusals.
    in_time = with_shares(320, 0.3, 0.97, ttft_p95_ms=9000.0, ttft_share_p95=0.9)
    assert summarize(config, seen(), in_time, WORKERS)["unreached"] == []


def test_a_target_is_not_out_of_reach_by_chance_or_by_refusals() -> None:
    config = ClusterConfig.model_validate({"slo": {"ttft_ms": 2000, "itl_ms": 50}})
    for router in (
        with_shares(20, 0.8, 0.8, itl_p95_ms=60.0, ttft_p95_ms=3000.0),  # 4 of 20
        with_shares(500, 0.95, 0.91, itl_p95_ms=60.0),
        with_shares(500, 0.4, 0.4),  # the others were refused: what was served was in time
        with_shares(500, 0.4, 0.4, itl_p95_ms=None, ttft_p95_ms=None),
        with_shares(0, 0.0, 0.0),
    ):
        assert summarize(config, seen(), router, WORKERS)["unreached"] == []
    assert told(WORKERS, None)["unreached"] == []


def test_a_wide_status_of_several_models_says_whose_each_row_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    transfer = {
        "transport": "shm",
        "sessions": 1,
        "bytes_sent": 0,
        "bytes_received": 0,
        "failures": {},
    }
    workers = [{**one, "pid": 7, "rss_mib": 100, "transfer": transfer} for one in WORKERS]
    first_words = {}
    for names in (["llama"], ["llama", "qwen"]):
        show(summarize_models({name: told(workers) for name in names}), "wide")
        lines = capsys.readouterr().out.splitlines()
        first_words[len(names)] = [line.split()[0] for line in lines if line]
    alone = ["prefill", "decode", "GOODPUT", "classes", "tenants", "WORKER"]
    assert [word for word in first_words[1] if word in alone] == alone
    for name in ("llama", "qwen"):
        rows = ["prefill", "decode", "classes", "tenants", "prefill/a", "decode/a", "decode/b"]
        assert [word for word in first_words[2] if word.startswith(name)] == [
            f"{name}/{row}" for row in rows
        ]


def test_a_model_that_is_removed_is_leaving_and_does_not_degrade_the_cluster() -> None:
    leaving = summarize(ClusterConfig(), seen(), None, [], reasons=["a lost peer"], is_leaving=True)
    assert leaving["state"] == "leaving"
    assert leaving["missing"] == leaving["reasons"] == []
    cluster = summarize_models({"one": told(WORKERS), "two": leaving})
    assert (cluster["state"], cluster["reasons"]) == ("healthy", [])
    assert headline(leaving).startswith("LEAVING   model ")
    ill = summarize_models({"one": told(WORKERS[1:]), "two": leaving})
    assert ill["state"] == "degraded"
