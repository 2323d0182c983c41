"""The responses that clients may come back to: in the memory of one gateway, for a while.

A stored response is the object that the client got, and the conversation up to it. A conversation
is a list of turns: what the client sent for one response, and what that response said. Responses
that follow each other share their turns, so a turn counts once, however many responses hold it.

Each tenant sees its own responses only. A response goes when nobody has used it for a while, or
when there are too many: then the one used longest ago, of the tenant that takes the most room.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..errors import ApiError
from .schema import JsonObject

#: Estimates of what Python's objects of a response take beside its JSON texts: those of the
#: response itself, and its reference to each of its turns.
OVERHEAD_BYTES = 1024
TURN_REFERENCE_BYTES = 8
CONVERSATION_BYTES_MAX = 8 << 20  #: As the body of a client that sends the whole conversation.
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


@dataclass(slots=True, eq=False)
class Turn:
    """What was said for one response."""

    items: bytes  #: The JSON text of a list: the items of the input, then those of the output.
    holders: int = 0  #: Stored responses whose conversation has this turn.


@dataclass(slots=True, eq=False)
class StoredResponse:
    """A response, and the conversation that ends with it."""

    response: bytes  #: The JSON text of the object.
    turns: tuple[Turn, ...]  #: The conversation, this response's own turn last.
    last_used_s: float  #: By the store's clock.

    @property
    def own_bytes(self) -> int:
        """What the response takes without its turns, which others may share."""
        return len(self.response) + OVERHEAD_BYTES + TURN_REFERENCE_BYTES * len(self.turns)


@dataclass(slots=True)
class _TenantResponses:
    """The responses of one tenant, those that were used last at the end."""

    by_id: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)  #: Response ids.
    held_bytes: int = 0  #: What the responses and their turns take, each turn counted once.


class ResponseStore:
    """Stores responses by tenant and id."""

    def __init__(
        self,
        responses_limit: int,
        bytes_limit: int,
        lifetime_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store at most so many responses and bytes of all tenants; none if `responses_limit` is 0.

        A response goes when nobody has used it for `lifetime_s` seconds of `clock`.
        """
        self._responses_limit = responses_limit
        self._bytes_limit = bytes_limit
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._tenants: dict[str, _TenantResponses] = {}

    @property
    def is_enabled(self) -> bool:
        """True if the configuration lets responses be stored."""
        return self._responses_limit > 0

    def __len__(self) -> int:
        return sum(len(tenant.by_id) for tenant in self._tenants.values())

    @property
    def held_bytes(self) -> int:
        """What all stored responses take, about."""
        return sum(tenant.held_bytes for tenant in self._tenants.values())

    def put(
        self,
        tenant: str,
        response: JsonObject,
        input_items: list[JsonObject],
        previous_turns: tuple[Turn, ...] = (),
    ) -> None:
        """Store a response that has ended, behind the turns of the conversation before it.

        `response` is the object that the client gets, which `input_items` led to; `previous_turns`
        are what `turns` has returned for the response before. A response of the same id is
        replaced.
        """
        self._remove_expired()
        response_id = response["id"]
        self._remove(tenant, response_id)
        turn = Turn(_encode([*input_items, *response["output"]]))
        stored = StoredResponse(_encode(response), (*previous_turns, turn), self._clock())
        responses = self._tenants.setdefault(tenant, _TenantResponses())
        responses.by_id[response_id] = stored
        responses.held_bytes += stored.own_bytes
        for turn in stored.turns:
            if turn.holders == 0:
                responses.held_bytes += len(turn.items)
            turn.holders += 1
        while len(self) > self._responses_limit or self.held_bytes > self._bytes_limit:
            self._remove_oldest_of_largest_tenant()

    def find(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Return a response, which counts as used now, or None if it is not there."""
        self._remove_expired()
        responses = self._tenants.get(tenant, _TenantResponses()).by_id
        stored = responses.get(response_id)
        if stored is not None:
            stored.last_used_s = self._clock()
            responses.move_to_end(response_id)
        return stored

    def delete(self, tenant: str, response_id: str) -> None:
        """Forget a response if it is there; those that follow it keep its turns."""
        self._remove(tenant, response_id)

    def _remove(self, tenant: str, response_id: str) -> None:
        """Remove a response if it is there, and the turns that no other response has."""
        responses = self._tenants.get(tenant)
        stored = responses.by_id.pop(response_id, None) if responses else None
        if responses is None or stored is None:
            return
        responses.held_bytes -= stored.own_bytes
        for turn in stored.turns:
            turn.holders -= 1
            if turn.holders == 0:
                responses.held_bytes -= len(turn.items)
        if not responses.by_id:
            del self._tenants[tenant]

    def _remove_expired(self) -> None:
        """Remove what nobody has used for the lifetime of a response."""
        oldest_s = self._clock() - self._lifetime_s
        for tenant, responses in list(self._tenants.items()):
            # Those used last are at the end: the first that is young enough ends the search.
            while responses.by_id:
                response_id, stored = next(iter(responses.by_id.items()))
                if stored.last_used_s > oldest_s:
                    break
                self._remove(tenant, response_id)

    def _remove_oldest_of_largest_tenant(self) -> None:
        """Make room where most of it is taken, so that no tenant pushes out another one's."""
        tenant, responses = max(self._tenants.items(), key=lambda entry: entry[1].held_bytes)
        self._remove(tenant, next(iter(responses.by_id)))


def check_conversation(turns: Sequence[Turn]) -> None:
    """Raise ApiError if a conversation is too long to go on."""
    conversation_bytes = sum(len(turn.items) for turn in turns)
    if conversation_bytes > CONVERSATION_BYTES_MAX:
        message = (
            f"the conversation up to previous_response_id has {conversation_bytes} bytes, the "
            f"limit is {CONVERSATION_BYTES_MAX}: begin another one"
        )
        raise ApiError("context_length_exceeded", message, "previous_response_id")


def check_referenced_bytes(referenced_bytes: int) -> None:
    """Raise ApiError if the items that an input's references name are too long together."""
    if referenced_bytes > CONVERSATION_BYTES_MAX:
        message = (
            f"the items that the input's references name have {referenced_bytes} bytes, the limit "
            f"is {CONVERSATION_BYTES_MAX}: name fewer of them"
        )
        raise ApiError("context_length_exceeded", message, "input")


def output_items(stored: StoredResponse) -> dict[str, JsonObject]:
    """Return the output items of a stored response by their ids."""
    output: list[JsonObject] = _decode(stored.response)["output"]
    return {item["id"]: item for item in output}


def deleted_response(response_id: str) -> dict[str, Any]:
    """Return what says that a response was deleted."""
    return {"id": response_id, "object": "response", "deleted": True}
