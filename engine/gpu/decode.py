"""Steps of pure decode on the device: from the last ids to the next ones without the host.

A step is one launch over rows padded to a bucket: layers, logits and sampling, as a CUDA graph
where the device has them. Ids may come from the step before it, which the host has not read yet.
Block tables live on the device; the host sends what is new in them, and one small array a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..decoder import Decoder
from .ops import GpuOps, Step
from .sampling import pick
from .varlen import Varlen

DUMMY = 0  #: the block that rows of padding write to; it is no sequence's
FIELDS = 5  #: of a row in `Inputs`: source, position, seed, draw, temperature


def bucket(rows: int) -> int:
    """Rows of the graph that computes `rows`: 1, 2, 4, 8, then multiples of 8, of 32 from 64 on."""
    for step, most in ((1, 2), (4, 4), (8, 64)):
        if rows <= most:
            return -(-rows // step) * step
    return -(-rows // 32) * 32


def buckets(most: int) -> list[int]:
    """All that steps of up to `most` rows need, the largest first."""
    return sorted({bucket(rows) for rows in range(1, most + 1)}, reverse=True)


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence's place in a step.

    `source`: its last id; -1 - i: what row i of the step before it gave. `draw`: the position by
    which the next id is sampled.
    """

    source: int
    position: int
    blocks: list[int]
    seed: int
    draw: int
    temperature: float


def inputs(rows: Sequence[Row], width: int) -> np.ndarray:
    """int64 [FIELDS, width]: what a step is told, padded with rows at position -1."""
    told = np.zeros((FIELDS, width), np.int64)
    told[1] = -1
    for index, row in enumerate(rows):
        told[:4, index] = row.source, row.position, np.uint64(row.seed).view(np.int64), row.draw
        told[4, index] = np.float64(row.temperature).view(np.int64)
    return told


@dataclass(slots=True)
class Tables:
    """What the device knows of block tables, row by row; `update` finds what it does not."""

    known: np.ndarray  #: int32 [rows, blocks]
    lists: list[list[int]]  #: of each row: what was seen there, and how much of it
    counts: list[int]

    def update(self, rows: Sequence[Row]) -> tuple[int, int] | None:
        """The rows (from, to) of `known` that changed."""
        changed = []
        for index, row in enumerate(rows):
            count = len(row.blocks)
            if self.lists[index] is row.blocks and self.counts[index] == count:
                continue  # a sequence's list only grows; another one is another list
            self.known[index, :count] = row.blocks
            self.lists[index], self.counts[index] = row.blocks, count
            changed.append(index)
        return (changed[0], changed[-1] + 1) if changed else None


class Ticket:
    """A step under way. `read` waits for it."""

    def __init__(self, rows: int, ids: torch.Tensor, peaks: torch.Tensor, device: torch.device):
        self._rows, self._ids, self._peaks = rows, ids, peaks
        self._done = torch.cuda.Event() if device.type == "cuda" else None
        if self._done:
            self._done.record()

    def read(self) -> tuple[list[int], list[float]]:
        """The next id of each row, and its largest logit (no finite number: damage)."""
        if self._done:
            self._done.synchronize()
        return self._ids[: self._rows].tolist(), self._peaks[: self._rows].tolist()


class DecodeRunner:
    """Decodes up to `most` rows a step, of sequences up to `max_len` tokens.

    At most two steps are under way: `launch` the second before `read` of the first, not a third.
    """

    def __init__(
        self, decoder: Decoder, ops: GpuOps, most: int, max_len: int, block_tokens: int
    ) -> None:
        self.decoder, self.most, self._page, self._max_len = decoder, most, block_tokens, max_len
        self.device = device = ops.device
        self.graphs = device.type == "cuda" and ops.attention.graphs and not decoder.spec.experts
        self._width = most = bucket(most)
        blocks = -(-max_len // block_tokens)
        self._tables = Tables(np.zeros((most, blocks), np.int32), [[]] * most, [0] * most)
        self._table = torch.zeros(most, blocks, dtype=torch.int32, device=device)
        self._told = torch.zeros(FIELDS * most, dtype=torch.int64, device=device)
        self._ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._peaks = torch.zeros(most, dtype=torch.float32, device=device)
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        pin = device.type == "cuda"

        def host(like: torch.Tensor) -> list[torch.Tensor]:
            return [torch.zeros(like.shape, dtype=like.dtype, pin_memory=pin) for _ in range(2)]

        self._host = [host(one) for one in (self._told, self._table, self._ids, self._peaks)]
        self._turn = 0
        self._captured: dict[int, torch.cuda.CUDAGraph] = {}

    def launch(self, rows: Sequence[Row]) -> Ticket:
        """Starts a step; does not wait for it, nor for the one before it."""
        self._turn = 1 - self._turn
        told, table, ids, peaks = (pair[self._turn] for pair in self._host)
        width = bucket(len(rows))
        size = FIELDS * width
        told[:size] = torch.from_numpy(inputs(rows, width)).flatten()
        self._told[:size].copy_(told[:size], non_blocking=True)
        changed = self._tables.update(rows)
        if changed:
            part = slice(*changed)
            table[part] = torch.from_numpy(self._tables.known[part])
            self._table[part].copy_(table[part], non_blocking=True)
        self._run(width)
        ids[:width].copy_(self._ids[:width], non_blocking=True)
        peaks[:width].copy_(self._peaks[:width], non_blocking=True)
        return Ticket(len(rows), ids, peaks, self.device)

    def _run(self, width: int) -> None:
        graph = self._captured.get(width)
        if graph is None:
            self._forward(width)
        else:
            graph.replay()

    def capture(self) -> None:
        """Makes the graphs of all buckets, where the device has them. Before the first step."""
        self._told.fill_(-1)  # all rows are padding: nothing is read, block 0 is written
        for width in buckets(self.most) if self.graphs else ():
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._forward(width)  # compiles kernels, makes workspaces
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            shared = next(iter(self._captured.values())).pool() if self._captured else None
            with torch.cuda.graph(graph, pool=shared):
                self._forward(width)
            self._captured[width] = graph

    @torch.inference_mode()
    def _forward(self, width: int) -> None:
        """The step that `_told` and `_table` describe; its ids and peaks go to their buffers."""
        source, position, seeds, draws, heat = self._told[: FIELDS * width].view(FIELDS, width)
        alive = position >= 0
        positions = position.clamp(min=0)
        table = self._table[:width]
        ids = torch.where(source >= 0, source, self._ids[(-1 - source).clamp(min=0)])
        at = (positions // self._page)[:, None]
        block = table.gather(1, at)[:, 0].long()
        block = torch.where(alive, block, DUMMY)
        lengths = torch.where(alive, positions + 1, 0).int()
        where = Varlen(0, width, self._starts[: width + 1], lengths, table, 1, self._max_len)
        step = Step(positions, block, positions % self._page, [], varlen=[where])
        logits = self.decoder.logits(self.decoder.hidden(ids, step))
        picked, peaks = pick(logits, seeds, draws, heat.view(torch.float64))
        self._ids[:width].copy_(picked)
        self._peaks[:width].copy_(peaks)
