"""What a step tells the device of its slots (`slots.py`), and one rank the others (pure)."""

from __future__ import annotations

import msgspec


class SlotUpdate(msgspec.Struct, frozen=True):
    """What changes in the slots before a step draws."""

    cleared: list[int] = []  #: Slots whose counts begin at 0.
    triples: bytes = b""  #: int32 [n, 3]: (slot, id, what is added to its count).
    listed: list[int] = []  #: Slots that get a list,
    list_ids: bytes = b""  #: int32 [slots, LIST_SIZE],
    list_values: bytes = b""  #: and float32 of the same shape.
    masked: list[int] = []  #: Slots that get a mask,
    masks: bytes = b""  #: int32 [slots, words].

    def __bool__(self) -> bool:
        return bool(self.cleared or self.triples or self.listed or self.masked)
