"""Next tokens from logits. A token is a function of (ids, parameters, seed, position) alone.

A step is one call over its rows. Greedy rows without extras share one argmax. Any other row is
worked on alone, in numpy, so that its bits do not depend on the rows beside it. What a sequence's
ids say (counts, the state of its grammar) is kept with the sequence as `SamplerState`, and rebuilt
from the ids where that is missing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np
import torch

from ..protos.frames import Sampling, ScoredToken, Token
from .errors import InvalidRequest
from .grammar import GrammarCompiler, GrammarMatcher
from .sequence import Sequence
from .thinking import ThinkingWatch

log = logging.getLogger(__name__)

#: Gives the values of some parameters, to be compared with those that change nothing.
ReadParameters: TypeAlias = Callable[[Sampling], tuple[object, ...]]

#: Parameters that forbid unlikely ids to a row that is drawn.
CUTTING = ("top_k", "top_p", "min_p")
#: Parameters that leave the order of a row's logits as it is. `min_tokens` has an effect only until
#: the answer has as many tokens; that is asked for each token.
ORDER_KEEPING = frozenset(
    {
        "max_tokens",
        "temperature",
        "seed",
        "stop_ids",
        "logprobs",
        "logprob_ids",
        "min_tokens",
        "prompt_logprobs",
        "n",
        *CUTTING,
    }
)
#: Parameters that a GPU's sampler honours (`gpu.slots`); a request with any other one is drawn for
#: by the host. The names of `CUTTING` are repeated here on purpose: one that is added to `CUTTING`
#: is drawn by the host until a GPU's sampler knows it.
DEVICE_PARAMETERS = (ORDER_KEEPING - set(CUTTING)) | {
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "grammar",
    "allowed_ids",
    "thinking",
}
_NEUTRAL = Sampling(max_tokens=1)  #: Every parameter has the value that changes nothing.

#: Parameters that may change the order of a row's logits. One that is added to `Sampling` counts as
#: such, so the argmax of the logits as they are is not taken for it.
ADJUSTING = tuple(name for name in Sampling.__struct_fields__ if name not in ORDER_KEEPING)
_adjusting_values: ReadParameters = attrgetter(*ADJUSTING)
_UNADJUSTED = _adjusting_values(_NEUTRAL)

#: Parameters that no GPU honours, as one that is added to `Sampling`: the host draws for them.
UNKNOWN = tuple(name for name in Sampling.__struct_fields__ if name not in DEVICE_PARAMETERS)


def _unknown_values(sampling: Sampling) -> tuple[object, ...]:
    """Return the values of the parameters that no GPU honours."""
    return tuple(getattr(sampling, name) for name in UNKNOWN)


_UNKNOWN_NEUTRAL = _unknown_values(_NEUTRAL)

#: Why a row's penalized logits give no token.
OVERFLOW = "repetition_penalty: logits overflow, use a larger one"

#: So many rows of a prompt have their logits in memory at once, when their logprobs are wanted: of
#: a vocabulary of 150,000 ids these are 38 MB, and all rows of a step would be gigabytes.
SCORED_ROWS = 64


@dataclass(frozen=True, slots=True)
class SamplingFault:
    """Why a sequence cannot go on."""

    reason: str  #: For the client.
    model_damaged: bool = False  #: True: the model's numbers are at fault, not the request.


@dataclass(slots=True)
class SamplerState:
    """What sampling must know of a sequence's ids: counts for penalties, and its grammar's state."""

    #: Which ids are in the prompt or the answer, bool [vocab]; None until a penalty asks.
    present: np.ndarray | None = None

    #: How often each id is in the answer, int32 [vocab]; None until a penalty asks.
    answer_counts: np.ndarray | None = None

    #: So many of the sequence's ids are counted in the two arrays.
    counted_tokens: int = 0

    #: Where the answer stands in its grammar; None until that is asked, or without a grammar.
    matcher: GrammarMatcher | None = None

    #: Follows the answer's thinking; None if that is not bounded.
    thinking: ThinkingWatch | None = None

    #: What a GPU is told of the sequence (`gpu.slots.SequenceFields`); None until it is asked.
    device_fields: Any = None


def gumbel_noise(seed: int, position: int, vocab: int, token_ids: np.ndarray | slice) -> np.ndarray:
    """Return the Gumbel noise of one draw for some ids, float64 [len(token_ids)].

    Argmax of logits plus this noise is a draw from their softmax. The uniform numbers are numpy's
    Philox (Salmon et al., SC 2011) keyed by (seed, position), so there is no state. The noise of an
    id is the same whichever other ids are in `token_ids`.
    """
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF, position], np.uint64)
    uniform = np.random.Generator(np.random.Philox(key=key)).random(vocab)[token_ids]
    return -np.log(-np.log(np.clip(uniform, 1e-300, None)))


def sample_tokens(
    logits: torch.Tensor, sequences: list[Sequence], grammars: GrammarCompiler | None = None
) -> list[Token | SamplingFault]:
    """Return the next token of each sequence, or why it has none.

    `logits` are [len(sequences), vocab], float32 or bf16. A token is greedy at temperature 0. Else
    it is argmax(logits / temperature + Gumbel noise), which is a draw from the softmax
    (Gumbel-max). Logprobs are of the model's distribution: temperature 1, before any penalty. Of
    equal logits the lower id is the larger.

    `grammars` is needed if a sequence has a grammar. Sets `grammar_complete` of a sequence whose
    grammar cannot go on behind its token.
    """
    rows = logits.float().cpu().numpy()
    largest_ids = rows.argmax(axis=1)  # NaN counts as the largest, so this finds any NaN of a row
    peaks = rows[np.arange(len(largest_ids)), largest_ids].tolist()
    results: list[Token | SamplingFault] = []
    for row, sequence, peak, largest_id in zip(
        rows, sequences, peaks, largest_ids.tolist(), strict=True
    ):
        position = len(sequence.token_ids)
        if not math.isfinite(peak):
            results.append(_damage(peak, position))
            continue
        try:
            is_argmax = sequence.sampling.temperature == 0 and keeps_logits(sequence)
            token_id = largest_id if is_argmax else _choose(row, sequence, grammars)
        except InvalidRequest as error:
            results.append(SamplingFault(str(error)))
            continue
        except Exception:  # one request's parameters must not end the thread and all streams
            log.exception("sampling for %s", sequence.attempt_key[0])
            results.append(SamplingFault("no token could be sampled: the worker's log says why"))
            continue
        sampling = sequence.sampling
        if token_id is None:
            results.append(no_token_fault(position))
        elif sampling.logprobs is None:
            results.append(Token(token_id))
        elif sampling.logprob_ids:
            results.append(_with_logprobs_of(row, token_id, sampling.logprob_ids))
        else:
            results.append(_with_logprobs(row, token_id, sampling.logprobs))
    return results


def score_prompt(
    logits: torch.Tensor, token_ids: list[int], count: int, position: int
) -> list[ScoredToken | SamplingFault]:
    """Return the prompt's own ids with their logprobs and ranks, and the `count` largest logprobs.

    `token_ids` [T] stand at `position` and behind; `logits` [T, vocab] are those that predict them.
    A fault stands in place of an id whose logits are no finite numbers.
    """
    rows = logits.float().cpu().numpy()
    peaks = rows.max(axis=1).tolist()
    results: list[ScoredToken | SamplingFault] = []
    for index, (row, token_id, peak) in enumerate(zip(rows, token_ids, peaks, strict=True)):
        fault = find_damage(peak, position + index)
        results.append(fault or _with_rank(row, token_id, count))
    return results


def no_token_fault(position: int) -> SamplingFault:
    """Return the fault of a row of which every id is forbidden."""
    return SamplingFault(f"no token is possible at position {position}")


def find_damage(peak: float, position: int) -> SamplingFault | None:
    """Return the fault of a row whose largest logit is `peak`, or None if that is a finite number.

    `position` is that of the row's next token, for the message.
    """
    return None if math.isfinite(peak) else _damage(peak, position)


def _damage(peak: float, position: int) -> SamplingFault:
    """Return the fault of a row whose largest logit is not a finite number."""
    if math.isnan(peak):
        kind = "NaN"
    elif peak > 0:
        kind = "infinite"
    else:
        kind = "only -inf"
    reason = f"the model gave {kind} logits at position {position}: damaged weights or overflow"
    return SamplingFault(reason, model_damaged=True)


def keeps_logits(sequence: Sequence) -> bool:
    """Return whether the next token follows from the logits as they are, seed and position."""
    sampling = sequence.sampling
    return (
        _adjusting_values(sampling) == _UNADJUSTED
        and sequence.generated_tokens >= sampling.min_tokens
    )


def is_device_drawable(sampling: Sampling) -> bool:
    """Return whether a GPU's sampler knows every parameter that has an effect here."""
    return _unknown_values(sampling) == _UNKNOWN_NEUTRAL


def _choose(row: np.ndarray, sequence: Sequence, grammars: GrammarCompiler | None) -> int | None:
    """Return the next id from one row of logits, float32 [vocab], or None if no id is possible.

    Raises InvalidRequest where the parameters or the grammar cannot go on.
    """
    sampling = sequence.sampling
    state = current_state(sequence, grammars)
    row = _adjusted_logits(row, sequence, state)
    token_id = int(row.argmax())
    if row[token_id] == -np.inf:  # the largest is, so all are: every id is forbidden
        return None
    if not np.isfinite(row[token_id]):
        raise InvalidRequest(OVERFLOW)
    if sampling.temperature != 0:
        scaled = row.astype(np.float64) / sampling.temperature
        token_id = _draw(scaled, sampling, len(sequence.token_ids))
    consume_choice(sequence, state, token_id)
    return token_id


def consume_choice(sequence: Sequence, state: SamplerState, token_id: int) -> None:
    """Advance the sequence's grammar, if it has one, by the id that was chosen.

    Raises InvalidRequest where the grammar cannot go on.
    """
    if state.matcher and token_id not in sequence.sampling.stop_ids:
        state.matcher.consume([token_id])
        sequence.grammar_complete = state.matcher.complete


def current_state(sequence: Sequence, grammars: GrammarCompiler | None) -> SamplerState:
    """Return the sequence's state, whose matcher has consumed every generated id.

    Raises InvalidRequest where the grammar cannot be used, or does not fit the ids.
    """
    state: SamplerState = sequence.sampler_state or SamplerState()
    sequence.sampler_state = state
    grammar = sequence.sampling.grammar
    if grammar is None:
        return state
    if state.matcher is None:
        assert grammars is not None
        state.matcher = grammars.matcher(grammar, sequence.sampling.stop_ids)
    consumed = state.matcher.consumed_tokens
    if consumed < sequence.generated_tokens:
        state.matcher.consume(list(sequence.token_ids[sequence.prompt_tokens + consumed :]))
    return state


def _count_tokens(
    sequence: Sequence, state: SamplerState, vocab: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return `state.present` and `state.answer_counts`, brought up to the last id."""
    if state.present is None or state.answer_counts is None:
        state.present = np.zeros(vocab, bool)
        state.answer_counts = np.zeros(vocab, np.int32)
    uncounted = np.array(sequence.token_ids[state.counted_tokens :], np.int64)
    state.present[uncounted] = True
    prompt_part = max(0, sequence.prompt_tokens - state.counted_tokens)
    np.add.at(state.answer_counts, uncounted[prompt_part:], 1)
    state.counted_tokens = len(sequence.token_ids)
    return state.present, state.answer_counts


def _adjusted_logits(row: np.ndarray, sequence: Sequence, state: SamplerState) -> np.ndarray:
    """Return a copy of the row with penalties, bias and masks; an id at -inf must not come."""
    sampling = sequence.sampling
    # no bias, penalty or mask may keep the closing tag of thinking from coming
    required_id = find_required_id(sequence, state)
    if required_id is not None and 0 <= required_id < len(row):
        required_row = np.full_like(row, -np.inf)
        required_row[required_id] = 0
        return required_row
    row = row.copy()
    if sampling.repetition_penalty != 1 or sampling.frequency_penalty or sampling.presence_penalty:
        _apply_penalties(row, sequence, state)
    check_biased_ids(sampling, len(row))
    for token_id, bias in sampling.logit_bias:
        row[token_id] += np.float32(bias)
    if sampling.allowed_ids:
        row = _only(row, sampling.allowed_ids)
    if sequence.generated_tokens < sampling.min_tokens:
        row[[stop_id for stop_id in sampling.stop_ids if 0 <= stop_id < len(row)]] = -np.inf
    if state.matcher:
        row[~state.matcher.allowed] = -np.inf
    return row


def find_required_id(sequence: Sequence, state: SamplerState) -> int | None:
    """Return the id that must come, as the budget of thinking is spent; None if any may."""
    if sequence.sampling.thinking is None:
        return None
    if state.thinking is None:
        state.thinking = ThinkingWatch(sequence.sampling.thinking)
    return state.thinking.required_id(sequence.token_ids, sequence.prompt_tokens)


def _only(row: np.ndarray, allowed_ids: tuple[int, ...]) -> np.ndarray:
    """Return the row with -inf at all ids but these.

    Raises InvalidRequest if one of them is not an id of the model.
    """
    check_allowed_ids(allowed_ids, len(row))
    allowed_row = np.full_like(row, -np.inf)
    indices = np.array(allowed_ids, np.int64)
    allowed_row[indices] = row[indices]
    return allowed_row


def check_biased_ids(sampling: Sampling, vocab: int) -> None:
    """Raise InvalidRequest if an id of `logit_bias` is none of the model's."""
    for token_id, _ in sampling.logit_bias:
        if not 0 <= token_id < vocab:
            raise InvalidRequest(f"logit_bias: {token_id} is none of the model's {vocab} ids")


def check_allowed_ids(allowed_ids: tuple[int, ...], vocab: int) -> None:
    """Raise InvalidRequest if one of `allowed_ids` is none of the model's."""
    if not all(0 <= token_id < vocab for token_id in allowed_ids):
        raise InvalidRequest(f"allowed_token_ids: the model has {vocab} ids, and one is none")


def check_logprob_ids(logprob_ids: tuple[int, ...], vocab: int) -> None:
    """Raise InvalidRequest if one of `logprob_ids` is none of the model's."""
    if not all(0 <= logprob_id < vocab for logprob_id in logprob_ids):
        raise InvalidRequest(f"logprob_token_ids: the model has {vocab} ids, and one is none")


def _apply_penalties(row: np.ndarray, sequence: Sequence, state: SamplerState) -> None:
    """Apply the repetition, frequency and presence penalties to `row`, in this order."""
    sampling = sequence.sampling
    present, answer_counts = _count_tokens(sequence, state, len(row))
    token_ids = present.nonzero()[0]
    factor = np.float32(sampling.repetition_penalty)
    with np.errstate(over="ignore"):  # `_choose` tells the client of an overflow
        penalized = row[token_ids]
        row[token_ids] = np.where(penalized < 0, penalized * factor, penalized / factor)
    token_ids = answer_counts.nonzero()[0]
    counts = answer_counts[token_ids].astype(np.float32)
    row[token_ids] -= np.float32(sampling.frequency_penalty) * counts
    row[token_ids] -= np.float32(sampling.presence_penalty)


def _draw(scaled: np.ndarray, sampling: Sampling, position: int) -> int:
    """Draw an id from the softmax of `scaled`, float64 [vocab], cut by min_p, top_k and top_p."""
    peak = scaled.max()
    token_ids = np.arange(len(scaled))
    if sampling.min_p > 0:
        token_ids = token_ids[scaled >= peak + math.log(min(sampling.min_p, 1.0))]
    if 0 < sampling.top_k < len(token_ids):
        token_ids = token_ids[_largest(scaled[token_ids], sampling.top_k)]
    if sampling.top_p < 1:
        token_ids = token_ids[_nucleus(np.exp(scaled[token_ids] - peak), sampling.top_p)]
    noise = gumbel_noise(sampling.seed, position, len(scaled), token_ids)
    return int(token_ids[(scaled[token_ids] + noise).argmax()])


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of the `count` largest values; of equal ones the lower index."""
    count = min(count, len(values))
    if count == 0:
        return np.zeros(0, np.int64)
    threshold = np.partition(values, -count)[-count]
    return _at_least(values, threshold, count)


def _nucleus(weights: np.ndarray, share: float) -> np.ndarray:
    """Return the indices of the largest weights whose sum reaches `share` of all weights.

    There are as few of them as can be, and at least one. Weights below (1 - share) / n of the sum
    of all n are outside even if all of these are, so they are not sorted. Values are sorted, not
    indices: numpy has vector instructions for that.
    """
    total = weights.sum()
    candidates = weights[weights * len(weights) >= (1 - share) * total]
    descending = np.sort(candidates)[::-1]
    count = 1 + int((np.cumsum(descending)[:-1] < share * total).sum())
    return _at_least(weights, descending[count - 1], count)


def _at_least(values: np.ndarray, threshold: float, count: int) -> np.ndarray:
    """Return `count` indices: of all values above the threshold, then of those equal to it."""
    above = (values > threshold).nonzero()[0]
    equal = (values == threshold).nonzero()[0]
    return np.concatenate([above, equal[: count - len(above)]])


def _with_logprobs(row: np.ndarray, token_id: int, count: int) -> Token:
    """Return the token with its logprob and the `count` largest, of float32 logits [vocab]."""
    logprobs = _logprobs_of(row)
    return _token_of(logprobs, token_id, np.sort(_largest(logprobs, count)))


def _with_rank(row: np.ndarray, token_id: int, count: int) -> ScoredToken:
    """As `_with_logprobs`, with the token's rank: of equal logprobs the lower id comes first."""
    logprobs = _logprobs_of(row)
    token = _token_of(logprobs, token_id, np.sort(_largest(logprobs, count)))
    larger = int((logprobs > logprobs[token_id]).sum())
    equal_before = int((logprobs[:token_id] == logprobs[token_id]).sum())
    return ScoredToken(token.id, token.logprob, token.top, 1 + larger + equal_before)


def _with_logprobs_of(
    row: np.ndarray, token_id: int, logprob_ids: tuple[int, ...]
) -> Token | SamplingFault:
    """Return the token, with the logprobs of its own id and of `logprob_ids`."""
    try:
        check_logprob_ids(logprob_ids, len(row))
    except InvalidRequest as error:
        return SamplingFault(str(error))
    top_ids = np.unique(np.array([*logprob_ids, token_id], np.int64))
    return _token_of(_logprobs_of(row), token_id, top_ids)


def _logprobs_of(row: np.ndarray) -> np.ndarray:
    """Return the logprobs of float32 logits [vocab]."""
    logprobs: np.ndarray = torch.log_softmax(torch.from_numpy(row), dim=-1).numpy()
    return logprobs


def _token_of(logprobs: np.ndarray, token_id: int, top_ids: np.ndarray) -> Token:
    """Return the token with the logprobs of `top_ids`, which are sorted, the largest first."""
    top_ids = top_ids[np.argsort(-logprobs[top_ids], kind="stable")]
    top = tuple(zip(top_ids.tolist(), logprobs[top_ids].tolist(), strict=True))
    return Token(token_id, float(logprobs[token_id]), top)
