"""The start-up check of exactness: do a row's bits depend on the rows beside it, here?"""

from __future__ import annotations

from dataclasses import replace

import torch

from .attention import Meta, Piece
from .decoder import Decoder
from .model import Model


@torch.inference_mode()
def is_exact(model: Model, block_tokens: int) -> bool:
    """Runs a text whole, in chunks and row by row: the same bits everywhere, KV too?

    On one rank just the first layer. Uses the pool's first blocks, which must not be in use.
    """
    shallow = model if model.ranks else _first_layer(model.decoder)
    tokens, blocks = block_tokens + 6, [0, 1]
    ids = torch.arange(tokens) * 7919 % model.spec.vocab

    def run(*counts: int) -> list[torch.Tensor]:
        parts, start = [], 0
        for count in counts:
            at = torch.arange(start, start + count)
            table = blocks[: -(-(start + count) // block_tokens)]
            piece = Piece(0, count, start, table, count == 1)
            meta = Meta(at, at // block_tokens, at % block_tokens, [piece])
            parts.append(shallow.hidden(ids[at], meta))
            start += count
        cache = [part[: len(blocks)] for part in model.kv.layer(0)]
        last = shallow.logits(parts[-1], torch.tensor([counts[-1] - 1]))
        result = [torch.cat(parts), last, *(p.clone() for p in cache)]
        for part in cache:
            part.zero_()
        return result

    whole = run(tokens)
    others = run(block_tokens, 6), run(40, 1, 20, *[1] * (tokens - 61)), run(*[1] * tokens)
    return all(torch.equal(a, b) for one in others for a, b in zip(whole, one, strict=True))


def _first_layer(decoder: Decoder) -> Decoder:
    weights = replace(decoder.weights, layers=decoder.weights.layers[:1])
    return Decoder(decoder.spec, weights, decoder.pool, decoder.ops)
