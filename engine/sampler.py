"""Next tokens from logits. A token is a function of (ids, parameters, seed, position) alone.

A step is one call over its rows. Greedy rows without extras share one argmax; a row that asks for
more is worked on alone, in numpy, so that its bits do not depend on the rows beside it. What a
sequence's ids say (counts, the state of its grammar) is kept with the sequence, and rebuilt from
the ids where that is missing.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import numpy as np
import torch

from ..protos.frames import Sampling, Token
from .errors import InvalidRequest
from .grammar import Grammars, Matcher
from .sequence import Sequence

log = logging.getLogger(__name__)

SLICE = 64  #: prompt rows whose logits are in memory at once


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a sequence cannot go on; `damage`: the model's numbers are at fault, not the request."""

    reason: str
    damage: bool = False


@dataclass(slots=True)
class Memory:
    """What a sequence's ids say. The arrays are [vocab], of the first `known` ids."""

    seen: np.ndarray | None = None  #: bool: in prompt or answer
    counts: np.ndarray | None = None  #: int32: how often in the answer
    known: int = 0
    matcher: Matcher | None = None


def gumbel(seed: int, position: int, vocab: int, ids: np.ndarray | slice) -> np.ndarray:
    """Float64 Gumbel noise of one draw for `ids`: Philox keyed by (seed, position), no state.

    The noise of an id is the same whichever others are asked for.
    """
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF, position], np.uint64)
    uniform = np.random.Generator(np.random.Philox(key=key)).random(vocab)[ids]
    return -np.log(-np.log(np.clip(uniform, 1e-300, None)))


def sample(
    logits: torch.Tensor, sequences: list[Sequence], grammars: Grammars | None = None
) -> list[Token | Fault]:
    """The next token of each sequence from `logits` [len(sequences), vocab], float32 or bf16.

    Greedy at temperature 0; else argmax(logits / temperature + Gumbel noise), which is a draw from
    the softmax (Gumbel-max). Logprobs are of the model's distribution: temperature 1, before any
    penalty. Of equal logits the lower id is the larger. Sets `complete` of a sequence whose
    grammar cannot go on behind its token.
    """
    wide = logits.float().cpu().numpy()
    best = wide.argmax(axis=1)  # a NaN is the largest, so the largest tells of all
    peaks = wide[np.arange(len(best)), best].tolist()
    results: list[Token | Fault] = []
    for row, seq, peak, largest in zip(wide, sequences, peaks, best.tolist(), strict=True):
        sampling = seq.sampling
        if not math.isfinite(peak):
            results.append(_damage(peak, len(seq.token_ids)))
            continue
        try:
            chosen = largest if _plain(seq) else _choose(row, seq, grammars)
        except InvalidRequest as error:
            results.append(Fault(str(error)))
            continue
        except Exception:  # of one request's parameters: no end of the thread and all streams
            log.exception("sampling for %s", seq.attempt_key[0])
            results.append(Fault("no token could be sampled: the worker's log says why"))
            continue
        if chosen is None:
            results.append(Fault(f"no token is possible at position {len(seq.token_ids)}"))
        elif sampling.logprobs is None:
            results.append(Token(chosen))
        else:
            results.append(_scored(row, chosen, sampling.logprobs))
    return results


def score(logits: torch.Tensor, ids: list[int], count: int, position: int) -> list[Token | Fault]:
    """The logprobs of the known `ids` [T], which begin at `position`; logits are [T, vocab]."""
    wide = logits.float().cpu().numpy()
    peaks = wide.max(axis=1).tolist()
    return [
        _scored(row, chosen, count) if math.isfinite(peak) else _damage(peak, position + index)
        for index, (row, chosen, peak) in enumerate(zip(wide, ids, peaks, strict=True))
    ]


def damage(peak: float, position: int) -> Fault | None:
    """What is said about a row by its largest logit: nothing, if that is a finite number."""
    return None if math.isfinite(peak) else _damage(peak, position)


def _damage(peak: float, position: int) -> Fault:
    """What is said about a row whose largest logit is `peak`, not a finite number."""
    kind = "NaN" if math.isnan(peak) else "infinite" if peak > 0 else "only -inf"
    reason = f"the model gave {kind} logits at position {position}: damaged weights or overflow"
    return Fault(reason, damage=True)


def _plain(seq: Sequence) -> bool:
    """Its next token is the largest logit, whatever the ids are."""
    s = seq.sampling
    return (
        s.temperature == 0
        and s.repetition_penalty == 1
        and not (s.presence_penalty or s.frequency_penalty or s.logit_bias)
        and seq.generated_tokens >= s.min_tokens
        and s.grammar is None
    )


def _choose(row: np.ndarray, seq: Sequence, grammars: Grammars | None) -> int | None:
    """The next id from one row of logits, float32 [vocab]; None if nothing is possible."""
    sampling = seq.sampling
    memory = _memory(seq, grammars)
    row = _adjusted(row, seq, memory)
    chosen = int(row.argmax())
    if row[chosen] == -np.inf:
        return None
    if not np.isfinite(row[chosen]):
        raise InvalidRequest("repetition_penalty: logits overflow, use a larger one")
    if sampling.temperature != 0:
        chosen = _draw(row.astype(np.float64) / sampling.temperature, sampling, len(seq.token_ids))
    if memory.matcher and chosen not in sampling.stop_ids:
        memory.matcher.feed([chosen])
        seq.grammar_complete = memory.matcher.complete
    return chosen


def _memory(seq: Sequence, grammars: Grammars | None) -> Memory:
    """The sequence's memory; its matcher has seen every generated id. Raises InvalidRequest."""
    memory = seq.sampler_state = seq.sampler_state or Memory()
    if seq.sampling.grammar is not None:
        if memory.matcher is None:
            assert grammars is not None
            memory.matcher = grammars.matcher(seq.sampling.grammar, seq.sampling.stop_ids)
        if memory.matcher.fed < seq.generated_tokens:
            memory.matcher.feed(seq.token_ids[seq.prompt_tokens + memory.matcher.fed :])
    return memory


def _counts(seq: Sequence, memory: Memory, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """`seen` and `counts`, up to the last id."""
    if memory.seen is None or memory.counts is None:
        memory.seen, memory.counts = np.zeros(vocab, bool), np.zeros(vocab, np.int32)
    fresh = np.array(seq.token_ids[memory.known :], np.int64)
    memory.seen[fresh] = True
    np.add.at(memory.counts, fresh[max(0, seq.prompt_tokens - memory.known) :], 1)
    memory.known = len(seq.token_ids)
    return memory.seen, memory.counts


def _adjusted(row: np.ndarray, seq: Sequence, memory: Memory) -> np.ndarray:
    """A copy of the row with penalties, bias and masks; -inf is what must not come."""
    s, row = seq.sampling, row.copy()
    if s.repetition_penalty != 1 or s.frequency_penalty or s.presence_penalty:
        seen, counts = _counts(seq, memory, len(row))
        ids, factor = seen.nonzero()[0], np.float32(s.repetition_penalty)
        with np.errstate(over="ignore"):  # said to the client
            row[ids] = np.where(row[ids] < 0, row[ids] * factor, row[ids] / factor)
        ids = counts.nonzero()[0]
        row[ids] -= np.float32(s.frequency_penalty) * counts[ids].astype(np.float32)
        row[ids] -= np.float32(s.presence_penalty)
    for index, bias in s.logit_bias:
        if not 0 <= index < len(row):
            raise InvalidRequest(f"logit_bias: {index} is none of the model's {len(row)} ids")
        row[index] += np.float32(bias)
    if seq.generated_tokens < s.min_tokens:
        row[[stop for stop in s.stop_ids if 0 <= stop < len(row)]] = -np.inf
    if memory.matcher:
        row[~memory.matcher.allowed] = -np.inf
    return row


def _draw(scaled: np.ndarray, sampling: Sampling, position: int) -> int:
    """One draw from the softmax of `scaled`, float64 [vocab], cut by min_p, top_k and top_p."""
    s, peak = sampling, scaled.max()
    ids = np.arange(len(scaled))
    if s.min_p > 0:
        ids = ids[scaled >= peak + math.log(min(s.min_p, 1.0))]
    if 0 < s.top_k < len(ids):
        ids = ids[_largest(scaled[ids], s.top_k)]
    if s.top_p < 1:
        ids = ids[_nucleus(np.exp(scaled[ids] - peak), s.top_p)]
    return int(ids[(scaled[ids] + gumbel(s.seed, position, len(scaled), ids)).argmax()])


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` largest values; of equal ones the lower index."""
    count = min(count, len(values))
    if count == 0:
        return np.zeros(0, np.int64)
    return _first(values, np.partition(values, -count)[-count], count)


def _nucleus(weights: np.ndarray, share: float) -> np.ndarray:
    """Indices of the fewest largest weights whose sum reaches `share` of the whole, at least one.

    Weights under (1 - share) / n of the whole are outside even if all are: they are not sorted.
    Values are sorted, not indices: numpy has vector instructions for that.
    """
    whole = weights.sum()
    inside = np.sort(weights[weights * len(weights) >= (1 - share) * whole])[::-1]
    count = 1 + int((np.cumsum(inside)[:-1] < share * whole).sum())
    return _first(weights, inside[count - 1], count)


def _first(values: np.ndarray, least: float, count: int) -> np.ndarray:
    """Indices of the values above `least`, then of those equal to it, `count` in all."""
    above, equal = (values > least).nonzero()[0], (values == least).nonzero()[0]
    return np.concatenate([above, equal[: count - len(above)]])


def _scored(row: np.ndarray, chosen: int, count: int) -> Token:
    """The token with its logprob and the `count` largest, of float32 logits [vocab]."""
    logprobs = torch.log_softmax(torch.from_numpy(row), dim=-1).numpy()
    ids = np.sort(_largest(logprobs, count))
    ids = ids[np.argsort(-logprobs[ids], kind="stable")]
    top = tuple(zip(ids.tolist(), logprobs[ids].tolist(), strict=True))
    return Token(chosen, float(logprobs[chosen]), top)
