"""Loads a checkpoint: its tensors become `DecoderWeights`, one by one, fused and packed.

Fused are matrices that read the same rows, so that they take one product. Packed are weights in the
order in which the backend's kernels read them.

Where ranks share the model, each one cuts its part out of a tensor as it is read: along the outputs
of the first matrix of a block, and along the inputs of the second, whose results the ranks add up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from .collectives import Collectives
from .decoder import DecoderLayer, DecoderWeights, FeedForward, Mlp
from .engine_like import ReportProgress
from .linear import ShardedLinear, make_linear
from .moe import MixtureOfExperts, SequentialExperts
from .ops import LinearLayer, Ops, RmsNorm
from .spec import ExpertsSpec, ModelSpec
from .tensors import CheckpointTensors

HEAD = "lm_head.weight"  #: the tensor that makes logits of hidden rows


@dataclass(frozen=True, slots=True)
class MlpNames:
    """What a checkpoint calls the three matrices of a gated MLP."""

    gate: str
    up: str
    down: str


#: The names in Llama's checkpoints and most others, and in Mixtral's.
USUAL_MLP = MlpNames("gate_proj", "up_proj", "down_proj")
MIXTRAL_MLP = MlpNames("w1", "w3", "w2")


def load_weights(
    folder: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    ops: Ops,
    progress: ReportProgress | None = None,
    collectives: Collectives | None = None,
) -> DecoderWeights:
    """Loads a checkpoint, or a rank's share of it; `spec` is the whole model's.

    `dtype` is what the decoder computes in, `ops` what packs and places the weights. `progress` is
    called after each layer with a text and the share that is loaded. `collectives` say which share
    is this rank's; None: all is.

    Raises WeightsError (a tensor is missing or has another shape) and UnsupportedModel (there is
    one that this model has no place for, or of another type).
    """
    tensors = CheckpointTensors(folder, dtype, spec.fp8)
    embedding = ops.keep(tensors.take("model.embed_tokens.weight", spec.vocab, spec.hidden))
    loader = _WeightLoader(tensors, spec, ops, collectives)
    layers = []
    for index in range(spec.layers):
        layers.append(loader.layer(index))
        tensors.release()  # all that was taken is copied, so the files need not stay in memory
        if progress:
            progress(f"layer {index + 1}/{spec.layers}", (index + 1) / spec.layers)
    head = loader.head(embedding)
    norm = loader.norm("model.norm.weight", spec.hidden)
    tensors.check_all_taken()
    return DecoderWeights(embedding, layers, norm, head)


@dataclass(frozen=True, slots=True)
class _WeightLoader:
    """Makes the parts of the decoder, with this rank's share of each tensor."""

    tensors: CheckpointTensors
    spec: ModelSpec
    ops: Ops
    collectives: Collectives | None

    def layer(self, index: int) -> DecoderLayer:
        """Returns the layer at `index`.

        Of a block's last matrix each rank has a share of the inputs, and the ranks' results are
        summed. Of the other matrices it has a share of the outputs.
        """
        spec = self.spec
        prefix = f"model.layers.{index}."
        attention = prefix + "self_attn."
        output_bias = attention + "o_proj.bias" if spec.output_bias else None
        return DecoderLayer(
            norm=self.norm(prefix + "input_layernorm.weight", spec.hidden),
            qkv=self._qkv(attention),
            qk_norms=self._qk_norms(attention) if spec.qk_norm else None,
            output=self._summed_linear(
                attention + "o_proj", spec.hidden, spec.heads * spec.head_dim, output_bias
            ),
            mlp_norm=self.norm(prefix + "post_attention_layernorm.weight", spec.hidden),
            mlp=self._feed_forward(index, prefix),
        )

    def head(self, embedding: torch.Tensor) -> LinearLayer:
        """Returns the layer that gives logits; each rank computes its part of the vocabulary."""
        # what is on disk counts even if the config says tied, as in transformers
        tied = self.spec.tied and HEAD not in self.tensors
        weight = embedding
        if not tied:
            weight = self.tensors.take(HEAD, self.spec.vocab, self.spec.hidden)
        if self.collectives is None:
            return make_linear(weight, ops=self.ops, precise=True)
        part = make_linear(self.collectives.part(weight, 0), ops=self.ops, precise=True)
        return ShardedLinear(part, self.collectives.join)

    def norm(self, name: str, size: int) -> RmsNorm:
        """Returns the norm whose weight, [size], the checkpoint calls `name`."""
        return RmsNorm(self.ops.keep(self._take(name, size)), self.spec.norm_eps)

    def _take(self, name: str, *shape: int, split: int | None = None) -> torch.Tensor:
        """Returns a tensor of the checkpoint, or this rank's part of it along dimension `split`."""
        tensor = self.tensors.take(name, *shape)
        if self.collectives is None or split is None:
            return tensor
        return self.collectives.part(tensor, split)

    def _qkv(self, attention: str) -> LinearLayer:
        spec = self.spec
        query_size = spec.heads * spec.head_dim
        kv_size = spec.kv_heads * spec.head_dim
        sizes = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        weights = [
            self._take(f"{attention}{name}.weight", size, spec.hidden, split=0)
            for name, size in sizes.items()
        ]
        bias = None
        if spec.qkv_bias:
            biases = [
                self._take(f"{attention}{name}.bias", size, split=0) for name, size in sizes.items()
            ]
            bias = torch.cat(biases)
        return make_linear(torch.cat(weights), bias, ops=self.ops)

    def _qk_norms(self, attention: str) -> tuple[RmsNorm, RmsNorm]:
        size = self.spec.head_dim
        return (
            self.norm(attention + "q_norm.weight", size),
            self.norm(attention + "k_norm.weight", size),
        )

    def _summed_linear(
        self, name: str, outputs: int, inputs: int, bias_name: str | None = None
    ) -> LinearLayer:
        """Returns a linear layer whose inputs the ranks share; only rank 0 adds the bias."""
        weight = self._take(name + ".weight", outputs, inputs, split=1)
        bias = self._take(bias_name, outputs) if bias_name else None
        if self.collectives is None:
            return make_linear(weight, bias, ops=self.ops)
        if self.collectives.rank > 0:
            bias = None
        return ShardedLinear(make_linear(weight, bias, ops=self.ops), self.collectives.sum)

    def _feed_forward(self, index: int, prefix: str) -> FeedForward:
        experts = self.spec.experts
        if experts is None or not experts.layers[index]:
            return self._mlp(prefix + "mlp", USUAL_MLP, self.spec.intermediate)
        if self.spec.architecture == "mixtral":
            return self._mixture(prefix + "block_sparse_moe", MIXTRAL_MLP, experts)
        return self._mixture(prefix + "mlp", USUAL_MLP, experts)

    def _mixture(self, block: str, names: MlpNames, experts: ExpertsSpec) -> MixtureOfExperts:
        """Returns a mixture of experts: by the backend's own kernels, or one expert after the other.

        The router is small, and the choice of experts hangs on its last bits, so it is precise.
        """
        router = self._take(f"{block}.gate.weight", experts.count, self.spec.hidden)
        places = [f"{block}.experts.{number}" for number in range(experts.count)]
        size = experts.intermediate

        def fused_and_down() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for place in places:
                down = f"{place}.{names.down}.weight"
                yield (
                    self._gate_up(place, names, size),
                    self._take(down, self.spec.hidden, size, split=1),
                )

        combine = self.collectives.sum if self.collectives else None
        computed = self.ops.experts(experts.count, fused_and_down(), combine)
        if computed is None:
            computed = SequentialExperts([self._mlp(place, names, size) for place in places])
        return MixtureOfExperts(
            router=make_linear(router, ops=self.ops, precise=True),
            experts=computed,
            experts_per_token=experts.experts_per_token,
            renormalize=experts.renormalize,
            ops=self.ops,
        )

    def _mlp(self, place: str, names: MlpNames, size: int) -> Mlp:
        gate_up = make_linear(self._gate_up(place, names, size), gated=True, ops=self.ops)
        down = self._summed_linear(f"{place}.{names.down}", self.spec.hidden, size)
        return Mlp(gate_up, down, rows_at_once=self.ops.mlp_rows)

    def _gate_up(self, place: str, names: MlpNames, size: int) -> torch.Tensor:
        """Returns the first two matrices of an MLP, fused along the outputs."""
        weights = [
            self._take(f"{place}.{name}.weight", size, self.spec.hidden, split=0)
            for name in (names.gate, names.up)
        ]
        return torch.cat(weights)
