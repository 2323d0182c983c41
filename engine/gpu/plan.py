"""The input of a decode step on the device: its bucket, its padding, its changed tables.

A CUDA graph computes a fixed number of rows. So there is a graph for each of some sizes, the
buckets, and a step is padded to the next one. The device keeps each row's block table between
steps, and gets only those that changed. This module prepares all that in numpy; it touches no
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

#: The block that rows of padding write to; it belongs to no sequence (`blocks.BlockPool`).
PADDING_BLOCK = 0


class RowField(IntEnum):
    """The numbers of a packed row. Those that are no integers are the bits of a float64."""

    SOURCE = 0
    POSITION = 1
    SEED = 2
    DRAW = 3
    TEMPERATURE = 4  #: float64
    TOP_K = 5  #: 0: no limit
    TOP_P = 6  #: float64
    MIN_P_LOG = 7  #: float64: the logarithm of min_p; -inf: no limit
    SLOT = 8  #: Of what the device keeps for the sequence; -1: nothing.
    COUNTED = 9  #: 1: penalties count the sequence's ids.
    REPETITION = 10  #: float64, as the next two
    FREQUENCY = 11
    PRESENCE = 12
    BIASES = 13  #: Of the slot's list, the first so many ids have a bias,
    FORBIDDEN = 14  #: then so many must not come yet,
    NAMED = 15  #: then the logprobs of so many are wanted.
    FORBIDDEN_BEFORE = 16  #: The draw before which they must not come.
    MASKED = 17  #: 1: the slot's mask says which ids may come.
    REQUIRED = 18  #: The id that must come; -1: any may.
    LOGPROBS = 19  #: The logprobs of so many likeliest ids are wanted; -1: of none.
    LOGIT_ROW = 20  #: The row of the logits.


#: Numbers of a packed row.
ROW_FIELDS = len(RowField)

#: The ids of a slot's list, at most.
LIST_SIZE = 1024

#: The ids whose logprobs a row may want, at most.
TOP_SIZE = 128

#: Set in the count of each id of the prompt; what is below it counts the answer's.
PROMPT_BIT = 1 << 30

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


def kept_bytes(row_limit: int, vocab: int) -> int:
    """Return the bytes that a `decode.DecodeRunner` keeps on the device, whatever a step needs.

    It keeps four numbers of four bytes for each row and each id of the vocabulary: the logit, the
    adjusted logit, a candidate of the search for a border, and the slot's count. What it keeps
    beside them does not grow with the vocabulary, or is a bit for each id.
    """
    return bucket_size(row_limit) * vocab * 16


def _round_up(count: int, multiple: int) -> int:
    """Return the smallest multiple that is at least `count`."""
    return -(-count // multiple) * multiple


def float_bits(value: float) -> int:
    """Return the bits of a float64 as an int64."""
    return int(np.float64(value).view(np.int64))


def make_neutral_fields() -> np.ndarray:
    """Return the fields of a greedy row without extras; its places are still to be set."""
    fields = np.zeros(ROW_FIELDS, np.int64)
    fields[[RowField.TOP_P, RowField.REPETITION]] = float_bits(1.0)
    fields[RowField.MIN_P_LOG] = float_bits(-np.inf)
    fields[[RowField.SLOT, RowField.REQUIRED, RowField.LOGPROBS]] = -1
    return fields


_NEUTRAL_FIELDS = make_neutral_fields()


def plain_fields(seed: int = 0, temperature: float = 0.0) -> np.ndarray:
    """Return the fields of a row that has no other parameters."""
    fields = _NEUTRAL_FIELDS.copy()
    fields[RowField.SEED] = np.uint64(seed & 0xFFFFFFFFFFFFFFFF).view(np.int64)
    fields[RowField.TEMPERATURE] = float_bits(temperature)
    return fields


@dataclass(slots=True)
class DecodeRows:
    """The sequences of a decode step: what the device is told of each, in the order of the rows."""

    #: int64 [ROW_FIELDS, rows], as `RowField` says. A source is the sequence's last id; or -1 - i
    #: for the id that row i of the step before gives. The next id has the position `DRAW` in its
    #: sequence, by which the host's sampler counts its draws too (`sampler.gumbel_noise`).
    packed: np.ndarray
    blocks: list[list[int]]  #: The sequences' own lists, which only grow.
    wants_logprobs: bool = False  #: True: at least one row does.

    def __len__(self) -> int:
        return len(self.blocks)

    @classmethod
    def build(
        cls,
        columns: list[np.ndarray],
        sources: Sequence[int],
        lengths: Sequence[int],
        blocks: list[list[int]],
    ) -> DecodeRows:
        """Return rows of the given fields, whose next ids have the positions `lengths`."""
        packed = np.stack(columns, axis=1)
        packed[RowField.SOURCE] = sources
        packed[RowField.DRAW] = lengths
        packed[RowField.POSITION] = packed[RowField.DRAW] - 1
        packed[RowField.LOGIT_ROW] = np.arange(len(columns))
        return cls(packed, blocks, bool((packed[RowField.LOGPROBS] >= 0).any()))


def pad_rows(packed: np.ndarray, width: int) -> np.ndarray:
    """Return packed rows [ROW_FIELDS, width], padded with rows at PADDING_POSITION."""
    padded = np.zeros((ROW_FIELDS, width), np.int64)
    padded[:, : packed.shape[1]] = packed
    padded[RowField.POSITION, packed.shape[1] :] = PADDING_POSITION
    return padded


@dataclass(slots=True)
class BlockTables:
    """What the device knows of the block tables, row by row."""

    #: int32 [rows, blocks]: what the device has once the next step has sent the changed rows.
    device_tables: np.ndarray
    lists: list[list[int]]  #: The `blocks` that each row had last.
    counts: list[int]  #: How many blocks of that list the device has.

    def update(self, blocks: Sequence[list[int]]) -> list[int]:
        """Write what is new to `device_tables`; return the changed rows' indices, ascending."""
        changed: list[int] = []
        lists = self.lists
        counts = self.counts
        for index, own in enumerate(blocks):
            count = len(own)
            # a sequence's list only grows, and another sequence's is another list
            if lists[index] is own and counts[index] == count:
                continue
            self.device_tables[index, :count] = own
            lists[index] = own
            counts[index] = count
            changed.append(index)
        return changed
