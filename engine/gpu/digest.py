"""Checksums of a KV pool where its bytes are: one kernel for all tiles of a chunk.

The numbers are those of `kv_transfer.vram.words_digest`. A chunk costs three launches, however many
tiles and runs it has: a table of them to the device, the kernel, the sums back into pinned memory.

They run on a stream of their own, beside the engine's, and no thread waits for them: whoever wants
the sums looks whether they are there. They need not wait for the engine's stream either. The host
names blocks to a transfer only when it has seen their KV computed (`LayerCallbacks` while a step
runs, the engine's `_wait_for_device` otherwise), and what a peer wrote is there when its note is.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from ...kv_transfer.digests import DigestRequest
from ...kv_transfer.vram import GOLDEN, MIX, WORD_BYTES, WORD_MASK
from .layer_events import DeviceEvent

#: Words (of 8 bytes) that one program, Triton's unit of parallel work, sums up.
SEGMENT = 2048

#: Of the stream of checksums: a chunk is sent when its sums are there, so their few programs go
#: before the thousands of an engine's step.
HIGH_PRIORITY = -1


@triton.jit
def _digest(
    words, table, tile_count, run_count, unit_words,
    GOLDEN: tl.constexpr, MIX: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """Add the mixed words of a segment of a run of a tile to the tile's sum.

    The grid is (segments of the longest run, runs, tiles). `table` is that of `pack_request`.
    """
    segment = tl.program_id(0)
    run = tl.program_id(1)
    tile = tl.program_id(2)
    first_unit = tl.load(table + tile_count + tile)
    seed = tl.load(table + 2 * tile_count + tile)
    runs = table + 3 * tile_count
    run_unit = tl.load(runs + run)
    words_before = tl.load(runs + run_count + run)
    word_count = tl.load(runs + 2 * run_count + run)
    index = segment * SEGMENT + tl.arange(0, SEGMENT)
    inside = index < word_count
    word = tl.load(words + (first_unit + run_unit) * unit_words + index, mask=inside, other=0)
    place = words_before + 1 + index
    mixed = (word ^ (place * GOLDEN + seed)) * MIX
    mixed = (mixed ^ (mixed >> 29)) * GOLDEN
    mixed = tl.where(inside, mixed ^ (mixed >> 32), 0)
    tl.atomic_add(table + tile, tl.sum(mixed, 0))


def pack_request(request: DigestRequest) -> np.ndarray:
    """Return the table that the kernel reads, int64.

    It has for each tile: its sum, 0 at first; its first unit; its seed. Then for each run: its unit
    behind the tile's first one, the words of the runs before it, and its words.
    """
    unit_words = request.unit_bytes // WORD_BYTES
    first_units = np.array(request.first_units, np.int64)
    seeds = np.array([seed & WORD_MASK for seed in request.seeds], np.uint64).view(np.int64)
    run_units, unit_counts = np.array(request.runs, np.int64).T
    word_counts = unit_counts * unit_words
    words_before = np.cumsum(word_counts) - word_counts
    sums = np.zeros_like(first_units)
    return np.concatenate([sums, first_units, seeds, run_units, words_before, word_counts])


class DeviceDigests:
    """The checksums of one request, on their way to the host (`digests.StartedDigests`)."""

    def __init__(self, sums: torch.Tensor, done: DeviceEvent | None, used: tuple[Any, ...]) -> None:
        """`sums` are the host's, which the device writes before `done`; None: they are there.

        `used` is memory that the device reads until then.
        """
        self._sums = sums
        self._done = done
        self._used = used

    def poll(self) -> list[int] | None:
        if self._done is not None and not self._done.query():
            return None
        self._used = ()
        return [value & WORD_MASK for value in self._sums.tolist()]


class DeviceDigester:
    """Computes checksums of `memory`, the pool's bytes (`digests.Digester`).

    One thread owns it: that of the transfers.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._words = memory.view(torch.int64)
        self._device = memory.device
        self._on_gpu = memory.device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None  #: Made by the thread that uses it.

    def start(self, request: DigestRequest) -> DeviceDigests:
        if self._on_gpu and self._stream is None:
            self._stream = torch.cuda.Stream(self._device, priority=HIGH_PRIORITY)
        host_table = self._pinned(torch.from_numpy(pack_request(request)))
        tile_count = len(request.seeds)
        run_count = len(request.runs)
        unit_words = request.unit_bytes // WORD_BYTES
        longest_run = max(count for _, count in request.runs) * unit_words
        grid = (triton.cdiv(longest_run, SEGMENT), run_count, tile_count)
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            table = torch.empty(host_table.shape, dtype=torch.int64, device=self._device)
            table.copy_(host_table, non_blocking=True)
            _digest[grid](
                self._words,
                table,
                tile_count=tile_count,
                run_count=run_count,
                unit_words=unit_words,
                GOLDEN=GOLDEN,
                MIX=MIX,
                SEGMENT=SEGMENT,
            )
            sums = torch.empty(tile_count, dtype=torch.int64, pin_memory=self._on_gpu)
            sums.copy_(table[:tile_count], non_blocking=True)
            done = self._mark()
        return DeviceDigests(sums, done, used=(host_table, table))

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy in pages that stay in memory, where the device reads it by itself."""
        return tensor.pin_memory() if self._on_gpu else tensor

    def _mark(self) -> DeviceEvent | None:
        """Return a point behind what the current stream has to do; None where it is done."""
        if not self._on_gpu:
            return None
        event = torch.cuda.Event()
        event.record()
        return event
