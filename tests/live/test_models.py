"""Three models in one cluster under load: a worker of one is killed, the others see nothing."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml
from diptych.engine.demo import CHECKPOINT
from safetensors.torch import load_file, save_file

from ..support.live import Live, eventually, running

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

MODELS = ("demo", "org/red", "blue")
OTHERS = ("demo", "blue")  #: those of which no worker is killed
PROMPTS = ("What is prefill?", "What is the KV cache?", "Name three colours of a rainbow.")
#: Of an answer; those of the model whose worker is killed take longer than to find the worker.
TOKENS = {"demo": 60, "org/red": 700, "blue": 60}
ROUNDS_AFTER = 3  #: answers of each model after the replacement is there


def random_checkpoint(folder: Path, seed: int) -> Path:
    """The demo model's shape and tokenizer, with other weights."""
    shutil.copytree(CHECKPOINT, folder)
    file = folder / "model.safetensors"
    draw = torch.Generator().manual_seed(seed)
    weights = load_file(file)
    for name, tensor in weights.items():
        if tensor.dim() == 2:  # norms stay
            noise = torch.randn(tensor.shape, generator=draw) * 0.05
            weights[name] = noise.to(tensor.dtype)
    save_file(weights, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("models")
    config = {
        "models": {
            "demo": None,
            "org/red": str(random_checkpoint(folder / "red", 1)),
            "blue": {"model": {"path": str(random_checkpoint(folder / "blue", 2))}},
        },
        "pools": {pool: {"engine": {"kv_mib": 16}} for pool in ("prefill", "decode")},
        # Nine processes on two cores: targets of a machine of its own would mean nothing.
        "slo": {"ttft_ms": 60_000, "itl_ms": 5_000},
        "silence_s": 10,
    }
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(config))
    with running(folder / "serve.log", "-c", str(file)) as live:
        yield live


def answer(live: Live, model: str, prompt: str) -> str:
    """The text of a streamed answer; greedy, so it is the same each time."""
    reply = live.chat(
        prompt, model=model, max_tokens=TOKENS.get(model, 20), stream=True, ignore_eos=True
    )
    assert reply.status_code == 200, reply.text
    assert "event: error" not in reply.text, reply.text
    return "".join(re.findall(r'"delta":\{"content":"((?:[^"\\]|\\.)*)"', reply.text))


def counted(live: Live, name: str) -> Counter[str]:
    """A counter of the gateway's page, by model."""
    page = httpx.get(f"{live.url}/metrics", timeout=30).text
    counts = Counter[str]()
    for labels, value in re.findall(rf"^{name}\{{(.*)\}} (\S+)$", page, re.MULTILINE):
        model = re.search(r'model="([^"]*)"', labels)
        assert model, labels
        counts[model[1]] += float(value)  # type: ignore[assignment]
    return counts


def workers_of(live: Live, model: str) -> dict[str, dict[str, Any]]:
    return {worker["home"]: worker for worker in live.status()["models"][model]["workers"]}


def test_every_model_answers_with_its_own_weights(cluster: Live) -> None:
    listed = httpx.get(f"{cluster.url}/v1/models").json()["data"]
    assert sorted(card["id"] for card in listed) == sorted(MODELS)
    texts = {model: answer(cluster, model, PROMPTS[0]) for model in MODELS}
    assert texts["demo"].startswith("Prefill is the first phase")
    assert len(set(texts.values())) == len(MODELS) and all(texts.values())
    refused = cluster.chat("x", model="green")
    assert refused.status_code == 404 and "'org/red'" in refused.text
    assert cluster.chat("x").status_code == 400


def test_operators_see_each_model(cluster: Live) -> None:
    table = cluster.cli("status").stdout
    for model in MODELS:
        assert f"model {model} " in table and f"{model}/decode " in table, table
    refused = cluster.cli("scale", "decode=2")
    assert refused.returncode == 1 and "org/red" in refused.stderr
    dry_run = cluster.cli("scale", "org/red/decode=2", "blue/prefill=1", "--dry-run")
    assert "org/red: decode 1 -> 2 (dry run)" in dry_run.stdout
    assert "blue: prefill is 1 already" in dry_run.stdout
    request_id = "explained"
    headers = {"x-request-id": request_id}
    assert cluster.chat("x", headers, model="blue", max_tokens=2).status_code == 200
    blue = {worker["id"] for worker in workers_of(cluster, "blue").values()}
    explained = httpx.get(f"{cluster.control}/admin/v1/requests/{request_id}/explain").json()
    assert {explained["decisions"][0]["decode"]} < blue


def test_a_killed_worker_of_one_model_costs_the_others_nothing(cluster: Live) -> None:
    expected = {
        (model, prompt): answer(cluster, model, prompt) for model in MODELS for prompt in PROMPTS
    }
    retries_before = counted(cluster, "diptych_request_retries_total")
    over = threading.Event()
    wrong: list[str] = []
    done = Counter[str]()

    def ask_for_ever(model: str, prompt: str) -> None:
        while not over.is_set():
            try:
                text = answer(cluster, model, prompt)
            except Exception as error:
                wrong.append(f"{model}: {error!r}")
                return
            if text != expected[model, prompt]:
                wrong.append(f"{model}: {text!r} in place of {expected[model, prompt]!r}")
            done[model] += 1

    clients = [threading.Thread(target=ask_for_ever, args=pair) for pair in expected]
    for client in clients:
        client.start()
    try:
        eventually(lambda: wrong or all(done[model] > len(PROMPTS) for model in MODELS), 120)

        def busy_worker() -> dict[str, Any] | None:
            worker = workers_of(cluster, "org/red")["decode"]
            return worker if wrong or worker["engine"]["running"] > 1 else None

        victim = eventually(busy_worker, 60)
        os.kill(victim["pid"], signal.SIGKILL)
        at_the_kill = done.copy()

        def replaced() -> bool:
            decode = workers_of(cluster, "org/red").get("decode")
            return decode is not None and decode["id"] != victim["id"]

        eventually(lambda: wrong or replaced(), 120)
        after = at_the_kill + Counter(dict.fromkeys(MODELS, ROUNDS_AFTER))
        eventually(lambda: wrong or all(done[model] >= after[model] for model in MODELS), 120)
    finally:
        over.set()
        for client in clients:
            client.join(180)
    assert wrong == []
    retries = counted(cluster, "diptych_request_retries_total")
    retries.subtract(retries_before)
    assert retries["org/red"] > 0, "the kill hit nobody: the test shows nothing"
    assert {model: retries[model] for model in OTHERS} == dict.fromkeys(OTHERS, 0)


def test_a_model_comes_and_goes_while_the_others_serve(cluster: Live, tmp_path: Path) -> None:
    pids = {worker["pid"] for model in MODELS for worker in workers_of(cluster, model).values()} | {
        gateway["pid"] for gateway in cluster.status()["gateways"]
    }
    retries_before = counted(cluster, "diptych_request_retries_total")
    expected = answer(cluster, "blue", PROMPTS[0])
    over = threading.Event()
    wrong: list[str] = []

    def ask_for_ever() -> None:
        while not over.is_set() and not wrong:
            try:
                text = answer(cluster, "blue", PROMPTS[0])
            except Exception as error:
                wrong.append(repr(error))
            else:
                wrong.extend([text] if text != expected else [])

    client = threading.Thread(target=ask_for_ever)
    client.start()
    try:
        folder = random_checkpoint(tmp_path / "green", 3)
        pools = [f"pools.{pool}.engine.kv_mib=16" for pool in ("prefill", "decode")]
        flags = [word for pool in pools for word in ("--set", pool)]
        added = cluster.cli("model", "add", "green", str(folder), *flags, "--wait")
        assert added.returncode == 0 and "served after" in added.stdout, added.stderr
        eventually(lambda: cluster.chat("x", model="green", max_tokens=2).status_code == 200)
        again = cluster.cli("model", "add", "green", str(folder))
        assert again.returncode == 1 and "another model has the name green" in again.stderr
        removed = cluster.cli("model", "remove", "green", "--wait")
        assert removed.returncode == 0 and "gone after" in removed.stdout, removed.stderr
        assert cluster.chat("x", model="green").status_code == 404
    finally:
        over.set()
        client.join(120)
    assert wrong == []
    assert counted(cluster, "diptych_request_retries_total") == retries_before
    now = {worker["pid"] for model in MODELS for worker in workers_of(cluster, model).values()}
    assert now | {gateway["pid"] for gateway in cluster.status()["gateways"]} == pids
