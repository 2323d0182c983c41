"""Arithmetic on the units that one write copies: which of them lie side by side (pure)."""

from __future__ import annotations

import numpy as np

from ..transport import Spans


def contiguous_runs(*units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Finds the runs of positions in which every array of `units` (int [n]) counts up by one.

    Returns two arrays: the index at which each run begins, and its length. Of the arrays
    [4, 5, 9] and [1, 2, 3] these are [0, 2] and [2, 1].
    """
    length = len(units[0])
    breaks = np.zeros(max(length - 1, 0), bool)  # True at i: a run ends between i and i + 1
    for array in units:
        breaks |= np.diff(array) != 1

    # The first run begins at 0, unless there is no position at all: then the slice is empty.
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))[:length]
    lengths = np.diff(np.append(starts, length))
    return starts, lengths


def bounded_pieces(spans: Spans, piece_bytes_limit: int) -> np.ndarray:
    """Cuts `spans` into pieces that are contiguous in both pools, as rows of int64 [n, 3].

    A row is the first byte in the source pool, the first byte in the target pool, and the number
    of bytes. Runs of more than `piece_bytes_limit` bytes are cut into several pieces.
    """
    run_starts, run_lengths = contiguous_runs(spans.source_units, spans.target_units)
    run_bytes = run_lengths * spans.unit_bytes
    pieces_per_run = -(-run_bytes // piece_bytes_limit)

    # `run` is the run of each piece, `offset` the first byte of the piece inside of its run.
    run = np.repeat(np.arange(len(run_starts)), pieces_per_run)
    first_piece = np.cumsum(pieces_per_run) - pieces_per_run
    number_in_run = np.arange(len(run)) - np.repeat(first_piece, pieces_per_run)
    offset = number_in_run * piece_bytes_limit

    source = spans.source_units[run_starts].astype(np.int64)[run] * spans.unit_bytes + offset
    target = spans.target_units[run_starts].astype(np.int64)[run] * spans.unit_bytes + offset
    size = np.minimum(run_bytes[run] - offset, piece_bytes_limit)
    return np.stack((source, target, size), axis=1)
