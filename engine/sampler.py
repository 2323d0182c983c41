"""Next tokens from logits. A token is a function of (logits, parameters, seed, position) alone."""

from __future__ import annotations

import numpy as np
import torch

from ..protos.frames import Sampling, Token


def gumbel(seed: int, position: int, count: int) -> torch.Tensor:
    """[count] Gumbel noise of one draw: Philox keyed by (seed, position), no state to carry."""
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF, position], np.uint64)
    uniform = np.random.Generator(np.random.Philox(key=key)).random(count)
    return torch.from_numpy(-np.log(-np.log(np.clip(uniform, 1e-300, None))))


def sample(logits: torch.Tensor, sampling: Sampling, position: int) -> Token:
    """One token from float32 logits [vocab]; `position` is the index that it gets in the ids.

    Greedy at temperature 0; else argmax(logits / temperature + Gumbel noise), which is a draw from
    the softmax (Gumbel-max). Logprobs are of the model's distribution (temperature 1).
    """
    if sampling.temperature == 0:
        chosen = int(logits.argmax())
    else:
        noise = gumbel(sampling.seed, position, logits.shape[0])
        chosen = int((logits.double() / sampling.temperature + noise).argmax())
    if sampling.logprobs is None:
        return Token(chosen)
    logprobs = torch.log_softmax(logits, dim=-1)
    values, ids = logprobs.topk(min(sampling.logprobs, logprobs.shape[0]))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return Token(chosen, float(logprobs[chosen]), top)
