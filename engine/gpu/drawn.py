"""What the device drew, on the host: tokens with their logprobs, or why there is none (pure)."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import numpy as np

from ...protos.frames import ScoredToken, Token
from ..errors import InvalidRequest
from ..sampler import (
    OVERFLOW,
    SamplerState,
    SamplingFault,
    consume_choice,
    find_damage,
    no_token_fault,
)
from ..sequence import Sequence

log = logging.getLogger(__name__)


@dataclass(slots=True)
class DrawnRows:
    """The rows of `sampling.SampledRows` that a step had, on the host."""

    token_ids: list[int]
    peaks: np.ndarray  #: float32: the largest logit that the model gave.
    tops: np.ndarray  #: float32: the largest one after penalties, bias and masks.
    logprobs: np.ndarray  #: float32: of the ids, for rows that want them, as the next two.
    top_ids: np.ndarray  #: int32 [rows, TOP_SIZE]
    top_logprobs: np.ndarray  #: float32 [rows, TOP_SIZE]

    def all_finite(self) -> bool:
        """Return whether every row has numbers, and an id that may come."""
        return bool(np.isfinite(self.peaks).all() and np.isfinite(self.tops).all())

    def token(self, sequence: Sequence, row: int) -> Token | SamplingFault:
        """Return the token of a row for its sequence, whose grammar goes on behind it."""
        position = len(sequence.token_ids)
        fault = find_damage(float(self.peaks[row]), position)
        if fault:
            return fault
        top = float(self.tops[row])
        if top == -math.inf:
            return no_token_fault(position)
        if not math.isfinite(top):
            return SamplingFault(OVERFLOW)
        token_id = self.token_ids[row]
        state: SamplerState | None = sequence.sampler_state
        if state and state.matcher:
            try:
                consume_choice(sequence, state, token_id)
            except InvalidRequest as error:
                return SamplingFault(str(error))
            except Exception:  # one request's grammar must not end the thread and all streams
                log.exception("grammar of %s", sequence.attempt_key[0])
                return SamplingFault("no token could be sampled: the worker's log says why")
        if sequence.sampling.logprobs is None:
            return Token(token_id)
        return self._with_logprobs(sequence, row, token_id)

    def _with_logprobs(self, sequence: Sequence, row: int, token_id: int) -> Token:
        """Return the token with its logprob, and those of the ids that were listed for it."""
        logprob = float(self.logprobs[row])
        named_count = len(sequence.sampling.logprob_ids)
        count = named_count or sequence.sampling.logprobs or 0
        top_ids = self.top_ids[row, :count].tolist()
        top = dict(zip(top_ids, self.top_logprobs[row, :count].tolist(), strict=True))
        if named_count:
            top[token_id] = logprob
        listed = sorted(top.items(), key=lambda entry: (-entry[1], entry[0]))
        return Token(token_id, logprob, tuple(listed))

    def scored_token(
        self, token_id: int, rank: int, row: int, *, count: int, position: int
    ) -> ScoredToken | SamplingFault:
        """Return a prompt's own id at `position`, scored by a row, with `count` likeliest ids."""
        fault = find_damage(float(self.peaks[row]), position)
        if fault:
            return fault
        top_ids = self.top_ids[row, :count].tolist()
        top = tuple(zip(top_ids, self.top_logprobs[row, :count].tolist(), strict=True))
        return ScoredToken(token_id, float(self.logprobs[row]), top, rank)
