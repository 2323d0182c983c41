"""Lower bounds of a step's time, its floors, and what was predicted for it (pure).

A floor is what a step cannot be faster than if matrices and attention take turns. Floors are of a
dense Llama-like model. That of the matrices is reading them once (at the copy bandwidth) or their
products (at the matmul rate), whichever takes longer; that of attention is reading the KV or its
products. A product and its addition are two FLOPs.

Predictions were written down before any kernel here had run on a GPU; they are for an H200
at 4.3 TB/s and 790 TFLOP/s.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..spec import ModelSpec, RopeSpec

#: The model of the predictions. Its own limit is 8192 positions; 256 more leave room for tokens
#: behind a prompt of that length.
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
#: (batch, context) -> predicted milliseconds of a decode step, Llama-3-8B bf16 on an H200.
PREDICTED_MS = {
    (1, 1024): 4.3,
    (8, 1024): 4.5,
    (32, 1024): 5.4,
    (128, 1024): 9.6,
    (256, 1024): 16.8,
    (32, 4096): 8.9,
}

#: prompt tokens -> predicted tokens per second of its prefill in one chunk, same model and GPU.
PREDICTED_TOKENS_S = {2048: 41_000, 8192: 36_800}


@dataclass(frozen=True, slots=True)
class DeviceCeilings:
    """What the device can do at most, measured in the same run."""

    copy_bytes_s: float  #: Bytes per second of a copy, read plus written.
    matmul_flops_s: float  #: Floating-point operations per second of bf16 products.


@dataclass(frozen=True, slots=True)
class StepFloor:
    """What a step must move and multiply at least."""

    weight_bytes: float  #: Of all matrices that the step multiplies by, read once.
    kv_bytes: float  #: Of the K and V that all rows attend to, read once.
    matrix_flops: float  #: Of all rows' products with the matrices.
    attention_flops: float  #: Of all rows' scores, and of the sums of the values.

    def seconds(self, ceilings: DeviceCeilings) -> float:
        """Return max(weights / copy, products / matmul) + max(KV / copy, attention / matmul).

        Reading overlaps with the products of what is read. Matrices and attention take turns, as
        each needs the result of the other.
        """
        weights_s = self.weight_bytes / ceilings.copy_bytes_s
        products_s = self.matrix_flops / ceilings.matmul_flops_s
        kv_s = self.kv_bytes / ceilings.copy_bytes_s
        attention_s = self.attention_flops / ceilings.matmul_flops_s
        return max(weights_s, products_s) + max(kv_s, attention_s)


def _layer_weights(spec: ModelSpec) -> int:
    """Return how many weights all layers' matrices have, without embedding and head.

    The matrices of queries and outputs span all heads, those of keys and values the KV heads; the
    MLP has three matrices.
    """
    attention = spec.hidden * spec.head_dim * (spec.heads + spec.kv_heads) * 2
    return spec.layers * (attention + 3 * spec.hidden * spec.intermediate)


def kv_token_bytes(spec: ModelSpec, number_bytes: int = 2) -> int:
    """Return the bytes of a token's K and V in all layers, of `number_bytes` a number."""
    return spec.layers * 2 * spec.kv_heads * spec.head_dim * number_bytes


def decode_floor(
    spec: ModelSpec,
    batch: int,
    context: int,
    *,
    weight_number_bytes: int = 2,
    kv_number_bytes: int = 2,
) -> StepFloor:
    """Return the floor of a step of `batch` rows over `context` keys each.

    The head stays in 2 bytes a number whatever the other weights have.
    """
    layers = _layer_weights(spec)
    head = spec.hidden * spec.vocab
    # Of one row: scores with the keys, and the sum of the values.
    attention = 4 * spec.layers * spec.heads * spec.head_dim * context
    return StepFloor(
        weight_bytes=layers * weight_number_bytes + head * 2,
        kv_bytes=batch * context * kv_token_bytes(spec, kv_number_bytes),
        matrix_flops=batch * 2 * (layers + head),
        attention_flops=batch * attention,
    )


def prefill_flops(spec: ModelSpec, tokens: int) -> float:
    """Return the FLOPs of a prompt in one chunk: products, causal attention, one row of logits."""
    # A row attends to itself and those before: half of the pairs, each 4 FLOPs a number.
    attention = 2 * spec.layers * spec.heads * spec.head_dim * tokens * (tokens + 1)
    return 2.0 * _layer_weights(spec) * tokens + attention + 2 * spec.hidden * spec.vocab
