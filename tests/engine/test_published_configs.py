"""What the gateway reads of a checkpoint that another engine computes, from published configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from diptych.engine.checkpoint_facts import read_facts

#: As published, less what nobody reads here. Gemma 3 leaves to its class what is a default there.
GEMMA3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16},
}
GEMMA3_12B: dict[str, Any] = GEMMA3_4B | {
    "text_config": {
        "hidden_size": 3840,
        "model_type": "gemma3_text",
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
    }
}
DEEPSEEK_V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "eos_token_id": 100001,
    "hidden_size": 2048,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 102400,
}
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "eos_token_id": 200002,
    "head_dim": 64,
    "hidden_size": 2880,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "vocab_size": 201088,
}


@pytest.mark.parametrize(
    ("config", "vocabulary", "max_positions", "token_items"),
    [
        (GEMMA3_4B, 262208, 131072, 34 * 2 * 4 * 256),
        (GEMMA3_12B, 262208, 131072, 48 * 2 * 8 * 256),
        (DEEPSEEK_V2_LITE, 102400, 163840, 27 * (512 + 64)),
        (GPT_OSS_20B, 201088, 131072, 24 * 2 * 8 * 64),
    ],
    ids=lambda value: value["architectures"][0] if isinstance(value, dict) else None,
)
def test_facts_of_published_configs(
    tmp_path: Path,
    config: dict[str, Any],
    vocabulary: int,
    max_positions: int,
    token_items: int,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = read_facts(tmp_path)
    assert facts.architecture == config["architectures"][0]
    assert facts.vocabulary == vocabulary
    assert facts.max_positions == max_positions
    assert facts.token_items == token_items
    ends = config["eos_token_id"]
    assert facts.end_ids == (tuple(ends) if isinstance(ends, list) else (ends,))
