"""How much each API key has used of its limits, at this gateway and at the others (pure).

A key's limits are those of the cluster. Gateways tell each other several times a second what each
key may use with them until the next time: with `n` gateways, what it uses and an `n`-th, rounded
up, of what is left. A key of which the others have not heard yet may use an `n`-th of its limit. So
all gateways together exceed a limit of concurrency by `n - 1` at most, but for large calls. A call
that is larger than a gateway's part of the whole limit is let in if it fits into what is left
beside what the others use and have set aside. If several gateways get such calls between two
exchanges, each lets one in. On the other hand a call for several answers may be refused at one gateway while another, on
which the key is in use, has room for it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from ....protos import frames
from ..errors import ApiError

#: For a client that was refused because another gateway holds what is left: until the gateways
#: have told each other what is used.
SHARE_RETRY_S = 1


class LimitedKey(Protocol):
    """What a key may use; None is no limit."""

    @property
    def id(self) -> str: ...

    @property
    def requests_per_min(self) -> int | None:
        """Answers that may be asked for in a minute, and as many at once after a quiet minute."""

    @property
    def concurrency(self) -> int | None:
        """Calls that may be open at a time, and answers that may be generated at a time."""


@dataclass(slots=True)
class KeyUsage:
    """What one key uses of its limits at this gateway.

    The bucket holds `requests_per_min` answers and leaks as many a minute.
    """

    bucket_answers: float = 0.0  #: Answers in the bucket, as of `updated_at_s`.
    updated_at_s: float = 0.0  #: On the caller's clock.
    requests_per_min: int = 0  #: The key's limit as of `updated_at_s`; 0: no limit.
    open_calls: int = 0
    running_answers: int = 0  #: Answers that are generated, whether or not anybody reads them.
    key: LimitedKey | None = None  #: Its limits, as of its last call.

    @property
    def is_idle(self) -> bool:
        """True if nothing of the key is under way, so that its usage may be forgotten."""
        return not self.open_calls and not self.running_answers


@dataclass(slots=True)
class KeyShare:
    """How much a key may use at this gateway until the gateways tell each other again."""

    open_calls: int
    running_answers: int
    bucket_answers: float


class KeyLimiter:
    """Holds each key to its limits of rate and concurrency.

    A call counts while it is open. Its answers count while they are generated, and that can be for
    longer: a client may hang up and have its answer kept. A call has as many answers as prompts
    times `n`. A call alone takes one place in the bucket, and each further answer another one.
    `now` is in seconds, on the same clock in all calls.
    """

    def __init__(self) -> None:
        self._usage_by_id: dict[str, KeyUsage] = {}  #: By the id of the key.
        #: What the other gateways have told, by gateway and by the id of the key.
        self._told: dict[str, Mapping[str, frames.KeyUse]] = {}
        self._gateways = 1  #: How many share the limits, this one included.
        #: Of keys that were used since the last exchange, by the id of the key.
        self._shares: dict[str, KeyShare] = {}
        #: Ids of the keys that the last report named: the other gateways have heard of them.
        self._reported: frozenset[str] = frozenset()

    # ---- the other gateways ----------------------------------------------------------------------

    def begin_interval(self, gateways: int) -> None:
        """Lets each key have its part of what is left now, of so many gateways.

        `report` comes next: the others must know at once what a key in use may go up to here.
        """
        self._gateways = gateways
        self._shares.clear()

    def take_report(self, gateway: str, usage: Mapping[str, frames.KeyUse]) -> None:
        """Takes note of what another gateway's keys use there now; of none any more if empty."""
        if usage:
            self._told[gateway] = usage
        else:
            self._told.pop(gateway, None)

    def report(self, now: float) -> dict[str, frames.KeyUse]:
        """Returns what keys may use at this gateway until the next report, for the others.

        Only keys that use anything are in it. What they may use counts, and not what they use: else
        two gateways would give away what is left at the same time.
        """
        report = {}
        for key_id, usage in self._usage_by_id.items():
            _leak(usage, self._used_elsewhere(key_id).bucket_answers, now)
            if not (usage.open_calls or usage.running_answers or usage.bucket_answers):
                continue
            open_calls = usage.open_calls
            running_answers = usage.running_answers
            if usage.key is not None:
                share = self._share(usage.key, usage, now)
                open_calls = max(open_calls, share.open_calls if open_calls else 0)
                running_answers = max(
                    running_answers, share.running_answers if running_answers else 0
                )
            report[key_id] = frames.KeyUse(open_calls, running_answers, usage.bucket_answers)
        self._reported = frozenset(report)
        return report

    # ---- calls -----------------------------------------------------------------------------------

    def open_call(self, key: LimitedKey, now: float) -> None:
        """Counts one more open call, until `close_call`. Raises ApiError above a limit."""
        usage = self._usage_by_id.setdefault(key.id, KeyUsage())
        usage.key = key
        if key.concurrency:
            used_elsewhere = self._used_elsewhere(key.id).open_calls
            open_calls = usage.open_calls + used_elsewhere
            if open_calls >= key.concurrency:
                raise ApiError("rate_limited", f"this key has {open_calls} calls open, its limit")
            if usage.open_calls >= self._share(key, usage, now).open_calls:
                raise self._share_is_used(f"{key.concurrency} calls open")
        self._fill_bucket(key, usage, 1, now)
        usage.open_calls += 1

    def charge_prompts(
        self, key: LimitedKey, count: int, now: float, *, call_answers: int = 0
    ) -> None:
        """Counts a call's further prompts: with the first one its call is in the bucket.

        `call_answers` is as for `begin_answers`. Raises ApiError above the limit.
        """
        usage = self._usage_by_id.setdefault(key.id, KeyUsage())
        self._fill_bucket(key, usage, count, now, call_answers=call_answers)

    def close_call(self, key: LimitedKey) -> None:
        """Counts a call as over that `open_call` has counted."""
        self._usage_by_id[key.id].open_calls -= 1

    def begin_answers(
        self, key: LimitedKey, count: int, now: float, *, call_answers: int = 0
    ) -> None:
        """Counts answers as generated, until `end_answers`. Raises ApiError above a limit.

        One of them is in the bucket already, as a call. `call_answers` are those of the whole call,
        if the answers of its other prompts begin by themselves: a large call is let in with all of
        its prompts, though each of them is small.
        """
        usage = self._usage_by_id.setdefault(key.id, KeyUsage())
        usage.key = key
        if key.concurrency:
            running = usage.running_answers + self._used_elsewhere(key.id).running_answers
            if running + count > key.concurrency:
                message = (
                    f"this key may have {key.concurrency} answers generated at a time; "
                    f"{running} are, or are set aside for other gateways, "
                    f"and this call asks for {count} more"
                )
                raise ApiError("rate_limited", message)
            share = self._share(key, usage, now).running_answers
            exceeds_share = usage.running_answers + count > share
            is_large = self._is_large(max(count, call_answers), key.concurrency)
            if exceeds_share and not is_large:
                raise self._share_is_used(f"{key.concurrency} answers generated at a time")
        self._fill_bucket(key, usage, count - 1, now, call_answers=call_answers)
        usage.running_answers += count

    def end_answers(self, key: LimitedKey, count: int) -> None:
        """Counts answers as over that `begin_answers` has counted."""
        self._usage_by_id[key.id].running_answers -= count

    def forget_all_but(self, key_ids: Collection[str]) -> None:
        """Forgets the other keys' usage, of each whose calls and answers are all over."""
        self._usage_by_id = {
            key_id: usage
            for key_id, usage in self._usage_by_id.items()
            if key_id in key_ids or not usage.is_idle
        }
        self._shares.clear()  # their limits may have changed

    # ---- limits ----------------------------------------------------------------------------------

    def _fill_bucket(
        self, key: LimitedKey, usage: KeyUsage, count: int, now: float, *, call_answers: int = 0
    ) -> None:
        """Lets the key's bucket leak until `now`, and puts `count` more answers into it.

        They may be some of the `call_answers` of a call. Raises ApiError, with the time to wait, if
        they do not fit; the bucket then takes none of them.
        """
        limit = key.requests_per_min
        if not limit:
            return
        used_elsewhere = self._used_elsewhere(key.id).bucket_answers
        usage.requests_per_min = limit
        _leak(usage, used_elsewhere, now)
        excess_answers = usage.bucket_answers + used_elsewhere + count - limit
        if count and excess_answers > 0:
            message = f"this key may ask for {limit} answers a minute"
            wait_s = math.ceil(excess_answers * 60 / limit)
            raise ApiError("rate_limited", message, retry_after_s=wait_s)
        exceeds_share = usage.bucket_answers + count > self._share(key, usage, now).bucket_answers
        is_large = self._is_large(max(count, call_answers), limit)
        if count and exceeds_share and not is_large:
            raise self._share_is_used(f"{limit} answers a minute")
        usage.bucket_answers += count

    def _used_elsewhere(self, key_id: str) -> frames.KeyUse:
        """Returns what all other gateways have told of a key, added up."""
        open_calls = 0
        running_answers = 0
        bucket_answers = 0.0
        for usage in self._told.values():
            use = usage.get(key_id)
            if use is not None:
                open_calls += use.open_calls
                running_answers += use.running_answers
                bucket_answers += use.bucket_answers
        return frames.KeyUse(open_calls, running_answers, bucket_answers)

    def _share(self, key: LimitedKey, usage: KeyUsage, now: float) -> KeyShare:
        """Returns how much the key may use here until the next exchange."""
        share = self._shares.get(key.id)
        if share is None:
            elsewhere = self._used_elsewhere(key.id)
            limit = key.concurrency or 0
            open_calls = usage.open_calls + self._part(
                limit - usage.open_calls - elsewhere.open_calls
            )
            running_answers = usage.running_answers + self._part(
                limit - usage.running_answers - elsewhere.running_answers
            )
            if open_calls == usage.open_calls:
                # No further call, so no further answer but those of open calls. What this gateway
                # keeps for itself without a use, the one that has room for a call would lack.
                running_answers = min(running_answers, max(usage.running_answers, usage.open_calls))
            if key.id not in self._reported:
                # The others may take their parts of the whole limit still: they have not heard.
                open_calls = min(open_calls, self._part(limit))
                running_answers = min(running_answers, self._part(limit))
            share = self._shares[key.id] = KeyShare(
                open_calls,
                running_answers,
                usage.bucket_answers
                + self._part(
                    (key.requests_per_min or 0) - usage.bucket_answers - elsewhere.bucket_answers
                ),
            )
        return share

    def _part(self, left: float) -> int:
        """Returns this gateway's part of what all may use."""
        return max(0, math.ceil(left / self._gateways))

    def _is_large(self, count: int, limit: int) -> bool:
        """True if a call asks for more than a gateway's part of a limit of which nothing is used.

        Such a call would never fit into a part.
        """
        return count > self._part(limit)

    def _share_is_used(self, limit: str) -> ApiError:
        message = f"this key may have {limit}; {self._gateways} gateways share that: try again"
        return ApiError("rate_limited", message, retry_after_s=SHARE_RETRY_S)


def _leak(usage: KeyUsage, used_elsewhere: float, now: float) -> None:
    """Lets a bucket leak until `now`.

    The buckets of one key at several gateways leak its limit together, each by its level.
    """
    # A call brings the time of its arrival, which may be before the last update.
    leaked_answers = max(0.0, now - usage.updated_at_s) * usage.requests_per_min / 60
    usage.updated_at_s = max(usage.updated_at_s, now)
    if used_elsewhere and usage.bucket_answers:
        leaked_answers *= usage.bucket_answers / (usage.bucket_answers + used_elsewhere)
    usage.bucket_answers = max(0.0, usage.bucket_answers - leaked_answers)
