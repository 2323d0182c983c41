"""What a GPU's sampler is told of each sequence, and what it keeps of some (imports no Triton).

A row's parameters travel with every step (`plan.RowField`). What has the size of the vocabulary does
not: how often each id came, and which ids may come, stay on the device in a *slot* of the sequence.
A step sends only what changed there, as a `SlotUpdate`.

A sequence keeps its slot until others need it: the one that was used longest ago goes first. A slot
is a function of the sequence's ids and parameters, so it is made again wherever it is missing.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from ...protos.frames import Sampling
from ..grammar import GrammarCompiler
from ..sampler import (
    SamplerState,
    check_allowed_ids,
    check_biased_ids,
    check_logprob_ids,
    current_state,
    find_required_id,
    is_device_drawable,
)
from ..sequence import Sequence
from .plan import LIST_SIZE, PROMPT_BIT, TOP_SIZE, RowField, float_bits, plain_fields
from .slot_update import SlotUpdate


@dataclass(slots=True, eq=False)
class SequenceFields:
    """What the device is told of one sequence; `sampler.SamplerState` keeps it."""

    #: int64 [ROW_FIELDS], as `RowField` says; without the slot, and without what says where the row
    #: stands in a step (`SOURCE`, `POSITION`, `LOGIT_ROW`): these are filled in for each step.
    fields: np.ndarray
    #: Biased ids, then forbidden ones, then those whose logprobs the request wants.
    list_ids: list[int]
    biases: list[float]  #: Of the first ids of the list.
    needs_slot: bool
    is_counted: bool  #: Penalties count the ids.
    has_grammar: bool
    counted: int = 0  #: So many of the ids are counted on the device, once it has done its steps.
    slot: int = -1  #: Its slot, if `SlotTable` says so too.


@dataclass(slots=True)
class _PendingUpdate:
    """A `SlotUpdate` in the making."""

    cleared: list[int] = field(default_factory=list)
    triples: list[np.ndarray] = field(default_factory=list)
    listed: list[int] = field(default_factory=list)
    list_ids: list[np.ndarray] = field(default_factory=list)
    list_values: list[np.ndarray] = field(default_factory=list)
    masked: list[int] = field(default_factory=list)
    masks: list[np.ndarray] = field(default_factory=list)

    def finish(self) -> SlotUpdate:
        """Return the update."""
        return SlotUpdate(
            cleared=self.cleared,
            triples=b"".join(part.tobytes() for part in self.triples),
            listed=self.listed,
            list_ids=b"".join(part.tobytes() for part in self.list_ids),
            list_values=b"".join(part.tobytes() for part in self.list_values),
            masked=self.masked,
            masks=b"".join(part.tobytes() for part in self.masks),
        )


def device_can_sample(sequence: Sequence) -> bool:
    """Return whether the device can draw the sequence's next id.

    It must know every parameter that has an effect (`is_device_drawable`), and what a request names in
    lists must fit into a slot.
    """
    sampling = sequence.sampling
    listed = len(sampling.logit_bias) + len(sampling.stop_ids) + len(sampling.logprob_ids)
    return (
        is_device_drawable(sampling)
        and listed <= LIST_SIZE
        and len(sampling.logprob_ids) <= TOP_SIZE
        and (sampling.logprobs or 0) <= TOP_SIZE
    )


def depends_on_last_id(sequence: Sequence) -> bool:
    """Return whether the host must know an id before it can say what may come behind it.

    True of a grammar, and of thinking whose budget may be spent with that id.
    """
    if sequence.sampling.grammar is not None:
        return True
    if sequence.sampling.thinking is None:
        return False
    state = current_state(sequence, None)
    find_required_id(sequence, state)  # makes the watch
    assert state.thinking is not None
    return state.thinking.may_require_next(sequence.token_ids, sequence.prompt_tokens)


def describe(sequence: Sequence, vocab: int) -> SequenceFields:
    """Return what the device is told of a sequence, made once. Raises InvalidRequest."""
    state: SamplerState = sequence.sampler_state or SamplerState()
    sequence.sampler_state = state
    if state.device_fields is None:
        state.device_fields = _make_fields(sequence, vocab)
    device_fields: SequenceFields = state.device_fields
    return device_fields


def _make_fields(sequence: Sequence, vocab: int) -> SequenceFields:
    """Return the fields of a sequence's parameters. Raises InvalidRequest."""
    sampling = sequence.sampling
    check_biased_ids(sampling, vocab)
    check_allowed_ids(sampling.allowed_ids, vocab)
    check_logprob_ids(sampling.logprob_ids, vocab)
    fields = plain_fields(sampling.seed, sampling.temperature)
    if sampling.temperature > 0:
        fields[RowField.TOP_K] = max(sampling.top_k, 0)
        fields[RowField.TOP_P] = float_bits(sampling.top_p)
        if sampling.min_p > 0:
            fields[RowField.MIN_P_LOG] = float_bits(math.log(min(sampling.min_p, 1.0)))
    if sampling.logprobs is not None:
        fields[RowField.LOGPROBS] = sampling.logprobs
    penalizes = _penalizes(sampling)
    if penalizes:
        fields[RowField.COUNTED] = 1
        # the host's sampler computes with float32 numbers
        fields[RowField.REPETITION] = float_bits(float(np.float32(sampling.repetition_penalty)))
        fields[RowField.FREQUENCY] = float_bits(float(np.float32(sampling.frequency_penalty)))
        fields[RowField.PRESENCE] = float_bits(float(np.float32(sampling.presence_penalty)))
    biases: dict[int, float] = {}
    for token_id, bias in sampling.logit_bias:
        biases[token_id] = biases.get(token_id, 0.0) + bias
    list_ids = list(biases)
    fields[RowField.BIASES] = len(biases)
    if sampling.min_tokens > 0:
        stop_ids = [stop_id for stop_id in sampling.stop_ids if 0 <= stop_id < vocab]
        list_ids += stop_ids
        fields[RowField.FORBIDDEN] = len(stop_ids)
        fields[RowField.FORBIDDEN_BEFORE] = sequence.prompt_tokens + sampling.min_tokens
    if sampling.logprobs is not None:
        list_ids += sampling.logprob_ids
        fields[RowField.NAMED] = len(sampling.logprob_ids)
    is_masked = bool(sampling.allowed_ids) or sampling.grammar is not None
    fields[RowField.MASKED] = is_masked
    return SequenceFields(
        fields=fields,
        list_ids=list_ids,
        biases=list(biases.values()),
        needs_slot=penalizes or is_masked or bool(list_ids),
        is_counted=penalizes,
        has_grammar=sampling.grammar is not None,
    )


def _penalizes(sampling: Sampling) -> bool:
    """Return whether ids that came before change the logits."""
    return (
        sampling.repetition_penalty != 1
        or sampling.frequency_penalty != 0
        or sampling.presence_penalty != 0
    )


class SlotTable:
    """Which sequence has which slot of the device, and what the device must be told of it.

    `slots` is how many slots the device has: at least as many as a step has rows. `vocab` is the
    number of the model's ids.
    """

    def __init__(self, slots: int, vocab: int) -> None:
        self.vocab = vocab
        self._words = -(-vocab // 32)  #: Of a mask.
        #: The owner of each slot, the one used longest ago first.
        self._owners: OrderedDict[int, SequenceFields | None] = OrderedDict(
            (slot, None) for slot in range(slots)
        )
        self._pending = _PendingUpdate()

    def take_update(self) -> SlotUpdate:
        """Return what the device must be told before its next draw; it is told then."""
        update = self._pending.finish()
        self._pending = _PendingUpdate()
        return update

    def prepare(
        self, sequence: Sequence, length: int, grammars: GrammarCompiler | None
    ) -> np.ndarray:
        """Return the fields of a sequence whose next id has the position `length`.

        The ids before it are known to the host, or the device counts them as it draws them. Raises
        InvalidRequest where no id can be drawn for the request.
        """
        device_fields = describe(sequence, self.vocab)
        if not device_fields.needs_slot and sequence.sampling.thinking is None:
            return device_fields.fields
        fields = device_fields.fields.copy()
        if device_fields.needs_slot:
            self._own_slot(device_fields, sequence)
            fields[RowField.SLOT] = device_fields.slot
        if device_fields.is_counted:
            self._count(device_fields, sequence, length)
        # an id that is not known yet decides nothing here: `depends_on_last_id` says so
        if length == len(sequence.token_ids):
            fields[RowField.REQUIRED] = self._prepare_choice(device_fields, sequence, grammars)
        return fields

    def keep(self, sequence: Sequence, length: int, *, counts_now: bool) -> bool:
        """Keep a sequence's slot for one more step, whose id has the position `length`.

        With `counts_now` the device is going to count that id; else `prepare` is called for it.
        Returns False where the slot is gone, or the device has not counted all ids before.
        """
        device_fields: SequenceFields = sequence.sampler_state.device_fields
        if self._owners[device_fields.slot] is not device_fields:
            return False
        if counts_now and device_fields.is_counted:
            if device_fields.counted != length:
                return False
            device_fields.counted += 1
        self._owners.move_to_end(device_fields.slot)
        return True

    def _prepare_choice(
        self, device_fields: SequenceFields, sequence: Sequence, grammars: GrammarCompiler | None
    ) -> int:
        """Note the mask of the grammar; return the id that must come, or -1."""
        state = current_state(sequence, grammars)
        required_id = find_required_id(sequence, state)
        if required_id is not None and 0 <= required_id < self.vocab:
            return required_id
        if state.matcher:
            allowed = state.matcher.allowed
            if sequence.sampling.allowed_ids:
                allowed = allowed & self._allowed_only(sequence.sampling.allowed_ids)
            self._mask(device_fields.slot, allowed)
        return -1

    def _own_slot(self, device_fields: SequenceFields, sequence: Sequence) -> None:
        """Give the sequence its slot, or another one if it lost that."""
        if device_fields.slot >= 0 and self._owners[device_fields.slot] is device_fields:
            self._owners.move_to_end(device_fields.slot)
            return
        slot = next(iter(self._owners))
        self._owners[slot] = device_fields
        self._owners.move_to_end(slot)
        device_fields.slot = slot
        device_fields.counted = 0
        pending = self._pending
        if device_fields.is_counted:
            pending.cleared.append(slot)
        if device_fields.list_ids:
            list_ids = np.full(LIST_SIZE, -1, np.int32)
            list_ids[: len(device_fields.list_ids)] = device_fields.list_ids
            list_values = np.zeros(LIST_SIZE, np.float32)
            list_values[: len(device_fields.biases)] = device_fields.biases
            pending.listed.append(slot)
            pending.list_ids.append(list_ids)
            pending.list_values.append(list_values)
        allowed_ids = sequence.sampling.allowed_ids
        if allowed_ids and not device_fields.has_grammar:
            self._mask(slot, self._allowed_only(allowed_ids))

    def _allowed_only(self, allowed_ids: tuple[int, ...]) -> np.ndarray:
        """Return bool [vocab], true at these ids."""
        allowed = np.zeros(self.vocab, bool)
        allowed[list(allowed_ids)] = True
        return allowed

    def _mask(self, slot: int, allowed: np.ndarray) -> None:
        """Note a mask for a slot, a bit for each id."""
        packed = np.zeros(self._words * 4, np.uint8)
        bits = np.packbits(allowed, bitorder="little")
        packed[: len(bits)] = bits
        self._pending.masked.append(slot)
        self._pending.masks.append(packed)

    def _count(self, device_fields: SequenceFields, sequence: Sequence, length: int) -> None:
        """Note the ids that the device has not counted, and that it is going to count the next."""
        if device_fields.counted > length:  # ids were taken back
            device_fields.counted = 0
            self._pending.cleared.append(device_fields.slot)
        if device_fields.counted < length:
            token_ids = np.array(sequence.token_ids[device_fields.counted :], np.int32)
            triples = np.empty((len(token_ids), 3), np.int32)
            triples[:, 0] = device_fields.slot
            triples[:, 1] = token_ids
            triples[:, 2] = 1
            triples[: max(0, sequence.prompt_tokens - device_fields.counted), 2] = PROMPT_BIT
            self._pending.triples.append(triples)
        device_fields.counted = length + 1
