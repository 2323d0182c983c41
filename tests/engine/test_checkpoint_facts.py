"""The few facts of a checkpoint that hold whichever engine computes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from diptych.engine.checkpoint_facts import read_facts
from diptych.engine.errors import WeightsError
from diptych.engine.sizing import kv_layout
from diptych.engine.spec import read_spec

LLAMA: dict[str, Any] = {
    "architectures": ["SomethingForCausalLM"],
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 64,
    "eos_token_id": [3, 4],
}


def written(folder: Path, **changes: Any) -> Path:
    config = {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_they_agree_with_what_our_decoder_reads(model: Path) -> None:
    spec, facts = read_spec(model), read_facts(model)
    assert facts.vocabulary == spec.vocab
    assert facts.end_ids == spec.eos_ids
    assert facts.max_positions == spec.max_positions
    layout = kv_layout(spec, "bfloat16", 64)
    assert facts.token_items == layout.block_items // 64
    assert facts.pool_tokens(layout.block_bytes * 3, "bfloat16") == 3 * 64


def test_latent_attention_keeps_one_vector_for_all_heads(tmp_path: Path) -> None:
    facts = read_facts(written(tmp_path, kv_lora_rank=32, qk_rope_head_dim=8))
    assert facts.token_items == 2 * (32 + 8)


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config"])
def test_a_multimodal_checkpoint_has_them_one_level_down(tmp_path: Path, key: str) -> None:
    whole = {"architectures": ["SeesForCausalLM"], "text_config": None, key: LLAMA}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    facts = read_facts(tmp_path)
    assert (facts.architecture, facts.vocabulary) == ("SeesForCausalLM", 100)
    assert facts.end_ids == (3, 4)


def test_a_fact_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="vocab_size"):
        read_facts(written(tmp_path, vocab_size=None))


@pytest.mark.parametrize("size", ["null", '"many"'])
def test_a_size_that_is_no_number_is_refused(tmp_path: Path, size: str) -> None:
    text = json.dumps({**LLAMA, "vocab_size": 0}).replace(
        '"vocab_size": 0', f'"vocab_size": {size}'
    )
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(WeightsError, match="a size that is none"):
        read_facts(tmp_path)


def test_a_folder_of_anything_else_is_no_checkpoint(
    tmp_path: Path, checkpoint: Callable[[str], Path]
) -> None:
    with pytest.raises(WeightsError, match="not a checkpoint"):
        read_facts(tmp_path)
