"""The budget of thinking: when the closing tag must come, and that the sampler makes it come."""

from __future__ import annotations

import numpy as np
import torch
from diptych.engine.sampler import sample_tokens
from diptych.engine.sequence import Sequence
from diptych.engine.thinking import ThinkingWatch
from diptych.protos.frames import Sampling, ThinkingBudget

OPEN, CLOSE, WORD = 1, 2, 3


def asking(sampling: Sampling, answer_ids: list[int]) -> Sequence:
    return Sequence(("r", 0), [0, *answer_ids], 1, sampling)


def required(budget: ThinkingBudget, answer_ids: list[int]) -> int | None:
    """What a fresh watch requires; one that saw the ids come one by one says the same."""
    watch = ThinkingWatch(budget)
    stepwise = [watch.required_id(answer_ids[:size]) for size in range(len(answer_ids) + 1)]
    assert stepwise[-1] == ThinkingWatch(budget).required_id(answer_ids)
    return stepwise[-1]


def test_the_tag_is_required_once_the_budget_is_spent() -> None:
    inside = ThinkingBudget(2, CLOSE)
    assert required(inside, []) is None and required(inside, [WORD]) is None
    assert required(inside, [WORD, WORD]) == CLOSE
    assert required(inside, [WORD, WORD, CLOSE]) is None
    assert required(inside, [WORD, CLOSE, WORD, WORD, WORD]) is None, "it ended by itself"
    assert required(ThinkingBudget(0, CLOSE), []) == CLOSE


def test_an_answer_that_does_not_begin_with_the_tag_is_not_bounded() -> None:
    start = ThinkingBudget(1, CLOSE, (OPEN,))
    assert required(start, []) is None and required(start, [WORD] * 9) is None
    assert required(start, [OPEN, WORD]) == CLOSE
    assert required(start, [WORD, OPEN]) is None
    assert required(start, [WORD, OPEN, WORD]) == CLOSE
    assert required(start, [*([WORD] * 9), OPEN, WORD, WORD]) is None


def test_guesses_that_were_taken_back_do_not_count() -> None:
    watch = ThinkingWatch(ThinkingBudget(2, CLOSE))
    assert watch.required_id([WORD, CLOSE]) is None
    assert watch.required_id([WORD]) is None
    assert watch.required_id([WORD, WORD]) == CLOSE


def test_the_sampler_draws_the_tag_whatever_the_model_and_the_client_want() -> None:
    logits = torch.tensor(np.array([[0.0, 0.0, -50.0, 9.0]], np.float32))
    for temperature in (0.0, 1.5):
        sampling = Sampling(
            9,
            temperature,
            logit_bias=((CLOSE, -100.0),),
            allowed_ids=(WORD,),
            thinking=ThinkingBudget(2, CLOSE),
        )
        drawn = []
        for answer_ids in ([], [WORD], [WORD, WORD], [WORD, WORD, CLOSE]):
            sequence = asking(sampling, answer_ids)
            (token,) = sample_tokens(logits, [sequence])
            drawn.append(token.id)  # type: ignore[union-attr]
        assert drawn == [WORD, WORD, CLOSE, WORD]
