"""Tokens from logits: greedy, Gumbel-max draws that depend on (seed, position) alone, logprobs."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from diptych.engine.sampler import gumbel, sample
from diptych.protos.frames import Sampling

LOGITS = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.5, -30.0])


def test_greedy_takes_the_largest_whatever_seed_and_position() -> None:
    tokens = {sample(LOGITS, Sampling(1, seed=seed), at).id for seed in range(5) for at in range(5)}
    assert tokens == {2}


def test_the_same_seed_and_position_give_the_same_token() -> None:
    wide = torch.randn(500, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(1, temperature=1.0, seed=42)
    first = [sample(wide, sampling, at).id for at in range(50)]
    assert first == [sample(wide.clone(), sampling, at).id for at in range(50)]
    assert len(set(first)) > 25


def test_another_seed_or_position_gives_other_noise() -> None:
    draws = {tuple(gumbel(seed, at, 3).tolist()) for seed in range(10) for at in range(10)}
    assert len(draws) == 100


@pytest.mark.parametrize("seed", [0, 1, -1, 1 << 63, (1 << 64) - 1])
def test_every_64_bit_seed_is_one(seed: int) -> None:
    assert torch.isfinite(gumbel(seed, 1 << 20, 1000)).all()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    count, sampling = 4000, Sampling(1, temperature=temperature, seed=11)
    drawn = Counter(sample(LOGITS, sampling, at).id for at in range(count))
    expected = torch.softmax(LOGITS.double() / temperature, dim=-1) * count
    chi = sum(float((drawn[i] - n) ** 2 / n) for i, n in enumerate(expected) if n > 5)
    assert chi < 20.5  # chi-square, 5 degrees of freedom, p = 0.001
    assert drawn[5] == 0


def test_draws_over_seeds_follow_the_softmax_too() -> None:
    count = 4000
    drawn = Counter(
        sample(LOGITS, Sampling(1, temperature=1.0, seed=s), 17).id for s in range(count)
    )
    expected = torch.softmax(LOGITS.double(), dim=-1) * count
    chi = sum(float((drawn[i] - n) ** 2 / n) for i, n in enumerate(expected) if n > 5)
    assert chi < 20.5


def test_a_low_temperature_is_nearly_greedy() -> None:
    drawn = {sample(LOGITS, Sampling(1, temperature=0.01, seed=3), at).id for at in range(200)}
    assert drawn == {2}


def test_logprobs_are_none_unless_asked_for() -> None:
    token = sample(LOGITS, Sampling(1), 0)
    assert (token.logprob, token.top) == (None, ())


def test_zero_logprobs_are_the_chosen_ones_only() -> None:
    token = sample(LOGITS, Sampling(1, logprobs=0), 0)
    assert token.top == ()
    assert token.logprob == pytest.approx(float(torch.log_softmax(LOGITS, -1)[2]))


def test_top_logprobs_are_the_largest_first() -> None:
    token = sample(LOGITS, Sampling(1, logprobs=3), 0)
    assert [index for index, _ in token.top] == [2, 4, 0]
    assert token.top[0] == (2, token.logprob)
    whole = sample(LOGITS, Sampling(1, logprobs=6), 0).top
    assert math.fsum(math.exp(value) for _, value in whole) == pytest.approx(1.0)


def test_logprobs_are_of_the_model_not_of_the_temperature() -> None:
    values = [sample(LOGITS, Sampling(1, t, 1, (), 6), 0).top for t in (0.0, 0.3, 3.0)]
    assert values[0] == values[1] == values[2]
