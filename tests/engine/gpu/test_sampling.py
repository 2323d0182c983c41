"""The device's draws are the CPU sampler's: same seed and position, same id."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from diptych.engine.gpu.sampling import CHUNK, pick_tokens
from diptych.engine.sampler import sample_tokens
from diptych.engine.sequence import Sequence
from diptych.protos.frames import Sampling

VOCAB = CHUNK + 77


def run(logits: torch.Tensor, seeds: list[int], positions: list[int], heat: list[float]):
    wrapped = torch.from_numpy(np.array(seeds, np.uint64).view(np.int64))
    temperatures = torch.tensor(heat, dtype=torch.float64)
    ids, peaks = pick_tokens(logits, wrapped, torch.tensor(positions), temperatures)
    return ids.tolist(), peaks.tolist()


def test_a_row_gets_the_id_of_the_cpu_sampler() -> None:
    seeds, heat = [0, 1, 2**64 - 3, 7], [0.0, 0.7, 1.0, 2.5]
    positions = [9, 1, 70_000, 3]
    logits = torch.randn(4, VOCAB)
    sequences = [
        Sequence(("r", i), [5] * at, 1, Sampling(10, temperature=t, seed=s))
        for i, (at, s, t) in enumerate(zip(positions, seeds, heat, strict=True))
    ]
    expected = [token.id for token in sample_tokens(logits, sequences)]
    assert run(logits, seeds, positions, heat)[0] == expected


def test_of_equal_logits_the_lowest_id_wins() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, [3, 900, CHUNK + 5]] = 1.0
    logits[1, [CHUNK + 6, CHUNK + 5]] = 1.0
    assert run(logits, [1, 1], [1, 1], [0.0, 0.0])[0] == [3, CHUNK + 5]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, VOCAB - 1])
def test_what_is_no_number_shows_in_the_peak(bad: float, at: int) -> None:
    logits = torch.randn(2, VOCAB)
    logits[1, at] = bad
    peaks = run(logits, [1, 1], [1, 1], [0.0, 1.0])[1]
    assert peaks[0] == logits[0].max()
    assert not math.isfinite(peaks[1])
