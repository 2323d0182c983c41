"""Requests under which workers crash: one such request must not end the whole fleet.

A worker may end under any request, as machines fail. But where the next worker ends too, at the
same place of the same answer, the request itself is the likely cause: its attempts stop there, and
for a while the same request is refused whenever it comes. Each gateway knows those that it ran.

Workers also end together, with their host. So a worker that had ended before the request came to it
(`worker_gone`) does not count: after a first loss each worker is asked to answer before it begins.
Nor does one that is given up as it is silent (`worker_silent`): its host may be slow, or cut off.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from ..errors import ApiError
from .request import RequestInput

CRASHES_MAX = 2  #: So many workers may end under one request, at the same place.
#: An attempt that ended within so many new tokens ended at the same place as the one before. (It is
#: not 0, as the prefill worker gives a token before a decode worker can crash.)
SAME_PLACE_TOKENS = 2
REMEMBERED_S = 600.0  #: For so long the same request is refused.
REMEMBERED_MAX = 256  #: So many requests are remembered; then the oldest is forgotten.


@dataclass(slots=True)
class CrashCount:
    """How many workers in a row have ended under one request at the same place."""

    crashes: int = 0

    def record(self, new_tokens: int) -> None:
        """Count a worker that ended under an attempt which had given so many tokens."""
        at_same_place = new_tokens <= SAME_PLACE_TOKENS
        self.crashes = self.crashes + 1 if at_same_place else 1

    @property
    def is_too_high(self) -> bool:
        """Whether the request must not be attempted again."""
        return self.crashes >= CRASHES_MAX


class CrashMemory:
    """The requests of a gateway under which workers crashed, by their input."""

    def __init__(self) -> None:
        #: When each is forgotten, in seconds of the caller's clock; the oldest first.
        self._forget_at: OrderedDict[bytes, float] = OrderedDict()

    def remember(self, request: RequestInput, now: float) -> None:
        """Note that `CRASHES_MAX` workers have ended under this request."""
        key = _input_key(request)
        self._forget_at[key] = now + REMEMBERED_S
        self._forget_at.move_to_end(key)
        if len(self._forget_at) > REMEMBERED_MAX:
            self._forget_at.popitem(last=False)

    def check(self, request: RequestInput, now: float) -> None:
        """Raise ApiError if workers have crashed under the same request lately."""
        if not self._forget_at:  # nearly always: then nothing is hashed
            return
        while self._forget_at:
            key, forget_at = next(iter(self._forget_at.items()))
            if forget_at > now:
                break
            del self._forget_at[key]
        if _input_key(request) in self._forget_at:
            raise crash_error()


def crash_error() -> ApiError:
    """Return what clients get for such a request."""
    return ApiError(
        "worker_crashed",
        f"{CRASHES_MAX} workers ended at the same place of this request, so it is not attempted "
        f"again for {REMEMBERED_S / 60:.0f} minutes; change its text or its parameters",
    )


def _input_key(request: RequestInput) -> bytes:
    """Return a hash of what the workers compute, whatever the seed and the number of answers."""
    sampling = msgspec.structs.replace(request.sampling, seed=0, n=1)
    text = msgspec.msgpack.encode([request.prompt_ids, sampling, request.salt])
    return hashlib.blake2b(text, digest_size=16).digest()
