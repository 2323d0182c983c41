"""The start-up check of exactness: do a row's bits depend on the rows beside it, here?

An answer's tokens are a function of its ids, parameters and seed only if they do not. A backend
claims so; this check tries it on this machine, with this model, before the first request.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from .attention import RowSpan, StepRows
from .decoder import Decoder
from .model import RankModel

EXTRA_TOKENS = 6  #: the text is this much longer than a block, so that rows read a second block
ID_STRIDE = 7919  #: a prime, so that the ids of the text differ


@torch.inference_mode()
def is_exact(model: RankModel, block_tokens: int) -> bool:
    """Computes a text whole, in chunks and row by row: True if all bits are the same, KV too.

    A single rank computes only the first layer, to be quick: all layers have the same kernels.
    Ranks that share the model have to compute all of it together. The KV goes to blocks 0 and 1 of
    the pool, which must not be in use. Blocks have at least 55 tokens.
    """
    tokens = block_tokens + EXTRA_TOKENS
    token_ids = torch.arange(tokens) * ID_STRIDE % model.spec.vocab
    expected = _run_in_chunks(model, block_tokens, token_ids, [tokens])
    chunkings = [
        [block_tokens, EXTRA_TOKENS],  # cut at the block's border
        [40, 1, 20] + [1] * (tokens - 61),  # cut elsewhere; prefill and decode take turns
        [1] * tokens,
    ]
    for counts in chunkings:
        chunked = _run_in_chunks(model, block_tokens, token_ids, counts)
        if not all(torch.equal(a, b) for a, b in zip(expected, chunked, strict=True)):
            return False
    return True


def _run_in_chunks(
    model: RankModel, block_tokens: int, token_ids: torch.Tensor, counts: list[int]
) -> list[torch.Tensor]:
    """Return the text's hidden states, its last logits, and its K and V in the first layer."""
    decoder = model if model.collectives else _first_layer(model.decoder)
    table = [0, 1]
    hidden_parts: list[torch.Tensor] = []
    start = 0
    for count in counts:
        positions = torch.arange(start, start + count)
        used_table = table[: -(-(start + count) // block_tokens)]
        span = RowSpan(
            first_row=0,
            row_count=count,
            first_position=start,
            blocks=used_table,
            is_decode=count == 1,
        )
        step = StepRows(positions, positions // block_tokens, positions % block_tokens, [span])
        hidden_parts.append(decoder.hidden(token_ids[positions], step))
        start += count
    logits = decoder.logits(hidden_parts[-1], torch.tensor([counts[-1] - 1]))
    cache = [part[: len(table)] for part in model.kv.layer(0)]
    result = [torch.cat(hidden_parts), logits, *(part.clone() for part in cache)]
    for part in cache:
        part.zero_()
    return result


def _first_layer(decoder: Decoder) -> Decoder:
    """Return a decoder of only the first layer, which shares all else with `decoder`."""
    weights = replace(decoder.weights, layers=decoder.weights.layers[:1])
    return Decoder(decoder.spec, weights, decoder.pool, decoder.ops)
