"""What a decode step on the device is told: its bucket, its padding, what is new (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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

    def update(self, rows: Sequence[Row]) -> list[int]:
        """Writes down what is new; the rows of `known` that changed."""
        changed = []
        for index, row in enumerate(rows):
            count = len(row.blocks)
            if self.lists[index] is row.blocks and self.counts[index] == count:
                continue  # a sequence's list only grows; another one is another list
            self.known[index, :count] = row.blocks
            self.lists[index], self.counts[index] = row.blocks, count
            changed.append(index)
        return changed
