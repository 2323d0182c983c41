"""Decode attention alone against a bare read of its KV: python -m diptych.engine.bench.attention

The shapes are those of the 205M model at batch 64 and 1,024 tokens of context. Attention is timed
twice: over the KV of all layers, from memory, and over the same two blocks again and again, from a
cache. All loads take turns, and the best of ROUNDS counts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from ...kv_transfer import KVLayout
from ..attention import RowSpan, StepRows
from ..kernels import KERNEL_BLOCK_TOKENS, native_ops
from ..pool import KVPool

#: The shapes of the 205M model, as the module says.
LAYERS = 16
HEADS = 16  #: Of queries.
KV_HEADS = 8
HEAD_DIM = 64
BATCH = 64
CONTEXT = 1024  #: Tokens of each sequence. All KV is 2 GiB then: far more than any cache.
ROUNDS = 7  #: Enough that one of them is disturbed by nothing.


def last_rows(block_tables: list[list[int]]) -> StepRows:
    """Return a decoding row of each sequence, the last of its context."""
    unused = torch.empty(0)  # attention reads the spans alone
    spans = [
        RowSpan(
            first_row=row, row_count=1, first_position=CONTEXT - 1, blocks=table, is_decode=True
        )
        for row, table in enumerate(block_tables)
    ]
    return StepRows(unused, unused, unused, spans)


def seconds(call: Callable[[], object]) -> float:
    """Return how long one call takes."""
    started_at = time.perf_counter()
    call()
    return time.perf_counter() - started_at


@torch.inference_mode()
def main() -> None:
    """Print milliseconds and GB/s of each load."""
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    ops = native_ops(HEAD_DIM, threads)
    blocks_per_row = CONTEXT // KERNEL_BLOCK_TOKENS
    layout = KVLayout(
        layers=LAYERS,
        heads=KV_HEADS,
        head_dim=HEAD_DIM,
        block_tokens=KERNEL_BLOCK_TOKENS,
        item_bytes=2,
        dtype="bfloat16",
        group_layers=1,  # a block holds layer 0's K and V, then layer 1's, and so on
    )
    pool = KVPool(layout, 1 + BATCH * blocks_per_row, torch.bfloat16)
    kv = torch.frombuffer(pool.view, dtype=torch.bfloat16)[layout.block_items :]  # behind block 0
    kv.normal_()
    kv_as_float32 = kv.view(torch.float32)
    queries = torch.randn(BATCH, HEADS, HEAD_DIM).bfloat16()
    own_blocks = last_rows(
        [[1 + row * blocks_per_row + i for i in range(blocks_per_row)] for row in range(BATCH)]
    )
    same_blocks = last_rows([[1 + i % 2 for i in range(blocks_per_row)] for _ in range(BATCH)])

    def attend(step: StepRows, layers: list[int]) -> None:
        for layer in layers:
            ops.attend(queries, pool.layer(layer), step, scale=HEAD_DIM**-0.5, window=None)

    loads: dict[str, Callable[[], object]] = {
        "bare read": kv_as_float32.sum,
        "attention": lambda: attend(own_blocks, list(range(LAYERS))),
        "attention, KV in a cache": lambda: attend(same_blocks, [0] * LAYERS),
    }
    best_s = dict.fromkeys(loads, float("inf"))
    for _ in range(ROUNDS):
        for name, load in loads.items():
            best_s[name] = min(best_s[name], seconds(load))
    for name, load_s in best_s.items():
        print(f"{name:26} {load_s * 1e3:6.1f} ms {kv.nbytes / load_s / 1e9:6.1f} GB/s")


if __name__ == "__main__":
    main()
