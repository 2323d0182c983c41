"""One decoder for every supported architecture, driven by `ModelSpec`.

All supported models are stacks of the same layer: attention with rotary positions, then an MLP or a
mixture of experts, each behind an RMSNorm and each added to the rows that go through the layers.
What differs (biases, norms of queries and keys, windows, experts) is in the spec and the weights.

To add an architecture of this form, add a line to `spec.ARCHITECTURES`; docs/extending.md has an
example. `loader.py` reads tensors by the names that Llama's have. `tests/engine/test_golden.py`
then compares the logits with transformers'.

In shapes, T is the number of rows of a step, and D is the size of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .attention import StepRows
from .ops import LinearLayer, Ops, RmsNorm
from .pool import KVPool
from .rope import rope_frequencies
from .spec import ModelSpec

#: Takes hidden rows [T, hidden] and the norm before the block; gives the hidden rows plus what the
#: block adds to them, [T, hidden]. `Mlp` and `moe.MixtureOfExperts` are such blocks.
FeedForward = Callable[[torch.Tensor, RmsNorm], torch.Tensor]


@dataclass(slots=True)
class Mlp:
    """The block `hidden + down(silu(gate) * up)`, gates and `up` of the normed hidden rows."""

    gate_up: LinearLayer  #: Both matrices fused along the outputs; the layer applies SiLU itself.
    down: LinearLayer  #: From the gated values back to hidden rows.
    rows_at_once: int | None = None  #: Rows computed together, at most; None: all (`Ops`).

    def __call__(self, hidden: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
        """Return the block's result, [T, hidden], of `hidden` rows [T, hidden]."""
        if self.rows_at_once is None or len(hidden) <= self.rows_at_once:
            return self._compute(hidden, norm)
        pieces = hidden.tensor_split(-(-len(hidden) // self.rows_at_once))
        return torch.cat([self._compute(piece, norm) for piece in pieces])

    def _compute(self, hidden: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
        return self.down(self.gate_up(hidden, norm=norm), residual=hidden)


@dataclass(slots=True)
class DecoderLayer:
    """The weights of one layer."""

    norm: RmsNorm  #: Before attention.
    qkv: LinearLayer  #: The matrices of queries, keys and values, fused along the outputs.
    qk_norms: tuple[RmsNorm, RmsNorm] | None  #: Of queries and of keys, each of size D.
    output: LinearLayer  #: From what attention gives back to hidden rows.
    mlp_norm: RmsNorm  #: Before the MLP or the experts.
    mlp: FeedForward


@dataclass(slots=True)
class DecoderWeights:
    """All weights of a model, or one rank's share of them."""

    embedding: torch.Tensor  #: [vocab, hidden] in the model's dtype.
    layers: list[DecoderLayer]
    norm: RmsNorm  #: Behind the last layer.
    head: LinearLayer  #: From hidden rows to logits.


class Decoder:
    """The forward pass over a step's rows.

    K and V of the rows go to their slots in `pool`, where attention reads them. `spec` and
    `weights` are the model's, or one rank's share of it; `ops` are the hardware's operations.
    """

    def __init__(self, spec: ModelSpec, weights: DecoderWeights, pool: KVPool, ops: Ops) -> None:
        self.spec = spec
        self.weights = weights
        self.pool = pool
        self.ops = ops
        self._frequencies = ops.keep(rope_frequencies(spec.rope, spec.head_dim))
        self._scale = spec.head_dim**-0.5

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits, float32 [rows, vocab], of rows of what `hidden()` gave.

        `rows` are int64 indices; None stands for all rows.
        """
        if rows is not None:
            hidden = hidden[self.ops.place_indices(rows)]
        return self.weights.head(hidden, norm=self.weights.norm).float()

    @torch.inference_mode()
    def hidden(
        self,
        token_ids: torch.Tensor,
        step: StepRows,
        layer_written: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Return what the last layer gives, [T, hidden], of `token_ids` int64 [T].

        The KV of the rows is written to the pool. `layer_written` is called with the index of each
        layer whose KV is written on all ranks.
        """
        token_ids, step = self.ops.place(token_ids, step)
        hidden = self.weights.embedding[token_ids]
        angles = self._rotations(step.positions)
        for index, layer in enumerate(self.weights.layers):
            cache = self.pool.layer(index)
            qkv = layer.qkv(hidden, norm=layer.norm)
            queries = self.ops.rope_store(
                qkv, cache, norms=layer.qk_norms, angles=angles, step=step
            )
            attended = self.ops.attend(
                queries, cache, step, scale=self._scale, window=self.spec.windows[index]
            )
            # ranks add up their parts in here, so all of them have written the layer's KV
            hidden = layer.output(attended.flatten(1), residual=hidden)
            if layer_written:
                layer_written(index)
            hidden = layer.mlp(hidden, layer.mlp_norm)
        return hidden

    def _rotations(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and sines of the rotary embedding, float32 [T, D / 2]."""
        angles = positions[:, None].float() * self._frequencies
        factor = self.spec.rope.attention_factor
        return angles.cos() * factor, angles.sin() * factor
