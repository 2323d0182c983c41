"""What clients get of a prefill and a decode worker with vLLM is what vLLM alone gives."""

from __future__ import annotations

import random
from pathlib import Path

import httpx
import pytest
from diptych.engine.demo import CHECKPOINT
from diptych.engine.vllm.start import ENVIRONMENT

from tests.support.adapters import make_adapter
from tests.support.live import VLLM_PYTHON, Live, eventually, running
from tests.vllm.vllm_alone import AloneTask, answers_of

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not VLLM_PYTHON, reason="the cluster computes with our own engine"),
]

PROMPTS, ANSWER_TOKENS = 20, 24
VOCABULARY = 500  #: Of the bundled model, without special ids.


def test_twenty_prompts_over_http_have_the_ids_of_vllm_alone(live: Live) -> None:
    """Prompts of many lengths, some of which share a prefix; each is computed on both workers."""
    draw = random.Random(0)
    prompts = [draw.choices(range(10, VOCABULARY), k=draw.randrange(3, 400)) for _ in range(16)]
    prompts += [[*prompts[index], *prompts[index + 1][:30]] for index in range(4)]
    assert len(prompts) == PROMPTS
    status = live.status()
    sent_before = live.worker("prefill")["transfer"]["bytes_sent"]
    assert all(worker["engine"]["kernels"].startswith("vllm:") for worker in status["workers"])
    found = [answered_ids(live, prompt, "demo") for prompt in prompts]
    sent = live.worker("prefill")["transfer"]["bytes_sent"] - sent_before
    assert sent > 0, "no KV was transferred"
    eventually(live.idle)

    assert VLLM_PYTHON is not None
    (expected,) = answers_of([task_of(prompts)], ENVIRONMENT, VLLM_PYTHON)
    assert len({tuple(answer) for answer in expected}) > PROMPTS // 2, "most answers are alike"
    assert found == expected


def test_adapters_over_http_have_the_ids_of_vllm_alone_with_them(tmp_path: Path) -> None:
    """Equal prompts, to the model and to two adapters in turn: no cached block is another's."""
    draw = random.Random(1)
    prompts = [draw.choices(range(10, VOCABULARY), k=length) for length in (200, 130, 7)]
    folders = {
        name: make_adapter(tmp_path / name, CHECKPOINT, seed)
        for seed, name in enumerate(("sql", "poems"))
    }
    names = ["demo", *folders]
    options = [f"--adapter={name}={folder}" for name, folder in folders.items()]
    with running(tmp_path / "serve.log", *options) as live:
        listed = {
            card["id"]: card.get("parent")
            for card in httpx.get(f"{live.url}/v1/models", timeout=30).json()["data"]
        }
        assert listed == {"demo": None, "sql": "demo", "poems": "demo"}
        found: dict[str, list[list[int]]] = {name: [] for name in names}
        for prompt in prompts:
            for name in names:
                found[name].append(answered_ids(live, prompt, name))
        eventually(live.idle)

    assert VLLM_PYTHON is not None
    tasks = [task_of(prompts, str(folders.get(name, ""))) for name in names]
    expected = dict(zip(names, answers_of(tasks, ENVIRONMENT, VLLM_PYTHON), strict=True))
    assert found == expected
    assert len({str(answers) for answers in expected.values()}) == len(names)


def answered_ids(live: Live, prompt: list[int], model: str) -> list[int]:
    """The ids of an answer whose prompt one worker computed, and which another one decoded."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    response = httpx.post(f"{live.url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == model
    route = response.headers["x-route"]
    assert "prefill/" in route and "decode/" in route, "one worker did all"
    ids: list[int] = response.json()["choices"][0]["token_ids"]
    return ids


def task_of(prompts: list[list[int]], adapter: str = "") -> AloneTask:
    return AloneTask(
        str(CHECKPOINT),
        prompts[0],
        answer_tokens=ANSWER_TOKENS,
        block_tokens=64,
        step_tokens=1024,
        sequences=16,
        kv_bytes=64 << 20,
        further_prompts=prompts[1:],
        adapter=adapter,
    )
