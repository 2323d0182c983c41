"""What a step cannot be faster than, and what facts of the field predict for it (pure).

Floors are of a dense Llama-like model: bytes read once at the copy bandwidth, or products at the
matmul rate, whichever takes longer, plus the KV that decode reads. Predictions were written down
before any kernel here had run on a GPU; they are for an H200 at 4.3 TB/s and 790 TFLOP/s.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..spec import ModelSpec, RopeSpec

LLAMA_3_8B = ModelSpec(
    architecture="llama",
    vocab=128_256,
    hidden=4096,
    intermediate=14_336,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    norm_eps=1e-5,
    rope=RopeSpec(theta=500_000.0),
    max_positions=8192 + 256,
    tied=False,
    qkv_bias=False,
    output_bias=False,
    qk_norm=False,
    windows=(None,) * 32,
    eos_ids=(),
    dtype="bfloat16",
)
#: (batch, context) -> predicted milliseconds of a decode step, Llama-3-8B bf16 on an H200
PREDICTED_MS = {
    (1, 1024): 4.3,
    (8, 1024): 4.5,
    (32, 1024): 5.4,
    (128, 1024): 9.6,
    (256, 1024): 16.8,
    (32, 4096): 8.9,
}
#: prompt -> predicted tokens per second of its prefill, in one chunk
PREDICTED_TOKENS_S = {2048: 41_000, 8192: 36_800}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured in the same run. `copy`: bytes per second, read plus written."""

    copy: float
    matmul: float  #: FLOP per second of bf16 products


@dataclass(frozen=True, slots=True)
class Cost:
    """What a step must move and multiply at least."""

    weight_bytes: float
    kv_bytes: float
    flops: float

    def floor_s(self, ceilings: Ceilings) -> float:
        products = max(self.weight_bytes / ceilings.copy, self.flops / ceilings.matmul)
        return products + self.kv_bytes / ceilings.copy


def _linear(spec: ModelSpec) -> int:
    """Weights of the layers' matrices (without embedding and head)."""
    attention = spec.hidden * spec.head_dim * (spec.heads + spec.kv_heads) * 2
    return spec.layers * (attention + 3 * spec.hidden * spec.intermediate)


def kv_token_bytes(spec: ModelSpec, item: int = 2) -> int:
    return spec.layers * 2 * spec.kv_heads * spec.head_dim * item


def decode_cost(
    spec: ModelSpec, batch: int, context: int, weight_item: int = 2, kv_item: int = 2
) -> Cost:
    """A step of `batch` rows over `context` keys each. The head stays in 2 bytes."""
    linear, head = _linear(spec), spec.hidden * spec.vocab
    attention = 4 * spec.layers * spec.heads * spec.head_dim * context
    return Cost(
        linear * weight_item + head * 2,
        batch * context * kv_token_bytes(spec, kv_item),
        batch * (2 * (linear + head) + attention),
    )


def prefill_flops(spec: ModelSpec, tokens: int) -> float:
    """Products and causal attention of a prompt in one chunk, logits of its last token."""
    attention = 2 * spec.layers * spec.heads * spec.head_dim * tokens * (tokens + 1)
    return 2.0 * _linear(spec) * tokens + attention + 2 * spec.hidden * spec.vocab


def table(rows: list[list[str]]) -> str:
    """Markdown; the first row is the header."""
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
