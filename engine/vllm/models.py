"""Which checkpoints vLLM computes and workers cannot share, and what vLLM must be told for others.

Workers exchange one kind of block: the KV of `block_tokens` tokens in all layers. A model that
keeps something else of its past, or other blocks, is refused while vLLM starts, by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..errors import UnsupportedModel

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def attention_environment() -> dict[str, str]:
    """Returns what the environment must say before vLLM chooses a model's attention.

    Without AMX, vLLM computes multi-head latent attention (MLA) in blocks of 16 tokens, with
    neither chunked prefill nor a prefix cache. There it is told to keep K and V of each head.
    """
    if torch.cpu._is_amx_tile_supported():
        return {}
    return {"VLLM_MLA_DISABLE": "1"}


def check_model(config: VllmConfig, block_tokens: int, *, has_adapters: bool = False) -> None:
    """Raises UnsupportedModel if workers could not exchange what vLLM keeps of this model's past.

    Also if it `has_adapters` and vLLM computes none with it on a CPU.
    `config` is vLLM's, after it has adapted it to model and hardware, before anything is loaded.
    """
    reason = why_not(config.model_config, int(config.cache_config.block_size), block_tokens)
    if has_adapters and config.model_config.is_moe:
        reason = reason or (
            "vLLM has no kernel for a CPU that computes experts where adapters are served; leave "
            "model.adapters out, or merge an adapter into the model's weights"
        )
    if reason is not None:
        raise UnsupportedModel(f"{config.model_config.architecture} behind Diptych: {reason}")


def why_not(model: Any, vllm_block_tokens: int, block_tokens: int) -> str | None:
    """Returns why workers cannot share this model, with what to do instead, or None (pure)."""
    if model.runner_type != "generate":
        return "it generates no text; serve it with vLLM alone"
    if model.is_hybrid or model.is_attention_free:
        return (
            "some of its layers keep a state instead of KV (Mamba, linear attention, "
            "convolutions), and workers can exchange KV only; serve it with vLLM alone"
        )
    if model.is_encoder_decoder:
        return "workers cannot exchange the KV of its encoder; serve it with vLLM alone"
    if vllm_block_tokens != block_tokens:
        return (
            f"on this hardware vLLM computes it in blocks of {vllm_block_tokens} tokens only, and "
            f"model.block_tokens is {block_tokens}; set it to {vllm_block_tokens} if that is "
            "allowed, or serve the model with vLLM alone"
        )
    return None


def check_window(architecture: str, window: int | None, max_model_len: int) -> None:
    """Raises UnsupportedModel if vLLM drops KV of sequences that a worker of this length takes.

    `window` is what `internals.find_window` has found once vLLM has started.
    """
    reason = why_not_window(window, max_model_len)
    if reason is not None:
        raise UnsupportedModel(f"{architecture} behind Diptych: {reason}")


def why_not_window(window: int | None, max_model_len: int) -> str | None:
    """Returns why workers cannot share a model whose KV vLLM drops, or None (pure).

    A decode worker gets one and the same null block for all that lies before the window: what a
    prefill worker writes there overwrites itself, and no checksum holds.
    """
    if window is None or max_model_len <= window:
        return None
    if not window:
        return (
            "it is not known whether vLLM keeps the KV of all tokens in layers of this kind, and "
            "workers need all of it; serve it with vLLM alone"
        )
    return (
        f"every layer has a sliding window (or chunks of attention) of {window} tokens, and vLLM "
        f"drops the KV before it, which workers cannot exchange. They can serve sequences of at "
        f"most {window} tokens, and here one may have {max_model_len} tokens: set "
        f"model.max_model_len to {window} or less, or serve it with vLLM alone"
    )


def describe_error(error: Exception) -> str:
    """Returns what vLLM says in an error, without the list of all arguments that it may append."""
    text = str(error)
    validation_errors = getattr(error, "errors", None)  # of pydantic
    if callable(validation_errors):
        text = "; ".join(str(details["msg"]) for details in validation_errors())
    text, kernels_listed, _ = text.partition(" Candidate backends were")
    if kernels_listed:
        text += (
            " Without AMX, vLLM has few kernels for quantized experts on a CPU: take a CPU with AMX, "
            "or a copy of the checkpoint in bfloat16"
        )
    if "failed to be inspected" in text:
        text += (
            " A library that this architecture needs is missing in the engine's environment, or "
            "was built for another torch (images: torchvision), even where only text is served"
        )
    return text
