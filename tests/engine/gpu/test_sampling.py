"""The device's draws are the CPU sampler's: same parameters, seed and ids, same next id."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from diptych.engine.gpu import sampling
from diptych.engine.gpu.decode import DecodeRunner
from diptych.engine.gpu.pipeline import DecodePipeline
from diptych.engine.gpu.random_model import make_random_model
from diptych.engine.gpu.roofline import LLAMA_3_8B
from diptych.engine.gpu.sampling import CHUNK, NUCLEUS_TOLERANCE
from diptych.engine.options import DecodeLimits
from diptych.engine.sampler import SamplingFault, sample_tokens, score_prompt
from diptych.engine.sequence import Sequence
from diptych.protos.frames import Sampling, ThinkingBudget, Token
from msgspec.structs import replace as with_fields

from tests.engine.gpu.test_decode import TINY
from tests.engine.pure import scheduler
from tests.support.variants import daily

VOCAB = CHUNK + 77
PROMPT = [5, 9, 9, 1000, 3]


def make_pipeline(rows: int = 8) -> DecodePipeline:
    spec = replace(LLAMA_3_8B, **{**TINY, "vocab": VOCAB}, windows=(None,))
    decoder, ops = make_random_model(spec, torch.device("cpu"), blocks=9)
    runner = DecodeRunner(decoder, ops, DecodeLimits(rows=rows, max_model_len=256, block_tokens=64))
    return DecodePipeline(runner, scheduler(), lambda *_: None, 256)


@pytest.fixture(scope="module")
def pipeline() -> DecodePipeline:
    return make_pipeline()


def asking(sampling: Sampling, answer: tuple[int, ...] = (7, 7, 2), number: int = 0) -> Sequence:
    return Sequence(("r", number), [*PROMPT, *answer], len(PROMPT), sampling)


def both(pipeline: DecodePipeline, logits: torch.Tensor, samplings: list[Sampling]):
    """What the host draws, and what the device draws."""
    host = sample_tokens(logits, [asking(one) for one in samplings])
    rows = list(range(len(samplings)))
    return host, pipeline.draw(logits, rows, [asking(one) for one in samplings])


PUBLISHED = [
    Sampling(10, temperature=0.6, top_p=0.9, seed=1),
    Sampling(10, temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05, seed=2),
    Sampling(10, temperature=0.6, top_p=0.95, top_k=20, seed=2**64 - 3),
]
OTHERS = [
    Sampling(10),
    Sampling(10, temperature=2.5, seed=7),
    Sampling(10, temperature=1.5, min_p=0.05, seed=4),
    Sampling(10, temperature=1.0, min_p=0.1, top_k=50, top_p=0.5, seed=5),
    Sampling(10, temperature=1.0, top_k=1, seed=6),
    Sampling(10, temperature=1.0, top_p=0.0001, seed=6),
    Sampling(10, repetition_penalty=1.7),
    Sampling(10, presence_penalty=2.0, frequency_penalty=1.5, repetition_penalty=0.3),
    Sampling(10, logit_bias=((1, 100.0), (2, 101.0))),
    Sampling(10, temperature=1.0, logit_bias=tuple((i, -100.0) for i in range(300)), seed=8),
    Sampling(10, temperature=1.0, allowed_ids=(3, 700, CHUNK + 70), seed=9),
    Sampling(10, min_tokens=4, stop_ids=(0, 1, 2), logit_bias=((0, 100.0), (8, 90.0))),
    Sampling(10, min_tokens=3, stop_ids=(0, 1, 2), logit_bias=((0, 100.0), (8, 90.0))),
    Sampling(10, thinking=ThinkingBudget(3, 11)),
]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("spread", marks=pytest.mark.slow),
        pytest.param("ties", marks=pytest.mark.slow),
        pytest.param("flat", marks=pytest.mark.slow),
    ],
)
def test_a_row_gets_the_id_of_the_cpu_sampler(pipeline: DecodePipeline, kind: str) -> None:
    samplings = [*PUBLISHED, *OTHERS]
    logits = torch.randn(len(samplings), VOCAB) * 3
    if kind == "ties":
        logits = logits.round()
    elif kind == "flat":
        logits[:] = 0.0
    host, device = both(pipeline, logits, samplings)
    assert device == host


def test_a_search_reads_a_row_in_pieces(
    pipeline: DecodePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real vocabulary has many pieces; here a smaller piece makes five of this one."""
    monkeypatch.setattr(sampling, "SPAN", 256)
    samplings = [*PUBLISHED, *OTHERS[2:4]]
    logits = (torch.randn(len(samplings), VOCAB) * 3).round()
    host, device = both(pipeline, logits, samplings)
    assert device == host


@pytest.mark.slow
def test_nuclei_end_where_the_cpu_samplers_end(pipeline: DecodePipeline) -> None:
    """Many seeds find every id that is inside, so both have the same ones but for the border."""
    logits = torch.randn(1, VOCAB) * 2
    for top_p in (0.3, 0.9):
        weights = torch.softmax(logits[0].double(), 0)
        order = torch.sort(weights, descending=True, stable=True).indices
        before = torch.cumsum(weights[order], 0) - weights[order]
        surely = set(order[before < top_p - NUCLEUS_TOLERANCE].tolist())
        possibly = set(order[before < top_p + NUCLEUS_TOLERANCE].tolist())
        samplings = [Sampling(9, temperature=1.0, top_p=top_p, seed=seed) for seed in range(8)]
        host, device = both(pipeline, logits.expand(8, VOCAB).contiguous(), samplings)
        assert {token.id for token in device} <= possibly
        if surely == possibly:
            assert device == host


@pytest.mark.slow
def test_a_row_has_the_same_bits_whatever_stands_beside_it(pipeline: DecodePipeline) -> None:
    samplings = [with_fields(one, logprobs=3) for one in [*PUBLISHED, *OTHERS[:5]]]
    logits = torch.randn(len(samplings), VOCAB) * 3
    rows = list(range(len(samplings)))
    together = pipeline.draw(logits, rows, [asking(one) for one in samplings])
    random.shuffle(rows)
    for row in rows[:4]:
        assert pipeline.draw(logits, [row], [asking(samplings[row])]) == [together[row]]


def test_logprobs_are_the_models_own(pipeline: DecodePipeline) -> None:
    """Before temperature, penalties and masks; of equal ones the lower id first."""
    logits = torch.randn(4, VOCAB) * 3
    logits[3] = logits[3].round()
    samplings = [
        Sampling(9, logprobs=0),
        Sampling(9, logprobs=5, temperature=0.7, top_k=3, frequency_penalty=1.0),
        Sampling(9, logprobs=1, logprob_ids=(3, 1000, 8)),
        Sampling(9, logprobs=20),
    ]
    host, device = both(pipeline, logits, samplings)
    for ours, theirs in zip(device, host, strict=True):
        assert isinstance(ours, Token) and isinstance(theirs, Token)
        assert ours.id == theirs.id and ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
        assert [entry[0] for entry in ours.top] == [entry[0] for entry in theirs.top]
        ours_top = [entry[1] for entry in ours.top]
        assert ours_top == pytest.approx([entry[1] for entry in theirs.top], abs=1e-5)


def test_a_prompts_ids_are_scored_as_on_the_cpu(pipeline: DecodePipeline) -> None:
    logits = torch.randn(3, VOCAB).round()
    ids = [4, 1000, 77]
    ours = pipeline.score(logits, ids, 4, position=1).read()
    for device, host in zip(ours, score_prompt(logits, ids, 4, 1), strict=True):
        assert (device.id, device.rank) == (host.id, host.rank)
        assert device.logprob == pytest.approx(host.logprob, abs=1e-5)
        assert [entry[0] for entry in device.top] == [entry[0] for entry in host.top]


def test_counts_survive_more_sequences_than_there_are_slots() -> None:
    pipeline = make_pipeline(rows=2)
    penalized = Sampling(99, frequency_penalty=3.0, presence_penalty=1.0)
    sequences = [asking(penalized, (), number) for number in range(5)]
    for _ in range(3):
        logits = torch.randn(5, VOCAB)
        expected = sample_tokens(
            logits, [asking(penalized, tuple(one.token_ids[len(PROMPT) :])) for one in sequences]
        )
        order = random.sample(range(5), 5)
        drawn = pipeline.draw(logits, order, [sequences[place] for place in order])
        for place, token in zip(order, drawn, strict=True):
            assert token == expected[place]
            sequences[place].token_ids.append(token.id)


@pytest.mark.parametrize("bad", [math.nan, *daily([math.inf, -math.inf])])
@pytest.mark.parametrize("at", [0, VOCAB - 1])
def test_what_is_no_number_ends_its_sequence_alone(
    pipeline: DecodePipeline, bad: float, at: int
) -> None:
    logits = torch.randn(3, VOCAB)
    logits[1, at] = bad
    if bad == -math.inf:
        logits[1] = bad
    host, device = both(pipeline, logits, [Sampling(9), PUBLISHED[1], Sampling(9)])
    assert device == host and isinstance(device[1], SamplingFault) and device[1].model_damaged


def test_a_request_that_cannot_be_drawn_for_gets_the_reason(pipeline: DecodePipeline) -> None:
    samplings = [
        Sampling(9),
        Sampling(9, allowed_ids=(1, VOCAB)),
        Sampling(9, logit_bias=((VOCAB, 1.0),)),
        Sampling(9, logprobs=0, logprob_ids=(VOCAB,)),
        Sampling(9, allowed_ids=(1,), min_tokens=9, stop_ids=(1,)),
        Sampling(9, repetition_penalty=1e-45),
    ]
    host, device = both(pipeline, torch.randn(6, VOCAB).abs() * 1e6, samplings)
    assert device == host
    assert [isinstance(one, SamplingFault) for one in device] == [False, *[True] * 5]
