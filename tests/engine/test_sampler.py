"""Tokens from logits: greedy, seeded draws, penalties, masks and cuts, logprobs, damaged rows.

The oracle for what transformers has is transformers: its processors, then the same noise.
"""

from __future__ import annotations

import math
import random
from collections import Counter

import msgspec
import numpy as np
import pytest
import torch
from diptych.engine import sampler
from diptych.engine.sampler import SamplingFault, gumbel_noise, sample_tokens, score_prompt
from diptych.engine.sequence import Sequence
from diptych.protos.frames import Grammar, Sampling, ScoredToken, Token
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.lazy import LazyModule

transformers = LazyModule("transformers")

LOGITS = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.5, -30.0])
CHI_5 = 20.5  #: chi-square, 5 degrees of freedom, p = 0.001


def asking(sampling: Sampling, prompt: list[int], answer: list[int] | None = None) -> Sequence:
    return Sequence(("r", 0), [*prompt, *(answer or [])], len(prompt), sampling)


def one(logits: torch.Tensor, sampling: Sampling, at: int = 1) -> Token:
    """The token at index `at`, behind a prompt of zeros."""
    (token,) = sample_tokens(logits[None], [asking(sampling, [0] * at)])
    assert isinstance(token, Token), token
    return token


def draws(logits: torch.Tensor, sampling: Sampling, count: int) -> Counter[int]:
    """How often each id is drawn at `count` positions."""
    drawn: Counter[int] = Counter()
    seq = asking(sampling, [0])
    for _ in range(count):
        (token,) = sample_tokens(logits[None], [seq])
        assert isinstance(token, Token)
        drawn[token.id] += 1
        seq.token_ids.append(0)
    return drawn


def chi_square(drawn: Counter[int], probabilities: torch.Tensor) -> float:
    expected = (probabilities * drawn.total()).tolist()
    assert all(expected[index] > 0 for index in drawn), "an impossible id was drawn"
    return sum((drawn[i] - n) ** 2 / n for i, n in enumerate(expected) if n > 5)


def noisy(vocab: int, seed: int, ties: bool = False) -> torch.Tensor:
    """Normal logits [vocab], rounded to quarters if `ties`."""
    values = 3 * torch.randn(vocab, generator=torch.Generator().manual_seed(seed))
    return (values * 4).round() / 4 if ties else values


# ---- greedy and drawn ----------------------------------------------------------------------------


def test_greedy_takes_the_largest_whatever_seed_and_position() -> None:
    tokens = {one(LOGITS, Sampling(1, seed=s), at).id for s in range(5) for at in range(1, 5)}
    assert tokens == {2}


def test_of_equal_logits_the_lowest_id_is_taken() -> None:
    rows = torch.zeros(3, 40_000)
    rows[1, [39_999, 17, 20_000]] = 1.0
    rows[2, [39_998, 39_999]] = 1.0
    tokens = sample_tokens(rows, [asking(Sampling(1), [0])] * 3)
    assert tokens == [Token(0), Token(17), Token(39_998)]


def test_the_same_seed_and_position_give_the_same_token() -> None:
    wide, sampling = noisy(500, 0) / 3, Sampling(1, temperature=1.0, seed=42)
    first = [one(wide, sampling, at).id for at in range(1, 50)]
    assert first == [one(wide.clone(), sampling, at).id for at in range(1, 50)]
    assert len(set(first)) > 10


def test_another_seed_or_position_gives_other_noise() -> None:
    every = slice(None)
    noises = {tuple(gumbel_noise(seed, at, 3, every)) for seed in range(10) for at in range(10)}
    assert len(noises) == 100


def test_the_noise_of_an_id_does_not_depend_on_the_others() -> None:
    ids = np.array([999, 3, 500])
    assert (gumbel_noise(7, 9, 1000, ids) == gumbel_noise(7, 9, 1000, slice(None))[ids]).all()


@pytest.mark.parametrize("seed", [0, 1, -1, 1 << 63, (1 << 64) - 1])
def test_every_64_bit_seed_is_one(seed: int) -> None:
    assert np.isfinite(gumbel_noise(seed, 1 << 20, 1000, slice(None))).all()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    drawn = draws(LOGITS, Sampling(1, temperature=temperature, seed=11), 4000)
    assert chi_square(drawn, torch.softmax(LOGITS.double() / temperature, -1)) < CHI_5
    assert drawn[5] == 0


def test_draws_over_seeds_follow_the_softmax_too() -> None:
    drawn = Counter(one(LOGITS, Sampling(1, temperature=1.0, seed=s), 17).id for s in range(4000))
    assert chi_square(drawn, torch.softmax(LOGITS.double(), -1)) < CHI_5


@pytest.mark.parametrize(
    ("cut", "kept"),
    [
        (Sampling(1, 1.0, 5, top_k=3), [2, 4, 0]),
        (Sampling(1, 1.0, 5, top_p=0.75), [2, 4]),  # softmax: .50 .30 .11 .07 .02
        (Sampling(1, 1.0, 5, min_p=0.2), [2, 4, 0]),  # e^-1.5 = .22, e^-2 = .14 of the largest
        (Sampling(1, 1.0, 5, top_k=4, top_p=0.9, min_p=0.1), [2, 4, 0]),
    ],
)
def test_draws_of_a_cut_row_follow_the_softmax_of_what_is_left(
    cut: Sampling, kept: list[int]
) -> None:
    left = torch.full_like(LOGITS, -torch.inf)
    left[kept] = LOGITS[kept]
    drawn = draws(LOGITS, cut, 4000)
    assert set(drawn) == set(kept)
    assert chi_square(drawn, torch.softmax(left.double(), -1)) < CHI_5


def test_a_low_temperature_is_nearly_greedy() -> None:
    assert set(draws(LOGITS, Sampling(1, temperature=0.01, seed=3), 200)) == {2}


# ---- against transformers ------------------------------------------------------------------------


VOCAB = 300
STOPS = (1, 250)
IDS = st.lists(st.integers(0, VOCAB - 1), max_size=40)
PARAMETERS = st.builds(
    Sampling,
    max_tokens=st.just(50),
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 1.7]),
    seed=st.integers(0, 2**64 - 1),
    stop_ids=st.just(STOPS),
    top_k=st.sampled_from([0, 1, 5, 40, 299, 300, 1000]),
    top_p=st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7, 2.0]),
    logit_bias=st.sampled_from([(), ((3, 100.0),), ((3, -100.0), (299, 4.0), (0, -1.5))]),
    min_tokens=st.sampled_from([0, 3, 10, 40]),
)


def reference(logits: torch.Tensor, seq: Sequence) -> int:
    """transformers' processors on float64 logits [vocab], then the same noise."""
    s, prompt = seq.sampling, seq.prompt_tokens
    ids, answer = torch.tensor([seq.token_ids]), seq.token_ids[seq.prompt_tokens :]
    scores = logits.double()[None]
    if s.repetition_penalty != 1:
        scores = transformers.RepetitionPenaltyLogitsProcessor(s.repetition_penalty)(ids, scores)
    for index, times in Counter(answer).items():
        scores[0, index] -= s.presence_penalty + s.frequency_penalty * times
    chain = transformers.LogitsProcessorList()
    if s.logit_bias:
        chain.append(
            transformers.SequenceBiasLogitsProcessor({(i,): float(b) for i, b in s.logit_bias})
        )
    chain.append(
        transformers.MinNewTokensLengthLogitsProcessor(prompt, s.min_tokens, list(s.stop_ids))
    )
    if s.temperature == 0:
        return int(chain(ids, scores).argmax())
    chain.append(transformers.TemperatureLogitsWarper(s.temperature))
    if s.min_p:
        chain.append(transformers.MinPLogitsWarper(s.min_p))
    if s.top_k:
        chain.append(transformers.TopKLogitsWarper(s.top_k))
    if s.top_p < 1:
        chain.append(transformers.TopPLogitsWarper(s.top_p))
    noise = gumbel_noise(s.seed, len(seq.token_ids), len(logits), slice(None))
    return int((chain(ids, scores)[0] + torch.from_numpy(noise)).argmax())


@settings(max_examples=examples(400), deadline=None)
@given(PARAMETERS, IDS.filter(len), IDS, st.integers(0, 1000))
def test_the_chosen_id_is_that_of_transformers(
    sampling: Sampling, prompt: list[int], answer: list[int], seed: int
) -> None:
    logits = noisy(VOCAB, seed)
    logits[list(STOPS)] += 5  # so that the mask has something to do,
    logits[[*prompt[:2], *answer[:2]]] += 5  # and the penalties
    seq = asking(sampling, prompt, answer)
    (token,) = sample_tokens(logits[None], [seq])
    assert token == Token(reference(logits, seq))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_penalties_follow_an_answer_as_it_grows(temperature: float) -> None:
    """The memory that is kept with a sequence says the same as one built anew from its ids."""
    sampling = Sampling(
        50, temperature, 3, (), 2, 0, 0.95, 0.0, 0.4, 0.3, 1.2, ((4, 2.0),), min_tokens=5
    )
    seq = asking(sampling, [5, 6, 7, 5])
    for step in range(40):
        logits = noisy(30, step)
        (token,) = sample_tokens(logits[None], [seq])
        (again,) = sample_tokens(
            logits[None], [asking(sampling, seq.token_ids[:4], seq.token_ids[4:])]
        )
        assert token == again and isinstance(token, Token)
        assert token.id == reference(logits, seq)
        seq.token_ids.append(token.id)


def test_presence_and_frequency_are_of_the_answer_repetition_of_the_prompt_too() -> None:
    flat, prompt = torch.tensor([3.0, 2.9, 1.0]), [0, 0, 0]
    for name in ("presence_penalty", "frequency_penalty"):
        assert sample_tokens(flat[None], [asking(Sampling(9, **{name: 1.0}), prompt)]) == [Token(0)]
        assert sample_tokens(flat[None], [asking(Sampling(9, **{name: 1.0}), prompt, [0])]) == [
            Token(1)
        ]
    repeated = Sampling(9, repetition_penalty=1.5)
    assert sample_tokens(flat[None], [asking(repeated, prompt)]) == [Token(1)]


# ---- cuts under ties -----------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [Sampling(1, 1.0, top_k=3), Sampling(1, 1.0, top_p=0.25)])
def test_ties_are_cut_by_id(cut: Sampling) -> None:
    """Of ten equal ids top_k 3 keeps three, and so does top_p .25; transformers keeps all ten."""
    flat = torch.full((12,), -3.0)
    flat[2:] = 1.0
    assert set(draws(flat, cut, 200)) == {2, 3, 4}


def test_top_p_keeps_at_least_one() -> None:
    assert set(draws(LOGITS, Sampling(1, 1.5, top_p=0.0), 50)) == {2}
    assert set(draws(torch.zeros(8), Sampling(1, 1.5, top_p=1e-9), 50)) == {0}


# ---- logprobs ------------------------------------------------------------------------------------


def test_logprobs_are_none_unless_asked_for() -> None:
    assert one(LOGITS, Sampling(1)) == Token(2, None, ())


def test_zero_logprobs_are_the_chosen_ones_only() -> None:
    token = one(LOGITS, Sampling(1, logprobs=0))
    assert token.top == ()
    assert token.logprob == pytest.approx(float(torch.log_softmax(LOGITS, -1)[2]))


def test_top_logprobs_are_the_largest_first_ties_by_id() -> None:
    token = one(LOGITS, Sampling(1, logprobs=3))
    assert [index for index, _ in token.top] == [2, 4, 0]
    assert token.top[0] == (2, token.logprob)
    whole = one(LOGITS, Sampling(1, logprobs=600)).top
    assert math.fsum(math.exp(value) for _, value in whole) == pytest.approx(1.0)
    tied = one(noisy(5000, 1, ties=True), Sampling(1, logprobs=2000)).top
    assert list(tied) == sorted(tied, key=lambda entry: (-entry[1], entry[0]))


def test_logprobs_of_named_ids_are_those_and_the_chosen_one_s() -> None:
    expected = torch.log_softmax(LOGITS, -1)
    for named in ((1,), (5, 1), (2,), (1, 2, 1, 5)):
        token = one(LOGITS, Sampling(1, logprobs=2, logprob_ids=named))
        assert token.id == 2 and {index for index, _ in token.top} == {*named, 2}
        assert len(token.top) == len({*named, 2}) and token.top[0] == (2, token.logprob)
        for index, logprob in token.top:
            assert logprob == pytest.approx(float(expected[index]))
    assert one(LOGITS, Sampling(1, logprob_ids=(1,))) == Token(2, None, ())
    (fault,) = sample_tokens(LOGITS[None], [asking(Sampling(1, logprobs=0, logprob_ids=(6,)), [0])])
    assert fault == SamplingFault("logprob_token_ids: the model has 6 ids, and one is none")


def test_no_id_is_drawn_that_is_not_allowed() -> None:
    assert one(LOGITS, Sampling(1, allowed_ids=(5, 1))).id == 1
    assert set(draws(LOGITS, Sampling(1, 3.0, allowed_ids=(0, 1, 3)), 300)) == {0, 1, 3}
    assert one(LOGITS, Sampling(1, allowed_ids=(5,), logit_bias=((2, 100.0),))).id == 5
    assert one(LOGITS, Sampling(1, logprobs=1, allowed_ids=(5,))).top[0][0] == 2, "the model's own"
    (fault,) = sample_tokens(LOGITS[None], [asking(Sampling(1, allowed_ids=(1, 6)), [0])])
    assert fault == SamplingFault("allowed_token_ids: the model has 6 ids, and one is none")


def test_logprobs_are_of_the_model_whatever_is_done_to_its_logits() -> None:
    """Raw logprobs: neither temperature nor penalties, bias, cuts nor masks show in them."""
    changed = {"top_k": 1, "logit_bias": ((1, 50.0),), "repetition_penalty": 3.0, "min_p": 0.5}
    asks = [Sampling(1, t, 1, (2,), 6) for t in (0.0, 0.3, 3.0)]
    asks += [Sampling(1, 1.0, 1, (2,), 6, min_tokens=9, **changed)]
    tokens = [one(LOGITS, ask) for ask in asks]
    assert len({token.top for token in tokens}) == 1
    assert tokens[3].id == 1 and tokens[3].logprob == dict(tokens[0].top)[1]


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
def test_known_ids_are_scored_as_sampled_ones_are(rows: int) -> None:
    wide = torch.stack([noisy(1000, seed, ties=True) for seed in range(rows)])
    ids = wide.argmax(-1).tolist()
    asks = [asking(Sampling(1, logprobs=4), [0])] * rows
    scored = score_prompt(wide, ids, 4, 10)
    assert all(isinstance(token, ScoredToken) and token.rank == 1 for token in scored)
    plain = [Token(token.id, token.logprob, token.top) for token in scored]
    assert plain == sample_tokens(wide, asks)


def test_a_scored_id_has_its_place_among_all_ids() -> None:
    row = noisy(1000, 3, ties=True)
    (token,) = score_prompt(row[None], [0], 1000, 1)
    assert isinstance(token, ScoredToken)
    order = [index for index, _ in token.top]
    for token_id in (*order[:5], 17, 500, 999, *order[-5:]):
        (scored,) = score_prompt(row[None], [token_id], 2, 1)
        assert isinstance(scored, ScoredToken)
        assert scored.rank == 1 + order.index(token_id) and len(scored.top) == 2


# ---- a row among others --------------------------------------------------------------------------


def crowd(count: int, vocab: int) -> list[Sequence]:
    """Sequences that ask for all kinds of things, a third of them for nothing."""
    rng = random.Random(5)
    result = []
    for index in range(count):
        extras = {
            "top_k": rng.choice([0, 20]),
            "top_p": rng.choice([1.0, 0.9]),
            "min_p": rng.choice([0.0, 0.05]),
            "presence_penalty": rng.choice([0.0, 0.5]),
            "repetition_penalty": rng.choice([1.0, 1.4]),
            "logit_bias": rng.choice([(), ((7, 3.0),)]),
            "min_tokens": rng.choice([0, 30]),
            "logprobs": rng.choice([None, 3]),
        }
        sampling = Sampling(
            99, rng.choice([0.0, 0.9]), index, (3, 9), **(extras if index % 3 else {})
        )
        ids = [rng.choices(range(vocab), k=rng.randint(1, 20)) for _ in range(2)]
        result.append(asking(sampling, *ids))
    return result


def test_a_row_gets_the_same_bits_alone_and_in_any_company() -> None:
    rows, vocab = 48, 3001
    logits = torch.stack([noisy(vocab, seed, ties=True) for seed in range(rows)])
    together = sample_tokens(logits, crowd(rows, vocab))
    assert together == [
        sample_tokens(logits[index : index + 1], [seq])[0]
        for index, seq in enumerate(crowd(rows, vocab))
    ]
    order = random.Random(1).sample(range(rows), rows)
    shuffled = crowd(rows, vocab)
    again = sample_tokens(logits[order], [shuffled[index] for index in order])
    assert again == [together[index] for index in order]


def test_bf16_logits_are_sampled_as_their_float32_values() -> None:
    logits = torch.stack([noisy(3001, seed) for seed in range(12)]).bfloat16()
    assert sample_tokens(logits, crowd(12, 3001)) == sample_tokens(logits.float(), crowd(12, 3001))


def test_the_logits_are_left_as_they_were() -> None:
    logits = torch.stack([noisy(3001, seed) for seed in range(12)])
    before = logits.clone()
    sample_tokens(logits, crowd(12, 3001))
    assert torch.equal(logits, before)


def test_greedy_rows_without_extras_cost_nothing_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(sampler, "_choose")
    monkeypatch.delattr(sampler, "_with_logprobs")
    plain = Sampling(
        9, stop_ids=(1,), seed=3, top_k=5, min_tokens=2
    )  # greedy: a cut changes nothing
    seqs = [asking(plain, [1, 2], [3, 4]) for _ in range(64)]
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0))
    assert sample_tokens(logits, seqs) == [Token(index) for index in logits.argmax(-1).tolist()]


# ---- rows that cannot be sampled -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("spot", "kind"),
    [((slice(None), -math.inf), "only -inf"), ((4, math.nan), "NaN"), ((4, math.inf), "infinite")],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_damaged_row_is_a_fault_that_names_its_position_and_no_other_row(
    spot: tuple, kind: str, temperature: float
) -> None:
    logits = torch.stack([LOGITS] * 3)
    logits[1, spot[0]] = spot[1]
    ask = Sampling(1, temperature, logprobs=2, top_p=0.9)
    first, fault, last = sample_tokens(logits, [asking(ask, [0] * 17) for _ in range(3)])
    assert first == last == one(LOGITS, ask, 17)
    assert isinstance(fault, SamplingFault)
    assert f"{kind} logits at position 17" in fault.reason
    assert "damaged weights or overflow" in fault.reason
    assert score_prompt(logits, [0, 0, 0], 0, 16)[1] == fault


def test_minus_infinity_in_places_is_no_damage() -> None:
    logits = LOGITS.clone()
    logits[[2, 3]] = -torch.inf
    asks = [Sampling(1), Sampling(1, 1.0, top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.3)]
    for ask in asks:
        assert one(logits, ask).id in (0, 1, 4, 5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_when_everything_is_masked_the_fault_says_so(temperature: float) -> None:
    ask = Sampling(9, temperature, stop_ids=(0, 1, 2, 77), min_tokens=1, min_p=0.1, top_p=0.5)
    assert sample_tokens(torch.zeros(1, 3), [asking(ask, [0, 1])]) == [
        SamplingFault("no token is possible at position 2")
    ]


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"min_p": 0.5}, {}])
def test_a_penalty_that_overflows_is_a_fault_of_its_request(cut: dict[str, float]) -> None:
    ask = Sampling(9, 1.0, repetition_penalty=1e-40, **cut)
    fault, other = sample_tokens(
        torch.stack([LOGITS] * 2), [asking(ask, [2]), asking(Sampling(9), [0])]
    )
    assert fault == SamplingFault("repetition_penalty: logits overflow, use a larger one")
    assert other == Token(2)


def test_what_breaks_in_one_row_is_a_fault_of_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise IndexError

    monkeypatch.setattr(sampler, "_nucleus", broken)
    sequences = [asking(Sampling(9, 1.0, top_p=0.5), [0]), asking(Sampling(9), [0])]
    fault, other = sample_tokens(torch.stack([LOGITS] * 2), sequences)
    assert fault == SamplingFault("no token could be sampled: the worker's log says why")
    assert other == Token(2)


def test_a_bias_of_an_id_that_the_model_does_not_have_is_named() -> None:
    ask = Sampling(9, logit_bias=((6, 1.0),))
    fault, other = sample_tokens(
        torch.stack([LOGITS] * 2), [asking(ask, [0]), asking(Sampling(9), [0])]
    )
    assert fault == SamplingFault("logit_bias: 6 is none of the model's 6 ids")
    assert other == Token(2)


# ---- on the wire ---------------------------------------------------------------------------------


def test_parameters_survive_the_wire_and_those_of_an_older_peer_are_neutral() -> None:
    full = Sampling(9, 0.5, 3, (1, 2), 4, 5, 0.6, 0.7, 0.8, 0.9, 1.1, ((3, -2.0),), 4, 0)
    full = msgspec.structs.replace(full, grammar=Grammar("regex", "a+"))
    packed = msgspec.msgpack.encode(full)
    assert msgspec.msgpack.decode(packed, type=Sampling) == full
    older = msgspec.msgpack.encode([9, 0.0, 3, [1], 0])
    decoded = msgspec.msgpack.decode(older, type=Sampling)
    assert decoded == Sampling(9, 0.0, 3, (1,), 0)
    assert one(LOGITS, decoded).id == 2
