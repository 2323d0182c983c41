"""What a gateway counts of the requests for one model."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from diptych.cluster.config import ClusterConfig
from diptych.cluster.gateway.attempt.held_bytes import AnswerLimits
from diptych.cluster.gateway.attempt.request import PushSink, Request, SinkError
from diptych.cluster.gateway.errors import ApiError
from diptych.cluster.gateway.served_model import ServedModel
from diptych.protos import frames as f


def served_model() -> ServedModel:
    """A model whose connections only take frames."""
    link = SimpleNamespace(send=lambda frame: None)
    plane: Any = SimpleNamespace(link=link, hello=SimpleNamespace(name="gateway/test"))
    text = SimpleNamespace(call_flaws=Counter())
    files: Any = SimpleNamespace(text=text, limits=SimpleNamespace(max_model_len=100))
    facilities: Any = SimpleNamespace(
        door=SimpleNamespace(generating=lambda key, answers, call_answers: nullcontext()),
        capacity=SimpleNamespace(running_request=nullcontext),
        memory=SimpleNamespace(limits=AnswerLimits(), statistics=dict),
        tracer=None,
    )
    return ServedModel(ClusterConfig(), files, "demo", plane, facilities=facilities)


@pytest.mark.parametrize(
    ("error", "counter"),
    [
        (ApiError("no_capacity", "no router"), "refused"),
        (RuntimeError("a defect"), "refused"),
        (SinkError("the client is gone"), "cancelled"),
        (asyncio.CancelledError(), "cancelled"),
    ],
)
def test_an_error_counts_as_refused_and_a_client_that_left_as_cancelled(
    error: BaseException, counter: str
) -> None:
    model = served_model()

    async def fail(request: Request, sink: PushSink) -> None:
        raise error

    model.generator.run = fail  # type: ignore[method-assign]
    request = Request("r", [1, 2, 3], [], f.Sampling(max_tokens=4))
    sink: Any = None
    with pytest.raises(type(error)):
        asyncio.run(model.run(request, sink))

    counts = model.statistics("")["requests"]
    others = {"running": 0, "finished": 0, "good": 0, "refused": 0, "cancelled": 0, "retries": 0}
    assert counts == others | {counter: 1}


@pytest.mark.parametrize(
    ("disaggregate", "missing"), [("always", ["prefill"]), ("auto", []), ("never", [])]
)
def test_only_a_router_that_always_disaggregates_needs_a_prefill_worker(
    disaggregate: str, missing: list[str]
) -> None:
    model = served_model()
    model.config = ClusterConfig.model_validate({"router": {"disaggregate": disaggregate}})
    plane: Any = model.plane
    plane.link.connected = True
    plane.cards = {"decode/0": SimpleNamespace(role="decode")}
    plane.ready = True
    assert model.missing() == missing
