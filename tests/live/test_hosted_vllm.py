"""What clients get of a prefill and a decode worker with vLLM is what vLLM alone gives."""

from __future__ import annotations

import random

import httpx
import pytest
from diptych.engine.demo import CHECKPOINT
from diptych.engine.vllm.start import ENVIRONMENT

from tests.support.live import VLLM_PYTHON, Live, eventually
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
    found: list[list[int]] = []
    for prompt in prompts:
        body = {
            "prompt": prompt,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        response = httpx.post(f"{live.url}/v1/completions", json=body, timeout=120)
        assert response.status_code == 200, response.text
        route = response.headers["x-route"]
        assert "prefill/" in route and "decode/" in route, "one worker did all"
        found.append(response.json()["choices"][0]["token_ids"])
    sent = live.worker("prefill")["transfer"]["bytes_sent"] - sent_before
    assert sent > 0, "no KV was transferred"
    eventually(live.idle)

    task = AloneTask(
        str(CHECKPOINT),
        prompts[0],
        answer_tokens=ANSWER_TOKENS,
        block_tokens=64,
        step_tokens=1024,
        sequences=16,
        kv_bytes=64 << 20,
        further_prompts=prompts[1:],
    )
    assert VLLM_PYTHON is not None
    (expected,) = answers_of([task], ENVIRONMENT, VLLM_PYTHON)
    assert len({tuple(answer) for answer in expected}) > PROMPTS // 2, "most answers are alike"
    assert found == expected
