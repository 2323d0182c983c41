"""The next id of each row on the device, without a sort and without the host.

The result is that of `engine.sampler`, row by row. A row's bits follow from its own logits and
parameters: each row is reduced in a fixed order, whatever stands beside it.

- `_scan` adjusts a chunk of a row (penalties, bias, masks) and finds its best id.
- `_cut` finds where top_k and top_p end. It searches for the value at the border: it counts the ids
  at or above some values, or sums their weights, until two neighbouring float32 values are left. Two
  passes over a row leave few ids to search among. Of equal values the lowest ids are inside. Only
  rows that have such a parameter are searched.
- `_draw` finds the best id of a chunk of such a row, among those inside.
- `_pick` takes the best chunk, counts the id, and works out its logprob.
- `_list` finds the likeliest ids of rows that want them, or the logprobs of ids that they name.

The noise is that of `engine.sampler.gumbel_noise`: Philox 4x64-10 (Salmon et al., SC 2011) keyed by
(seed, position), as numpy counts it, in float64. So a seed gives the same draws on a CPU and here,
and no generator's state is kept, or travels.

Weights for top_p are float32, and so are sums of SPAN of them; sums of these are float64. numpy adds
in another order. So the last id inside may be another one where its border is within
`NUCLEUS_TOLERANCE` of top_p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .plan import LIST_SIZE, PROMPT_BIT, TOP_SIZE, RowField

#: Ids of a program (Triton's unit of parallel work): a row of 128,256 has 126 of them.
CHUNK = 1024

#: How far the share of a nucleus may be from the CPU sampler's: the error of a float32 `exp`.
NUCLEUS_TOLERANCE = 1e-5

#: Values that a pass of the search for a border counts above: it narrows the range so many times.
PIVOTS = 8

#: Ids that the search reads at a time, and its warps.
SPAN = 4096
SEARCH_WARPS = 8

#: Passes of the search over all ids, before those are listed that are left. After a single one, most
#: ids of a model that finds all nearly equally likely would be left.
WHOLE_PASSES = tl.constexpr(2)

_POSITION = tl.constexpr(int(RowField.POSITION))
_SEED = tl.constexpr(int(RowField.SEED))
_DRAW = tl.constexpr(int(RowField.DRAW))
_TEMPERATURE = tl.constexpr(int(RowField.TEMPERATURE))
_TOP_K = tl.constexpr(int(RowField.TOP_K))
_TOP_P = tl.constexpr(int(RowField.TOP_P))
_MIN_P_LOG = tl.constexpr(int(RowField.MIN_P_LOG))
_SLOT = tl.constexpr(int(RowField.SLOT))
_COUNTED = tl.constexpr(int(RowField.COUNTED))
_REPETITION = tl.constexpr(int(RowField.REPETITION))
_FREQUENCY = tl.constexpr(int(RowField.FREQUENCY))
_PRESENCE = tl.constexpr(int(RowField.PRESENCE))
_BIASES = tl.constexpr(int(RowField.BIASES))
_FORBIDDEN = tl.constexpr(int(RowField.FORBIDDEN))
_FORBIDDEN_BEFORE = tl.constexpr(int(RowField.FORBIDDEN_BEFORE))
_MASKED = tl.constexpr(int(RowField.MASKED))
_REQUIRED = tl.constexpr(int(RowField.REQUIRED))
_LOGPROBS = tl.constexpr(int(RowField.LOGPROBS))
_NAMED = tl.constexpr(int(RowField.NAMED))
_LOGIT_ROW = tl.constexpr(int(RowField.LOGIT_ROW))
_LIST_SIZE = tl.constexpr(LIST_SIZE)
_TOP_SIZE = tl.constexpr(TOP_SIZE)
_PROMPT_BIT = tl.constexpr(PROMPT_BIT)
#: The largest int32 stands for no id: every id is lower.
_NO_ID = tl.constexpr(2147483647)


@triton.jit
def _philox(counter, key, key2):
    """Return four uint64 of each counter: ten rounds on (counter, 0, 0, 0), keyed by two words.

    The constants are the multipliers and the key increments of Philox 4x64.
    """
    a = counter
    b = tl.zeros_like(counter)
    c = tl.zeros_like(counter)
    d = tl.zeros_like(counter)
    for _ in tl.static_range(10):
        high = tl.umulhi(a, 0xD2E7470EE14C6C93 + tl.zeros_like(a))
        high2 = tl.umulhi(c, 0xCA5A826395121157 + tl.zeros_like(a))
        low = a * (0xD2E7470EE14C6C93 + tl.zeros_like(a))
        low2 = c * (0xCA5A826395121157 + tl.zeros_like(a))
        a = high2 ^ b ^ key
        b = low2
        c = high ^ d ^ key2
        d = low
        key += 0x9E3779B97F4A7C15 + tl.zeros_like(key)
        key2 += 0xBB67AE8584CAA73B + tl.zeros_like(key)
    return a, b, c, d


@triton.jit
def _best_of(value, ids):
    """Return the largest value and its id, the lowest id of equal values."""
    best = tl.max(value, 0)
    return best, tl.min(tl.where(value == best, ids, _NO_ID), 0)


@triton.jit
def _better_of(best, best_id, other, other_id):
    """Return the larger of two values and its id, the lower id of equal values."""
    lower_id = tl.where(other == best, tl.minimum(other_id, best_id), best_id)
    better_id = tl.where(other > best, other_id, lower_id)
    return tl.maximum(other, best), better_id


@triton.jit
def _number(rows, width, row, field):
    """Return a field of a packed row that is an integer."""
    return tl.load(rows + field * width + row)


@triton.jit
def _real(rows, width, row, field):
    """Return a field of a packed row that is the bits of a float64."""
    return tl.load(rows + field * width + row).to(tl.float64, bitcast=True)


@triton.jit
def _is_adjusted(rows, width, row):
    """Return whether a row's logits change before the draw."""
    changes = _number(rows, width, row, _SLOT) >= 0
    return changes | (_number(rows, width, row, _REQUIRED) >= 0)


@triton.jit
def _is_cut(rows, width, row):
    """Return whether some ids of a row are too unlikely to be drawn."""
    limited = _number(rows, width, row, _TOP_K) > 0
    limited = limited | (_real(rows, width, row, _TOP_P) < 1.0)
    limited = limited | (_real(rows, width, row, _MIN_P_LOG) > float("-inf"))
    return limited & (_real(rows, width, row, _TEMPERATURE) > 0)


@triton.jit
def _order(value):
    """Return an int64 for each float32, in the same order; equal zeros are equal."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value_of(order):
    """Return the float32 whose `_order` is given."""
    bits = order.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _penalize(value, index, inside, rows, width, row, slot, counts, vocab):
    """Return the values with the penalties of ids that the slot has counted."""
    counted = tl.load(counts + slot * vocab + index, mask=inside, other=0)
    # float64 rounded once is what float32 gives, whatever the compiler fuses
    wide = value.to(tl.float64)
    repetition = _real(rows, width, row, _REPETITION)
    repeated = tl.where(value < 0, wide * repetition, wide / repetition).to(tl.float32)
    value = tl.where(counted != 0, repeated, value)
    times = counted & (_PROMPT_BIT - 1)
    frequency = _real(rows, width, row, _FREQUENCY)
    often = (frequency * times.to(tl.float64)).to(tl.float32)
    once = _real(rows, width, row, _PRESENCE).to(tl.float32)
    return tl.where(times > 0, value - often - once, value)


@triton.jit
def _add_biases(value, index, list_ids, list_values, first_of_list, biases):
    """Return the values with the `biases` biases that a list begins with, 8 ids at a time."""
    lane = tl.arange(0, 8)
    for first in range(0, biases, 8):
        at = first_of_list + first + lane
        listed = tl.load(list_ids + at, mask=first + lane < biases, other=-1)
        bias = tl.load(list_values + at, mask=first + lane < biases, other=0.0)
        hit = index[None, :] == listed[:, None]
        value += tl.sum(tl.where(hit, bias[:, None], 0.0), 0)
    return value


@triton.jit
def _forbid(value, index, list_ids, first_forbidden, forbidden):
    """Return the values with -inf at the `forbidden` ids of a list from `first_forbidden` on."""
    lane = tl.arange(0, 8)
    for first in range(0, forbidden, 8):
        at = first_forbidden + first + lane
        listed = tl.load(list_ids + at, mask=first + lane < forbidden, other=-1)
        hit = (index[None, :] == listed[:, None]).to(tl.int32)
        value = tl.where(tl.max(hit, 0) > 0, float("-inf"), value)
    return value


@triton.jit
def _adjust(
    logit, index, inside, rows, width, row, counts, list_ids, list_values, masks, vocab, words
):
    """Return the logits with penalties, bias and masks; an id at -inf must not come."""
    value = logit
    slot = _number(rows, width, row, _SLOT)
    if slot >= 0:
        if _number(rows, width, row, _COUNTED) > 0:
            value = _penalize(
                value, index, inside, rows, width=width, row=row,
                slot=slot, counts=counts, vocab=vocab,
            )  # fmt: skip
        biases = _number(rows, width, row, _BIASES).to(tl.int32)
        first_of_list = slot * _LIST_SIZE
        value = _add_biases(
            value, index, list_ids, list_values, first_of_list=first_of_list, biases=biases
        )
        if _number(rows, width, row, _DRAW) < _number(rows, width, row, _FORBIDDEN_BEFORE):
            forbidden = _number(rows, width, row, _FORBIDDEN).to(tl.int32)
            value = _forbid(value, index, list_ids, first_of_list + biases, forbidden=forbidden)
        if _number(rows, width, row, _MASKED) > 0:
            word = tl.load(masks + slot * words + index // 32, mask=inside, other=0)
            value = tl.where(((word >> (index % 32)) & 1) > 0, value, float("-inf"))
    required = _number(rows, width, row, _REQUIRED)
    if required >= 0:
        value = tl.where(index == required, 0.0, float("-inf"))
    return value


@triton.jit
def _noise(word):
    """Return Gumbel noise of random words, as numpy makes a float64 of their upper 53 bits."""
    uniform = (word >> 11).to(tl.float64) * 1.1102230246251565e-16
    return -tl.log(-tl.log(tl.maximum(uniform, 1e-300)))


@triton.jit
def _keys(like, rows, width, row):
    """Return the two words that key a row's noise."""
    key = tl.zeros_like(like).to(tl.uint64) + _number(rows, width, row, _SEED).to(tl.uint64)
    key2 = tl.zeros_like(like).to(tl.uint64) + _number(rows, width, row, _DRAW).to(tl.uint64)
    return key, key2


@triton.jit
def _exp_sum(base, counter, vocab, peak):
    """Return the float32 sum of exp(logit - peak) over a chunk, whose largest logit is `peak`."""
    total = tl.full([], 0.0, tl.float32)
    floor = tl.where(peak > float("-inf"), peak, 0.0)
    for word in tl.static_range(4):
        index = counter * 4 + word
        logit = tl.load(base + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
        total += tl.sum(tl.exp(logit - floor), 0)
    return total


@triton.jit
def _scan(
    logits, rows, counts, list_ids, list_values, masks,
    scores, values, ids, tops, peaks, peak_ids, sums,
    width, vocab, logit_stride, chunks, words,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Adjust a chunk of a row, and find its best id. The grid is (rows, chunks).

    `values` and `ids` get the best, where the row is not cut: the logit at temperature 0, else
    logit / temperature plus noise. `tops` get the largest adjusted logit, `peaks` and `peak_ids` the
    largest one as the model gave it (both NaN if one is), and `sums` what logprobs need.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    if _number(rows, width, row, _POSITION) < 0:
        return
    temperature = _real(rows, width, row, _TEMPERATURE)
    is_adjusted = _is_adjusted(rows, width, row)
    is_cut = _is_cut(rows, width, row)
    base = logits + _number(rows, width, row, _LOGIT_ROW) * logit_stride
    counter = chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
    # numpy counts from 1, and each count gives four numbers
    number = (counter + 1).to(tl.uint64)
    words_of = number, number, number, number
    if (temperature > 0) & (is_cut == 0):
        key, key2 = _keys(counter, rows, width, row)
        words_of = _philox(number, key, key2)
    # of each of CHUNK / 4 lanes at first: reducing them costs more than comparing
    best = tl.full([CHUNK // 4], float("-inf"), tl.float64)
    best_id = tl.full([CHUNK // 4], _NO_ID, tl.int32)
    top = tl.full([CHUNK // 4], float("-inf"), tl.float32)
    peak = tl.full([CHUNK // 4], float("-inf"), tl.float32)
    peak_id = tl.full([CHUNK // 4], _NO_ID, tl.int32)
    damaged = tl.full([CHUNK // 4], 0, tl.int32)
    overflowed = tl.full([CHUNK // 4], 0, tl.int32)
    for word in tl.static_range(4):
        index = counter * 4 + word
        inside = index < vocab
        logit = tl.load(base + index, mask=inside, other=float("-inf")).to(tl.float32)
        damaged = tl.maximum(damaged, (logit != logit).to(tl.int32))
        peak, peak_id = _better_of(peak, peak_id, logit, index)
        if is_adjusted:
            logit = _adjust(
                logit, index, inside, rows=rows, width=width, row=row,
                counts=counts, list_ids=list_ids, list_values=list_values, masks=masks,
                vocab=vocab, words=words,
            )  # fmt: skip
            logit = tl.where(inside, logit, float("-inf"))
            tl.store(scores + row * vocab + index, logit, mask=inside)
            overflowed = tl.maximum(overflowed, (logit != logit).to(tl.int32))
        top = tl.maximum(top, logit)
        if not is_cut:
            value = logit.to(tl.float64)
            if temperature > 0:
                value = value / temperature + _noise(words_of[word])
            value = tl.where(inside, value, float("-inf"))
            best, best_id = _better_of(best, best_id, value, index)
    best, best_id = _best_of(best, best_id)
    peak, peak_id = _best_of(peak, peak_id)
    top = tl.max(top, 0)
    damaged = tl.max(damaged, 0)
    overflowed = tl.max(overflowed, 0)
    total = tl.full([], 0.0, tl.float32)
    if _number(rows, width, row, _LOGPROBS) >= 0:
        total = _exp_sum(base, counter, vocab, peak)
    to = row * chunks + chunk
    tl.store(values + to, best)
    tl.store(ids + to, best_id)
    tl.store(tops + to, tl.where(overflowed > 0, float("nan"), top))
    tl.store(peaks + to, tl.where(damaged > 0, float("nan"), peak))
    tl.store(peak_ids + to, peak_id)
    tl.store(sums + to, total)


@triton.jit
def _load_inside(
    base, candidates, first, count, vocab, temperature, cut_value,
    LISTED: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Return SPAN values from `first` on, their ids, and which of them min_p and masks let in.

    They are those of the `count` ids that `candidates` lists, or of all `vocab` ids.
    """
    place = first + tl.arange(0, SPAN)
    if LISTED:
        exists = place < count
        index = tl.load(candidates + place, mask=exists, other=0)
    else:
        exists = place < vocab
        index = place
    value = tl.load(base + index, mask=exists, other=float("-inf")).to(tl.float32)
    inside = exists & (value > float("-inf"))
    if cut_value > float("-inf"):
        inside = inside & (value.to(tl.float64) / temperature >= cut_value)
    return value, index, inside


@triton.jit
def _weights(value, top, inverse_temperature):
    """Return the float32 weights of values; that of `top`, the largest one, is 1."""
    return tl.exp((value - top) * inverse_temperature)


@triton.jit
def _sums_from(
    pivots, base, candidates, count, vocab, temperature, cut_value, top,
    BY_COUNT: tl.constexpr, LISTED: tl.constexpr, SPAN: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """Return how many values are at or above each pivot, or the sums of their weights, float64."""
    sums = tl.zeros([PIVOTS], tl.float64)
    inverse_temperature = (1.0 / temperature).to(tl.float32)
    pivot_values = _value_of(pivots)
    end = vocab
    if LISTED:
        end = count
    for first in range(0, end, SPAN):
        value, _, inside = _load_inside(
            base, candidates, first, count=count, vocab=vocab, temperature=temperature,
            cut_value=cut_value, LISTED=LISTED, SPAN=SPAN,
        )  # fmt: skip
        weight = inside.to(tl.float32)
        if not BY_COUNT:
            weight = tl.where(inside, _weights(value, top, inverse_temperature), 0.0)
        reached = value[None, :] >= pivot_values[:, None]
        sums += tl.sum(tl.where(reached, weight[None, :], 0.0), 1).to(tl.float64)
    return sums


@triton.jit
def _narrow(pivots, sums, low, high, goal, above):
    """Return the range between the pivots that have the goal and those that have not.

    Also returns how much there is at its upper end and above.
    """
    enough = (sums >= goal) | (pivots <= low)
    above = tl.maximum(above, tl.max(tl.where(enough, 0.0, sums), 0))
    new_low = tl.max(tl.where(enough, pivots, low), 0)
    return new_low, tl.min(tl.where(enough, high, pivots), 0), above


@triton.jit
def _first_pivots(low, top, temperature, PIVOTS: tl.constexpr):
    """Return `low`, the next order, and orders ever nearer to the largest value.

    Their distances from it halve, beginning with 24 temperatures: less likely ids are of no weight.
    """
    lane = tl.arange(0, PIVOTS)
    distance = 0.75 * tl.exp2((PIVOTS - 1 - lane).to(tl.float32)) * temperature.to(tl.float32)
    pivots = tl.maximum(_order(top - distance), low + 1)
    pivots = tl.where(lane == 1, low + 1, pivots)
    return tl.where(lane == 0, low, pivots)


@triton.jit
def _list_range(
    base, candidates, low, high, vocab, temperature, cut_value, SPAN: tl.constexpr
):  # fmt: skip
    """Write the ids whose values are from `low` up to `high` to `candidates`; return how many."""
    count = tl.full([], 0, tl.int32)
    low_value = _value_of(low)
    high_value = _value_of(high)
    for first in range(0, vocab, SPAN):
        value, index, inside = _load_inside(
            base, candidates, first, count=0, vocab=vocab, temperature=temperature,
            cut_value=cut_value, LISTED=False, SPAN=SPAN,
        )  # fmt: skip
        listed = inside & (value >= low_value) & (value < high_value)
        place = count + tl.cumsum(listed.to(tl.int32), 0) - 1
        tl.store(candidates + place, index, mask=listed)
        count += tl.sum(listed.to(tl.int32), 0)
    tl.debug_barrier()  # other threads of the program read what was written
    return count


@triton.jit
def _search(
    base, candidates, low, goal, share, ties, temperature, cut_value, top, vocab,
    BY_COUNT: tl.constexpr, SPAN: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """Return the largest order at or above which there is a goal, what is above it, goal and count.

    Values are counted, and there are to be `goal`. Or their weights are summed, and these are to be
    `share` of the weights from `low` on, of which `ties` values at `low` count.

    After WHOLE_PASSES over the row few values are left whose side is not known. Their ids are
    listed in `candidates`, and only they are read from then on. The count is how many they are.
    """
    high = _order(top) + 1
    above = tl.full([], 0.0, tl.float64)
    lane = tl.arange(0, PIVOTS)
    pivots = _first_pivots(low, top, temperature, PIVOTS=PIVOTS)
    for number in range(0, WHOLE_PASSES):
        if number > 0:
            pivots = low + (high - low) * lane // PIVOTS
        sums = _sums_from(
            pivots, base, candidates, count=0, vocab=vocab, temperature=temperature,
            cut_value=cut_value, top=top, BY_COUNT=BY_COUNT, LISTED=False, SPAN=SPAN,
            PIVOTS=PIVOTS,
        )  # fmt: skip
        if not BY_COUNT:
            from_low = tl.sum(tl.where(lane == 0, sums, 0.0), 0)
            above_low = tl.sum(tl.where(lane == 1, sums, 0.0), 0)
            at_low = _weights(_value_of(low), top, (1.0 / temperature).to(tl.float32))
            limited = above_low + ties * at_low.to(tl.float64)
            wanted_weight = share * tl.minimum(from_low, limited)
            goal = tl.where(number == 0, tl.maximum(wanted_weight, 1e-300), goal)
        low, high, above = _narrow(pivots, sums, low, high, goal=goal, above=above)
    count = _list_range(
        base, candidates, low, high=high, vocab=vocab, temperature=temperature,
        cut_value=cut_value, SPAN=SPAN,
    )  # fmt: skip
    outside = above
    while high - low > 1:
        pivots = low + (high - low) * lane // PIVOTS
        sums = outside + _sums_from(
            pivots, base, candidates, count=count, vocab=vocab, temperature=temperature,
            cut_value=cut_value, top=top, BY_COUNT=BY_COUNT, LISTED=True, SPAN=SPAN,
            PIVOTS=PIVOTS,
        )  # fmt: skip
        low, high, above = _narrow(pivots, sums, low, high, goal=goal, above=above)
    return low, above, goal, count


@triton.jit
def _last_tie(
    base, candidates, count, border, ties, vocab, temperature, cut_value, SPAN: tl.constexpr
):  # fmt: skip
    """Return the id of value number `ties` of the listed ones at `border`; _NO_ID: all are inside."""
    last = tl.full([], _NO_ID, tl.int32)
    found = tl.full([], 0.0, tl.float64)
    for first in range(0, count, SPAN):
        value, index, inside = _load_inside(
            base, candidates, first, count=count, vocab=vocab, temperature=temperature,
            cut_value=cut_value, LISTED=True, SPAN=SPAN,
        )  # fmt: skip
        equal = inside & (_order(value) == border)
        rank = found + tl.cumsum(equal.to(tl.int32), 0).to(tl.float64)
        last = tl.minimum(last, tl.min(tl.where(equal & (rank == ties), index, _NO_ID)))
        found += tl.sum(equal.to(tl.float64), 0)
    return last


@triton.jit
def _cut(
    logits, rows, scores, tops, candidates, border_orders, border_ids,
    width, vocab, logit_stride, chunks,
    CHUNKS: tl.constexpr, SPAN: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """Find the border of what a row may draw. The grid is (rows,).

    Inside are the values above the border, and at the border the ids up to its own. First top_k
    moves the border up, then top_p, of the weights that top_k leaves. `candidates` has room for
    `vocab` ids of each row.
    """
    row = tl.program_id(0).to(tl.int64)
    if _number(rows, width, row, _POSITION) < 0:
        return
    if not _is_cut(rows, width, row):
        return
    temperature = _real(rows, width, row, _TEMPERATURE)
    base = logits + _number(rows, width, row, _LOGIT_ROW) * logit_stride
    if _is_adjusted(rows, width, row):
        base = scores + row * vocab
    candidates += row * vocab
    at = tl.arange(0, CHUNKS)
    top = tl.max(tl.load(tops + row * chunks + at, mask=at < chunks, other=float("-inf")), 0)
    cut_value = top.to(tl.float64) / temperature + _real(rows, width, row, _MIN_P_LOG)
    # behind -inf: what is forbidden is never inside
    border = _order(tl.full([], float("-inf"), tl.float32)) + 1
    # how many values at the border are inside; without a limit more than there can be
    ties = tl.full([], 2147483647.0, tl.float64)
    count = tl.full([], 0, tl.int32)  # of candidates: the values at the border are among them
    finite = top - top == 0
    top_k = _number(rows, width, row, _TOP_K)
    if finite & (top_k > 0):
        border, above, goal, count = _search(
            base, candidates, border, goal=top_k.to(tl.float64), share=1.0, ties=ties,
            temperature=temperature, cut_value=cut_value, top=top, vocab=vocab,
            BY_COUNT=True, SPAN=SPAN, PIVOTS=PIVOTS,
        )  # fmt: skip
        ties = goal - above
    top_p = _real(rows, width, row, _TOP_P)
    if finite & (top_p < 1.0):
        nucleus, above, goal, count = _search(
            base, candidates, border, goal=ties, share=top_p, ties=ties,
            temperature=temperature, cut_value=cut_value, top=top, vocab=vocab,
            BY_COUNT=False, SPAN=SPAN, PIVOTS=PIVOTS,
        )  # fmt: skip
        weight = _weights(_value_of(nucleus), top, (1.0 / temperature).to(tl.float32))
        missing = tl.maximum(tl.ceil((goal - above) / weight.to(tl.float64)), 1.0)
        ties = tl.where(nucleus == border, tl.minimum(missing, ties), missing)
        border = nucleus
    last = _last_tie(
        base, candidates, count, border=border, ties=ties, vocab=vocab, temperature=temperature,
        cut_value=cut_value, SPAN=SPAN,
    )  # fmt: skip
    tl.store(border_orders + row, border)
    tl.store(border_ids + row, last)


@triton.jit
def _draw(
    logits, rows, scores, tops, border_orders, border_ids, values, ids,
    width, vocab, logit_stride, chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Find the best id of a chunk among those inside, where a row is cut. Grid: (rows, chunks)."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    if _number(rows, width, row, _POSITION) < 0:
        return
    if not _is_cut(rows, width, row):
        return
    border = tl.load(border_orders + row)
    border_id = tl.load(border_ids + row)
    best = tl.full([], float("-inf"), tl.float64)
    best_id = tl.full([], _NO_ID, tl.int32)
    if _order(tl.load(tops + row * chunks + chunk)) >= border:
        temperature = _real(rows, width, row, _TEMPERATURE)
        base = logits + _number(rows, width, row, _LOGIT_ROW) * logit_stride
        if _is_adjusted(rows, width, row):
            base = scores + row * vocab
        at = tl.arange(0, CHUNKS)
        top = tl.max(tl.load(tops + row * chunks + at, mask=at < chunks, other=float("-inf")), 0)
        cut_value = top.to(tl.float64) / temperature + _real(rows, width, row, _MIN_P_LOG)
        counter = chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
        key, key2 = _keys(counter, rows, width, row)
        words_of = _philox((counter + 1).to(tl.uint64), key, key2)
        for word in tl.static_range(4):
            index = counter * 4 + word
            value = tl.load(base + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
            order = _order(value)
            inside = (order > border) | ((order == border) & (index <= border_id))
            scaled = value.to(tl.float64) / temperature
            inside = inside & (scaled >= cut_value) & (index < vocab)
            drawn = tl.where(inside, scaled + _noise(words_of[word]), float("-inf"))
            word_best, word_id = _best_of(drawn, index)
            best, best_id = _better_of(best, best_id, word_best, word_id)
    tl.store(values + row * chunks + chunk, best)
    tl.store(ids + row * chunks + chunk, best_id)


@triton.jit
def _log_total(peaks, sums, row, chunks, CHUNKS: tl.constexpr):
    """Return the logarithm of the sum of exp(logit) over a row."""
    at = tl.arange(0, CHUNKS)
    peak = tl.load(peaks + row * chunks + at, mask=at < chunks, other=float("-inf"))
    total = tl.load(sums + row * chunks + at, mask=at < chunks, other=0.0).to(tl.float64)
    top = tl.max(peak, 0)
    share = tl.exp((peak - top).to(tl.float32)).to(tl.float64)
    return top.to(tl.float64) + tl.log(tl.sum(share * total, 0))


@triton.jit
def _pick(
    logits, rows, counts, values, ids, tops, peaks, sums,
    out_ids, out_peaks, out_tops, out_logprobs,
    width, vocab, logit_stride, chunks,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """Take the best chunk of each row; count its id, and say its logprob. The grid is (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    if _number(rows, width, row, _POSITION) < 0:
        return
    at = row * chunks + tl.arange(0, CHUNKS)
    inside = tl.arange(0, CHUNKS) < chunks
    value = tl.load(values + at, mask=inside, other=float("-inf"))
    index = tl.load(ids + at, mask=inside, other=_NO_ID)
    peak = tl.load(peaks + at, mask=inside, other=float("-inf"))
    top = tl.load(tops + at, mask=inside, other=float("-inf"))
    _, best = _best_of(value, index)
    # the next step looks the id up before the host knows that this row is damaged
    token = tl.where(best < vocab, best, 0).to(tl.int64)
    damaged = tl.max((peak != peak).to(tl.int32), 0)
    overflowed = tl.max((top != top).to(tl.int32), 0)
    tl.store(out_ids + row, token)
    tl.store(out_peaks + row, tl.where(damaged > 0, float("nan"), tl.max(peak, 0)))
    tl.store(out_tops + row, tl.where(overflowed > 0, float("nan"), tl.max(top, 0)))
    if _number(rows, width, row, _COUNTED) > 0:
        place = counts + _number(rows, width, row, _SLOT) * vocab + token
        tl.store(place, tl.load(place) + 1)
    if _number(rows, width, row, _LOGPROBS) >= 0:
        base = logits + _number(rows, width, row, _LOGIT_ROW) * logit_stride
        total = _log_total(peaks, sums, row, chunks, CHUNKS=CHUNKS)
        chosen = tl.load(base + token).to(tl.float64) - total
        tl.store(out_logprobs + row, chosen.to(tl.float32))


@triton.jit
def _list(
    logits, rows, list_ids, peaks, peak_ids, sums, top_ids, top_logprobs,
    width, vocab, logit_stride, chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """List the likeliest ids of a row with their logprobs, or those it names. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    if _number(rows, width, row, _POSITION) < 0:
        return
    top_count = _number(rows, width, row, _LOGPROBS).to(tl.int32)
    named_count = _number(rows, width, row, _NAMED).to(tl.int32)
    if (top_count < 0) | ((top_count == 0) & (named_count == 0)):
        return
    base = logits + _number(rows, width, row, _LOGIT_ROW) * logit_stride
    total = _log_total(peaks, sums, row, chunks, CHUNKS=CHUNKS)
    to = row * _TOP_SIZE
    if named_count > 0:
        before = _number(rows, width, row, _BIASES) + _number(rows, width, row, _FORBIDDEN)
        first = _number(rows, width, row, _SLOT) * _LIST_SIZE + before
        for place in range(0, named_count):
            named_id = tl.load(list_ids + first + place)
            logprob = tl.load(base + named_id).to(tl.float64) - total
            tl.store(top_ids + to + place, named_id)
            tl.store(top_logprobs + to + place, logprob.to(tl.float32))
    else:
        lane = tl.arange(0, CHUNKS)
        best = tl.load(peaks + row * chunks + lane, mask=lane < chunks, other=float("-inf"))
        best_ids = tl.load(peak_ids + row * chunks + lane, mask=lane < chunks, other=_NO_ID)
        for place in range(0, top_count):
            value, top_id = _best_of(best, best_ids)
            tl.store(top_ids + to + place, top_id)
            tl.store(top_logprobs + to + place, (value.to(tl.float64) - total).to(tl.float32))
            # the chunk's next best: what comes behind this one in the order of values and ids
            chunk = top_id // CHUNK
            index = chunk * CHUNK + tl.arange(0, CHUNK)
            logit = tl.load(base + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
            behind = (logit < value) | ((logit == value) & (index > top_id))
            behind = behind & (index < vocab)
            next_value = tl.max(tl.where(behind, logit, float("-inf")), 0)
            is_next = behind & (logit == next_value)
            next_id = tl.min(tl.where(is_next, index, _NO_ID), 0)
            best = tl.where(lane == chunk, next_value, best)
            best_ids = tl.where(lane == chunk, next_id, best_ids)


@triton.jit
def _rank(
    logits, rows, out_ranks, width, vocab, logit_stride, chunks, CHUNK: tl.constexpr
):  # fmt: skip
    """Find the place of each row's required id among all ids by logit. The grid is (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + _number(rows, width, row, _LOGIT_ROW) * logit_stride
    token = _number(rows, width, row, _REQUIRED)
    value = tl.load(base + token).to(tl.float32)
    before = tl.full([], 0, tl.int32)
    for chunk in range(0, chunks):
        index = chunk * CHUNK + tl.arange(0, CHUNK)
        logit = tl.load(base + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
        ahead = (logit > value) | ((logit == value) & (index < token))
        before += tl.sum((ahead & (index < vocab)).to(tl.int32), 0)
    tl.store(out_ranks + row, (before + 1).to(tl.int64))


@triton.jit
def _count(counts, triples, vocab):
    """Add to the counts: (slot, id, what is added). The grid is (triples,); PROMPT_BIT is set once."""
    place = triples + tl.program_id(0) * 3
    to = counts + tl.load(place).to(tl.int64) * vocab + tl.load(place + 1)
    added = tl.load(place + 2)
    if added == _PROMPT_BIT:
        tl.atomic_or(to, added)
    else:
        tl.atomic_add(to, added)


@dataclass(slots=True)
class SlotBuffers:
    """What the device keeps of the sequences that have a slot (`slots.SlotTable`)."""

    counts: torch.Tensor  #: int32 [slots, vocab]: of the answer's ids; PROMPT_BIT: of the prompt.
    list_ids: torch.Tensor  #: int32 [slots, LIST_SIZE]: `SequenceFields.list_ids`.
    list_values: torch.Tensor  #: float32 [slots, LIST_SIZE]: the biases.
    masks: torch.Tensor  #: int32 [slots, words]: a bit for each id, set where it may come.

    @classmethod
    def allocate(cls, slots: int, vocab: int, device: torch.device) -> SlotBuffers:
        """Allocate the buffers, zeroed. At 256 slots and 128,256 ids they take 137 MB."""

        def zeros(columns: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(slots, columns, dtype=dtype, device=device)

        return cls(
            zeros(vocab), zeros(LIST_SIZE), zeros(LIST_SIZE, torch.float32), zeros(-(-vocab // 32))
        )


@dataclass(slots=True)
class SampledRows:
    """What sampling gives of each row. Buffers on the device, or the host's copy of them."""

    token_ids: torch.Tensor  #: int64 [rows].
    peaks: torch.Tensor  #: float32 [rows]: the largest logit that the model gave; NaN if one is.
    tops: torch.Tensor  #: float32 [rows]: the largest logit after penalties, bias and masks.
    logprobs: torch.Tensor  #: float32 [rows], where a row wants logprobs.
    top_ids: torch.Tensor  #: int32 [rows, TOP_SIZE], where a row wants more of them.
    top_logprobs: torch.Tensor  #: float32 [rows, TOP_SIZE].

    @classmethod
    def allocate(cls, rows: int, device: torch.device, pinned: bool = False) -> SampledRows:
        """Allocate room for `rows` rows; `pinned` on the host, so that copies need no wait."""

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)

        return cls(
            token_ids=zeros(rows, dtype=torch.int64),
            peaks=zeros(rows),
            tops=zeros(rows),
            logprobs=zeros(rows),
            top_ids=zeros(rows, TOP_SIZE, dtype=torch.int32),
            top_logprobs=zeros(rows, TOP_SIZE),
        )

    def send(self, host: SampledRows, rows: int, *, logprobs: bool) -> None:
        """Copy the first rows to `host`, without waiting; `logprobs`: those too."""
        pairs = [(self.token_ids, host.token_ids), (self.peaks, host.peaks), (self.tops, host.tops)]
        if logprobs:
            pairs += [
                (self.logprobs, host.logprobs),
                (self.top_ids, host.top_ids),
                (self.top_logprobs, host.top_logprobs),
            ]
        for source, target in pairs:
            target[:rows].copy_(source[:rows], non_blocking=True)


@dataclass(slots=True)
class ChunkResults:
    """What the kernels of one call leave for each other, on the device."""

    scores: torch.Tensor  #: float32 [rows, vocab]: adjusted logits, of rows that have adjustments.
    values: torch.Tensor  #: float64 [rows, chunks]: the value of each chunk's best id.
    ids: torch.Tensor  #: int32 [rows, chunks]: the best ids.
    tops: torch.Tensor  #: float32 [rows, chunks]: the largest adjusted logits.
    peaks: torch.Tensor  #: float32 [rows, chunks]: the largest logits of the model.
    peak_ids: torch.Tensor  #: int32 [rows, chunks]: the ids of these logits.
    sums: torch.Tensor  #: float32 [rows, chunks]: sums of exp(logit - peak), for logprobs.
    candidates: torch.Tensor  #: int32 [rows, vocab]: ids that may be at the border of cut rows.
    border_orders: torch.Tensor  #: int64 [rows, 1]: the `_order` of the border of cut rows.
    border_ids: torch.Tensor  #: int32 [rows, 1]: the last id at the border that is inside.

    @classmethod
    def allocate(cls, rows: int, vocab: int, device: torch.device) -> ChunkResults:
        """Allocate the buffers, not initialized, for calls with at most `rows` rows."""
        chunks = triton.cdiv(vocab, CHUNK)

        def empty(columns: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(rows, columns, dtype=dtype, device=device)

        return cls(
            scores=empty(vocab, torch.float32),
            values=empty(chunks, torch.float64),
            ids=empty(chunks, torch.int32),
            tops=empty(chunks, torch.float32),
            peaks=empty(chunks, torch.float32),
            peak_ids=empty(chunks, torch.int32),
            sums=empty(chunks, torch.float32),
            candidates=empty(vocab, torch.int32),
            border_orders=empty(1, torch.int64),
            border_ids=empty(1, torch.int32),
        )


def sample_rows(
    logits: torch.Tensor,
    packed: torch.Tensor,
    slots: SlotBuffers,
    out: SampledRows,
    *,
    results: ChunkResults | None = None,
) -> None:
    """Write the next ids, and what else the rows want, to `out`; count the ids.

    `logits` are [any, vocab], `packed` int64 [ROW_FIELDS, rows] as `plan.RowField` says, on the
    device. Rows of padding are left out. `results` are overwritten; without them such buffers are
    allocated, of more than 8 bytes for each row and id.
    """
    width = packed.shape[1]
    vocab = logits.shape[1]
    chunks = triton.cdiv(vocab, CHUNK)
    padded_chunks = triton.next_power_of_2(chunks)
    if results is None:
        results = ChunkResults.allocate(width, vocab, logits.device)
    sizes = {"width": width, "vocab": vocab, "logit_stride": logits.stride(0), "chunks": chunks}
    _scan[(width, chunks)](
        logits,
        packed,
        counts=slots.counts,
        list_ids=slots.list_ids,
        list_values=slots.list_values,
        masks=slots.masks,
        scores=results.scores,
        values=results.values,
        ids=results.ids,
        tops=results.tops,
        peaks=results.peaks,
        peak_ids=results.peak_ids,
        sums=results.sums,
        words=slots.masks.shape[1],
        CHUNK=CHUNK,
        **sizes,
    )
    _cut[(width,)](
        logits,
        packed,
        scores=results.scores,
        tops=results.tops,
        candidates=results.candidates,
        border_orders=results.border_orders,
        border_ids=results.border_ids,
        CHUNKS=padded_chunks,
        SPAN=SPAN,
        PIVOTS=PIVOTS,
        num_warps=SEARCH_WARPS,
        **sizes,
    )
    _draw[(width, chunks)](
        logits,
        packed,
        scores=results.scores,
        tops=results.tops,
        border_orders=results.border_orders,
        border_ids=results.border_ids,
        values=results.values,
        ids=results.ids,
        CHUNK=CHUNK,
        CHUNKS=padded_chunks,
        **sizes,
    )
    _pick[(width,)](
        logits,
        packed,
        counts=slots.counts,
        values=results.values,
        ids=results.ids,
        tops=results.tops,
        peaks=results.peaks,
        sums=results.sums,
        out_ids=out.token_ids,
        out_peaks=out.peaks,
        out_tops=out.tops,
        out_logprobs=out.logprobs,
        CHUNKS=padded_chunks,
        **sizes,
    )
    _list[(width,)](
        logits,
        packed,
        list_ids=slots.list_ids,
        peaks=results.peaks,
        peak_ids=results.peak_ids,
        sums=results.sums,
        top_ids=out.top_ids,
        top_logprobs=out.top_logprobs,
        CHUNK=CHUNK,
        CHUNKS=padded_chunks,
        **sizes,
    )


def rank_required(logits: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Return the place of each row's required id among all ids, int64 [rows]; 1 is the likeliest."""
    width = packed.shape[1]
    vocab = logits.shape[1]
    ranks = torch.empty(width, dtype=torch.int64, device=logits.device)
    _rank[(width,)](
        logits,
        packed,
        ranks,
        width=width,
        vocab=vocab,
        logit_stride=logits.stride(0),
        chunks=triton.cdiv(vocab, CHUNK),
        CHUNK=CHUNK,
    )
    return ranks


def count_ids(counts: torch.Tensor, triples: torch.Tensor) -> None:
    """Add `triples`, int32 [n, 3] of (slot, id, what is added), to the counts."""
    _count[(len(triples),)](counts, triples, counts.shape[1])
