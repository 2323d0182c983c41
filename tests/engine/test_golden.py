"""The decoder against `transformers` in fp32: logprobs of whole vocabularies, token for token."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diptych.engine.spec import read_spec
from diptych.protos.frames import Sampling, Token
from safetensors.torch import load_file, save_file

from tests.support import checkpoints, quantized
from tests.support.checkpoints import VOCAB
from tests.support.lazy import LazyModule
from tests.support.variants import daily_but

from .rig import alone, drain, engine, finish, prompt, request

transformers = LazyModule("transformers")

CLOSE = 1e-4
SEED = 2  # its prompts are far from where two experts score alike: there any last bit decides
WHOLE = Sampling(40, logprobs=VOCAB)  # every id's logprob: the logits up to a constant


@torch.inference_mode()
def reference(folder: Path, ids: list[int]) -> torch.Tensor:
    """[len(ids), vocab] logprobs of `transformers` over the whole answer in one forward pass."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return torch.log_softmax(model(torch.tensor([ids])).logits[0], dim=-1)


def check(folder: Path, ids: list[int], tokens: list[Token]) -> None:
    """Every token is the reference's greedy one, every logprob within CLOSE of the reference's."""
    answer = [token.id for token in tokens]
    rows = reference(folder, ids + answer[:-1])[len(ids) - 1 :]
    assert answer == rows.argmax(dim=-1).tolist()
    ours = torch.empty_like(rows)
    for row, token in zip(ours, tokens, strict=True):
        assert len(token.top) == VOCAB
        for index, logprob in token.top:
            row[index] = logprob
    assert float((ours - rows).abs().max()) <= CLOSE


@pytest.mark.parametrize(
    "length",
    [1, 333, *(pytest.param(length, marks=pytest.mark.slow) for length in (63, 64, 65))],
)
def test_prompt_and_answer_match_transformers(model: Path, length: int) -> None:
    owner, ids = engine(model, "float32", max_step_tokens=128), prompt(length, SEED)
    check(model, ids, alone(owner, ids, WHOLE))


def test_a_batch_matches_transformers(dense_or_experts: Path) -> None:
    owner = engine(dense_or_experts, "float32", max_step_tokens=192)
    prompts = {str(n): prompt(n, seed=n) for n in (5, 129, 200, 64)}
    streams = finish(owner, [request(owner, name, ids, WHOLE) for name, ids in prompts.items()])
    for name, ids in prompts.items():
        check(dense_or_experts, ids, streams[name])


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 128}
#: what a checkpoint may say -> (architecture, changes of its config)
CHANGES: dict[str, tuple[str, dict]] = {
    "linear-rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "plain-rope": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    "llama3-rope-of-qwen": ("qwen3", {"rope_parameters": checkpoints.LLAMA3_ROPE}),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "yarn-of-qwen": ("qwen3", {"rope_parameters": YARN | {"beta_fast": 16.0, "beta_slow": 2.0}}),
    "yarn-of-experts": ("qwen3_moe", {"rope_parameters": YARN | {"attention_factor": 1.3}}),
    "yarn-mscale": ("llama", {"rope_parameters": YARN | {"mscale": 1.2, "mscale_all_dim": 0.5}}),
    "yarn-untruncated": ("llama", {"rope_parameters": YARN | {"truncate": False}}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "tied-experts": ("qwen3_moe", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True}),
    "biases-of-qwen3": ("qwen3", {"attention_bias": True}),
    "biases-of-experts": ("qwen3_moe", {"attention_bias": True}),
    "one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "as-many-kv-heads": ("llama", {"num_key_value_heads": 4}),
    "wide-heads": ("llama", {"head_dim": 128}),
    "window-of-mixtral": ("mixtral", {"sliding_window": 70}),
    "window-of-experts": ("qwen3_moe", {"sliding_window": 70, "use_sliding_window": True}),
    "window-that-is-off": ("qwen3", {"sliding_window": 70, "use_sliding_window": False}),
    "weights-as-they-are": ("qwen3_moe", {"norm_topk_prob": False}),
    "every-other-layer": ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": []}),
    "one-expert": ("mixtral", {"num_experts_per_tok": 1}),
    "all-experts": ("mixtral", {"num_experts_per_tok": 4}),
}


#: One of each kind; the others are slow together.
QUICK_CHANGES = {
    "linear-rope",
    "llama3-rope-of-qwen",
    "yarn-of-qwen",
    "tied",
    "biases-of-qwen3",
    "one-kv-head",
    "window-of-mixtral",
    "weights-as-they-are",
    "every-other-layer",
}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(change, marks=() if change in QUICK_CHANGES else pytest.mark.slow)
        for change in CHANGES
    ],
)
def test_variants_match_transformers(tmp_path: Path, change: str) -> None:
    architecture, values = CHANGES[change]
    folder = checkpoints.make(tmp_path / "m", architecture, **values)
    owner = engine(folder, "float32", max_step_tokens=128)
    check(folder, prompt(333), alone(owner, prompt(333), WHOLE))


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_head_that_is_on_disk_counts_as_it_does_in_transformers(
    tmp_path: Path, same: bool
) -> None:
    folder = checkpoints.make(tmp_path / "m", "llama")
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    if same:
        weights = load_file(folder / "model.safetensors")
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    check(folder, prompt(100), alone(engine(folder, "float32"), prompt(100), WHOLE))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_shards_match_transformers(tmp_path: Path, name: str) -> None:
    folder = checkpoints.make(tmp_path / "m", name)
    checkpoints.split(folder, 3)
    check(folder, prompt(100), alone(engine(folder, "float32"), prompt(100), WHOLE))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "style", daily_but(["block", "tensor", "compressed-channel"], quantized.STYLES)
)
@pytest.mark.parametrize(
    "name", ["llama", pytest.param("mixtral", marks=SLOW), pytest.param("qwen3_moe", marks=SLOW)]
)
def test_fp8_weights_are_those_that_their_scales_give(
    tmp_path: Path, name: str, style: str
) -> None:
    source = checkpoints.make(tmp_path / "source", name)
    plain = quantized.quantize(source, tmp_path / "fp8", style)
    tokens = alone(engine(tmp_path / "fp8", "float32"), prompt(100), WHOLE)
    check(plain, prompt(100), tokens)
    # not in float32: there some processors' bits depend on where a matrix lies
    owners = (engine(folder, "bfloat16") for folder in (tmp_path / "fp8", plain))
    ours, theirs = (alone(owner, prompt(100), WHOLE) for owner in owners)
    assert ours == theirs
    assert ours != alone(engine(source), prompt(100), WHOLE), "quantizing changes something"


def test_an_untied_qwen2_matches_transformers(tmp_path: Path) -> None:
    folder = checkpoints.make(tmp_path / "m", "qwen2", tie_word_embeddings=False)
    check(folder, prompt(200), alone(engine(folder, "float32"), prompt(200), WHOLE))


def test_windows_of_some_layers_only_match_transformers(tmp_path: Path) -> None:
    window = {"use_sliding_window": True, "sliding_window": 70, "max_window_layers": 1}
    folder = checkpoints.make(tmp_path / "m", "qwen2", **window)
    assert read_spec(folder).windows == (None, 70, 70)
    check(folder, prompt(333), alone(engine(folder, "float32"), prompt(333), WHOLE))


def test_the_old_spelling_of_rope_gives_the_same_logits(
    tmp_path: Path, checkpoint: Callable[[str], Path]
) -> None:
    folder = checkpoints.make(tmp_path / "m", "llama")
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (folder / "config.json").write_text(json.dumps(config))
    old = alone(engine(folder, "float32"), prompt(200), WHOLE)
    assert old == alone(engine(checkpoint("llama"), "float32"), prompt(200), WHOLE)


def test_an_answer_ends_with_its_stop_id(dense_or_experts: Path) -> None:
    owner = engine(dense_or_experts, "float32")
    tokens = [token.id for token in alone(owner, prompt(90), Sampling(40))]
    stop = tokens[9]
    owner.add(request(owner, "stop", prompt(90), Sampling(40, stop_ids=(stop, 3))))
    streams, outputs = drain(owner)
    assert [token.id for token in streams["stop"]] == tokens[: tokens.index(stop) + 1]
    assert outputs[-1].finish_reason == "stop"
    assert owner.scheduler.pool.used_blocks == 0


def test_an_answer_ends_at_max_tokens(dense_or_experts: Path) -> None:
    owner = engine(dense_or_experts, "float32")
    for most in (1, 2, 65):
        owner.add(request(owner, "length", prompt(63), Sampling(most)))
        streams, outputs = drain(owner)
        assert len(streams["length"]) == most
        assert [output.finish_reason for output in outputs] == [None] * (most - 1) + ["length"]


def test_a_stop_id_at_the_end_of_the_prompt_ends_nothing(model: Path) -> None:
    owner = engine(model, "float32")
    free = alone(owner, [*prompt(20), 3], Sampling(4))
    assert 3 not in [token.id for token in free]
    assert alone(owner, [*prompt(20), 3], Sampling(4, stop_ids=(3,))) == free
