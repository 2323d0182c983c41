"""Finds stored responses: in this gateway's store, or at the gateway that has them.

A response is stored by the gateway that generated it, and by no other. A client's next call may
reach any gateway, so one that has not got the response asks the others (`peers.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

from ....protos import frames
from ..errors import ApiError
from ..peers import GatewayPeers
from .response_store import (
    ResponseStore,
    StoredResponse,
    Turn,
    check_conversation,
    output_items,
)
from .schema import JsonObject

#: Most bytes of a response, with the conversation if that is wanted, that go to another gateway;
#: a frame holds 16 MiB.
SENT_BYTES_MAX = 12 << 20
#: What a client can do instead, by the field of the body that names what was not found.
_ADVICE = {
    "previous_response_id": ": send the whole conversation as input",
    "input": ": send the item itself",
}


class ResponseFinder:
    """Finds the stored responses of all gateways for one of them.

    Each method may raise ApiError: `not_found`, or `no_capacity` if a gateway that may have the
    response does not answer, or if too many calls to other gateways wait for their answers.
    """

    def __init__(self, store: ResponseStore, peers: GatewayPeers) -> None:
        """Look in `store` first, which is this gateway's, and then at the gateways of `peers`."""
        self._store = store
        self._peers = peers

    async def get(self, tenant: str, response_id: str, param: str | None = None) -> StoredResponse:
        """Return a response, which counts as used now.

        A response that another gateway has comes without its conversation. `param` is the field of
        the body that names the response; None: it is named by the path.
        """
        return await self._find(tenant, response_id, param)

    async def turns(self, tenant: str, response_id: str) -> tuple[Turn, ...]:
        """Return the conversation that ends with a response.

        Raises ApiError `context_length_exceeded` for a conversation that is too long to go on. If
        another gateway has the conversation, and it has more than `SENT_BYTES_MAX` bytes together
        with the response, the error is `not_found`.
        """
        stored = await self._find(tenant, response_id, "previous_response_id", with_turns=True)
        check_conversation(stored.turns)
        return stored.turns

    async def items(self, tenant: str, item_ids: Iterable[str]) -> dict[str, JsonObject]:
        """Return output items of stored responses by their ids.

        Each response is looked for and decoded once, however many of its items are named.
        """
        items: dict[str, JsonObject] = {}
        looked_into: set[str] = set()
        for item_id in item_ids:
            # An item's id is a prefix, the id of its response and a number, joined by `_`.
            response_id = item_id.partition("_")[2].rpartition("_")[0]
            if not response_id:  # another server's id, such as OpenAI's `msg_123`
                message = f"item {item_id[:128]!r} not found{_ADVICE['input']}"
                raise ApiError("not_found", message, "input")
            if response_id not in looked_into:
                looked_into.add(response_id)
                items |= output_items(await self._find(tenant, response_id, "input"))
            if item_id not in items:
                message = f"item {item_id[:128]!r} not found in its response{_ADVICE['input']}"
                raise ApiError("not_found", message, "input")
        return items

    async def delete(self, tenant: str, response_id: str) -> None:
        """Forget a response, wherever it is; those that follow it keep its turns.

        Several gateways may have responses of one id, as clients may use their ids again: all
        forget theirs. Where one was found, a gateway that does not answer is no error: it would
        have another one only if the client had used the id twice.
        """
        is_deleted = self._store.find(tenant, response_id) is not None
        self._store.delete(tenant, response_id)
        try:
            # The first gateway that has the response ends the search, so others may have it still.
            while await self._peers.find_response(tenant, response_id, delete=True):
                is_deleted = True
        except ApiError:
            if not is_deleted:
                raise
        if not is_deleted:
            raise _not_found(response_id, None)

    async def _find(
        self, tenant: str, response_id: str, param: str | None, *, with_turns: bool = False
    ) -> StoredResponse:
        stored = self._store.find(tenant, response_id)
        if stored is not None:
            return stored
        found = await self._peers.find_response(tenant, response_id, with_turns=with_turns)
        if found is None or found.response is None:
            raise _not_found(response_id, param)
        turns = tuple(Turn(items) for items in found.turns)
        return StoredResponse(found.response, turns, last_used_s=0.0)


def answer_peer(store: ResponseStore, frame: frames.FindResponse) -> frames.ResponseFound:
    """Return what the gateway of `store` answers another one that looks for a response.

    A response that was there and is deleted now is answered as an empty text. One that is longer
    than `SENT_BYTES_MAX`, with its conversation if that is wanted, does not fit into the answer,
    which then says that it is not there.
    """
    stored = store.find(frame.tenant, frame.response_id)
    if stored is None:
        return frames.ResponseFound(frame.call_id)
    if frame.delete:
        store.delete(frame.tenant, frame.response_id)
        return frames.ResponseFound(frame.call_id, b"")
    turns = [turn.items for turn in stored.turns] if frame.with_turns else []
    if len(stored.response) + sum(map(len, turns)) > SENT_BYTES_MAX:
        return frames.ResponseFound(frame.call_id)
    return frames.ResponseFound(frame.call_id, stored.response, turns)


def _not_found(response_id: str, param: str | None) -> ApiError:
    advice = _ADVICE.get(param, "") if param else ""
    message = (
        f"Response with id {response_id[:128]!r} not found. A gateway keeps responses in its "
        "memory for a while: this one expired, was deleted or not stored, is too long for its "
        f"gateway to send to another one, or its gateway has ended{advice}"
    )
    return ApiError("not_found", message, param)
