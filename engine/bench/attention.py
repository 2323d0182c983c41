"""Decode attention alone against a bare read of its KV: python -m diptych.engine.bench.attention

The shapes of the 205M model at batch 64 and 1,024 tokens of context; both in turn, best of some.
Twice: with the KV of all layers, from memory, and with two blocks again and again, from a cache.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from ...kv_transfer import KVLayout
from ..attention import Meta, Piece
from ..kernels import PAGE, native_ops
from ..pool import KVPool

LAYERS, HEADS, KV_HEADS, DIM = 16, 16, 8, 64
BATCH, CONTEXT = 64, 1024
ROUNDS = 7


def where(tables: list[list[int]]) -> Meta:
    """A row of each sequence, the last of its context."""
    none = torch.empty(0)
    rows = [Piece(row, 1, CONTEXT - 1, table, True) for row, table in enumerate(tables)]
    return Meta(none, none, none, rows)


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@torch.inference_mode()
def main() -> None:
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    ops, pages = native_ops(DIM, threads), CONTEXT // PAGE
    layout = KVLayout(LAYERS, KV_HEADS, DIM, PAGE, 2, "bfloat16", 1)
    pool = KVPool(layout, 1 + BATCH * pages, torch.bfloat16)
    memory = torch.frombuffer(pool.view, dtype=torch.bfloat16)[layout.block_items :]
    memory.normal_()
    numbers = memory.view(torch.float32)
    q = torch.randn(BATCH, HEADS, DIM).bfloat16()
    apart = where([[1 + row * pages + page for page in range(pages)] for row in range(BATCH)])
    same = where([[1 + page % 2 for page in range(pages)] for _ in range(BATCH)])

    def attend(meta: Meta, layers: list[int]) -> None:
        for layer in layers:
            ops.attend(q, pool.layer(layer), meta, DIM**-0.5, None)

    works: dict[str, Callable[[], object]] = {
        "bare read": numbers.sum,
        "attention": lambda: attend(apart, list(range(LAYERS))),
        "attention, KV in a cache": lambda: attend(same, [0] * LAYERS),
    }
    best = dict.fromkeys(works, float("inf"))
    for _ in range(ROUNDS):
        for name, work in works.items():
            best[name] = min(best[name], seconds(work))
    for name, took in best.items():
        print(f"{name:26} {took * 1e3:6.1f} ms {memory.nbytes / took / 1e9:6.1f} GB/s")


if __name__ == "__main__":
    main()
