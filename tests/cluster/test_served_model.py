"""What a gateway counts of the requests for one model."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from diptych.cluster.config import ClusterConfig
from diptych.cluster.gateway import served_model as served_model_module
from diptych.cluster.gateway.apis.parameters import ModelLimits
from diptych.cluster.gateway.attempt.held_bytes import AnswerLimits
from diptych.cluster.gateway.attempt.request import PushSink, Request, SinkError
from diptych.cluster.gateway.errors import ApiError
from diptych.cluster.gateway.served_model import ServedModel
from diptych.engine.demo import CHECKPOINT
from diptych.engine.errors import WeightsError
from diptych.protos import frames as f


def served_model() -> ServedModel:
    """A model whose connections only take frames."""
    link = SimpleNamespace(send=lambda frame: None)
    plane: Any = SimpleNamespace(link=link, hello=SimpleNamespace(name="gateway/test"), cards={})
    text = SimpleNamespace(call_flaws=Counter())
    limits = ModelLimits(max_model_len=100, vocabulary=50, stop_ids=(), temperature=0.0)
    files: Any = SimpleNamespace(text=text, limits=limits)
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


def test_the_smallest_worker_bounds_the_context_and_none_changes_nothing() -> None:
    """A worker alone knows what its pool holds: it may have sized the pool itself."""
    model = served_model()
    plane: Any = model.plane
    assert model.limits.max_model_len == 100

    def card(max_model_len: int) -> f.WorkerCard:
        return f.WorkerCard("decode/0", "decode", "decode", "", "", 0, max_model_len=max_model_len)

    for lengths, bound in (([0], 100), ([90, 80, 0], 80), ([90], 90), ([200], 100), ([70], 70)):
        plane.cards = {str(number): card(length) for number, length in enumerate(lengths)}
        assert model.limits.max_model_len == model.card("demo")["max_model_len"] == bound
        assert model.limits.vocabulary == 50
    # While all are gone, the last bound holds: a client that comes back asks for the same answer.
    plane.cards = {}
    assert model.limits.max_model_len == 70


# ---- what a checkpoint allows --------------------------------------------------------------------


def limits_of(folder: Path, **sections: Any) -> ModelLimits:
    return served_model_module._limits(folder, ClusterConfig.model_validate(sections), 8)


def checkpoint_with(tmp_path: Path, **generation: Any) -> Path:
    """The demo's checkpoint with these sampling defaults."""
    shutil.copytree(CHECKPOINT, tmp_path / "model")
    file = tmp_path / "model" / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | generation))
    return tmp_path / "model"


def test_sampling_defaults_that_are_null_are_as_if_left_out(tmp_path: Path) -> None:
    nulls = {"do_sample": True, "temperature": None, "top_p": None, "top_k": None}
    limits = limits_of(checkpoint_with(tmp_path, **nulls))
    assert (limits.temperature, limits.top_p, limits.top_k) == (1.0, 1.0, 0)


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k"])
def test_a_sampling_default_that_is_no_number_is_an_error_of_its_file(
    tmp_path: Path, name: str
) -> None:
    folder = checkpoint_with(tmp_path, do_sample=True, **{name: "warm"})
    with pytest.raises(WeightsError, match=rf"generation_config\.json: {name}: .*'warm'"):
        limits_of(folder)


@pytest.mark.parametrize(
    ("layers", "heads", "head_dim"), [(24, 2, 64), (28, 8, 128), (28, 2, 128), (32, 5, 64)]
)
@pytest.mark.parametrize("kv_mib", [256, 300])
def test_no_request_for_vllm_may_be_longer_than_the_blocks_of_its_pool(
    tmp_path: Path, layers: int, heads: int, head_dim: int, kv_mib: int
) -> None:
    """The worker refuses what is longer, and one without `max_tokens` asks for all there is."""
    sizes = {
        "num_hidden_layers": layers,
        "num_key_value_heads": heads,
        "head_dim": head_dim,
        "num_attention_heads": 16,
        "vocab_size": 1000,
        "max_position_embeddings": 1 << 20,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    pool = {"engine": {"kv_mib": kv_mib}}
    limits = limits_of(tmp_path, engine={"kind": "vllm"}, pools={"prefill": pool, "decode": pool})
    block_bytes = 2 * layers * heads * head_dim * 2 * 64
    blocks = (kv_mib << 20) // block_bytes
    assert limits.max_model_len == (blocks - 1) * 64


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


@pytest.mark.parametrize(
    ("disaggregate", "roles", "missing"),
    [
        ("auto", set(), ["router"]),
        ("auto", {"prefill"}, ["decode"]),
        ("auto", {"decode"}, []),
        ("always", {"decode"}, ["prefill"]),
        ("always", {"decode", "prefill"}, []),
    ],
)
def test_a_gateway_without_its_router_serves_with_the_workers_that_it_reaches(
    disaggregate: str, roles: set[str], missing: list[str]
) -> None:
    """Load balancers leave out what is not ready: all gateways at once, if one router ends."""
    model = served_model()
    model.config = ClusterConfig.model_validate({"router": {"disaggregate": disaggregate}})
    plane: Any = model.plane
    plane.link.connected = False
    plane.cards = {"decode/0": SimpleNamespace(role="decode")}  # and is dead, unless it is reached
    plane.reachable_roles = roles
    plane.ready = False
    assert model.missing() == missing
