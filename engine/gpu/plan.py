"""The input of a decode step on the device: its bucket, its padding, its changed tables.

A CUDA graph computes a fixed number of rows. So there is a graph for each of some sizes, the
buckets, and a step is padded to the next one. The device keeps each row's block table between
steps, and gets only those that changed. This module prepares all that in numpy; it touches no
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: The block that rows of padding write to; it belongs to no sequence (`blocks.BlockPool`).
PADDING_BLOCK = 0

#: Numbers of a packed row: source, position, seed, draw, temperature (as in `DecodeRow`).
ROW_FIELDS = 5

#: The position of a packed row of padding.
PADDING_POSITION = -1


def bucket_size(row_count: int) -> int:
    """Return the rows of the smallest graph that has room for `row_count` rows.

    The sizes are 1, 2, 4, 8, then multiples of 8 up to 64, then multiples of 32: few graphs to
    capture, and little padding where rows are costly.
    """
    for multiple, limit in ((1, 2), (4, 4), (8, 64)):
        if row_count <= limit:
            return _round_up(row_count, multiple)
    return _round_up(row_count, 32)


def bucket_sizes(row_limit: int) -> list[int]:
    """Return all sizes that steps of up to `row_limit` rows need, the largest first."""
    return sorted({bucket_size(rows) for rows in range(1, row_limit + 1)}, reverse=True)


def _round_up(count: int, multiple: int) -> int:
    """Return the smallest multiple that is at least `count`."""
    return -(-count // multiple) * multiple


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """The place of one sequence in a decode step."""

    #: The sequence's last id; or -1 - i for the id that row i of the step before gives.
    source: int

    position: int  #: Of the last id in its sequence.
    blocks: list[int]  #: The sequence's own list, which only grows.
    seed: int  #: The random numbers of the next id follow from `seed` and `draw` alone.
    #: The position that the next id is going to have in its sequence, `position` + 1. The host's
    #: sampler counts its draws in the same way (`sampler.gumbel_noise`).
    draw: int
    temperature: float  #: 0: the id of the largest logit is taken.


def pack_rows(rows: Sequence[DecodeRow], width: int) -> np.ndarray:
    """Return the rows as int64 [ROW_FIELDS, width], padded with rows at PADDING_POSITION.

    One type for all fields lets a step send a single array. Seeds keep their 64 bits, and
    temperatures are the bits of a float64.
    """
    packed = np.zeros((ROW_FIELDS, width), np.int64)
    sources, positions, seeds, draws, temperatures = packed
    positions[:] = PADDING_POSITION
    for index, row in enumerate(rows):
        sources[index] = row.source
        positions[index] = row.position
        seeds[index] = np.uint64(row.seed).view(np.int64)
        draws[index] = row.draw
        temperatures[index] = np.float64(row.temperature).view(np.int64)
    return packed


@dataclass(slots=True)
class BlockTables:
    """What the device knows of the block tables, row by row."""

    #: int32 [rows, blocks]: what the device has once the next step has sent the changed rows.
    device_tables: np.ndarray
    lists: list[list[int]]  #: The `blocks` that each row had last.
    counts: list[int]  #: How many blocks of that list the device has.

    def update(self, rows: Sequence[DecodeRow]) -> list[int]:
        """Write what is new to `device_tables`; return the changed rows' indices, ascending."""
        changed: list[int] = []
        for index, row in enumerate(rows):
            count = len(row.blocks)
            # a sequence's list only grows, and another sequence's is another list
            if self.lists[index] is row.blocks and self.counts[index] == count:
                continue
            self.device_tables[index, :count] = row.blocks
            self.lists[index] = row.blocks
            self.counts[index] = count
            changed.append(index)
        return changed
