"""A KV pool in GPU memory, for the same transfer service: what differs from host memory.

Unproven on a GPU: nothing here has run on one. The digest and the gate are tested on CPU tensors.

Checksums are computed where the bytes are, by tensor operations, so no byte crosses to the host.
They are not xxh3, so a pool in GPU memory and one in host memory are not compatible: `DIGEST` goes
into the hash that peers compare. A write is posted when the CUDA event behind the kernels that made
its KV has been reached (`commands.PushBlocks.event`): the transport reads memory without the
stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

DIGEST = b"words64"
_WORD_BYTES = 8
_WORD_MASK = 0xFFFFFFFFFFFFFFFF
_GOLDEN = -7046029254386353131  #: an odd 64-bit constant, as int64
_MIX = -4417276706812531889  #: another one


class VramPool:
    """`transport.Pool` over a flat uint8 tensor of a GPU. Its owner records events in order."""

    memory = "VRAM"
    fd = None
    view = memoryview(b"")

    def __init__(self, tensor: torch.Tensor) -> None:
        assert tensor.dtype == torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous()
        self.base = tensor.data_ptr()
        self.size = tensor.numel()
        self.device = tensor.device.index or 0
        self._words = tensor.view(torch.int64)
        #: Events that have not been seen to be reached, with their numbers, oldest first.
        self._events: deque[tuple[int, torch.cuda.Event]] = deque()
        self._latest_number = 0

    def record(self) -> int:
        """Records an event behind everything on the current stream so far; returns its number.

        Must be called in the owner's thread.
        """
        event = torch.cuda.Event()
        event.record()
        self._latest_number += 1
        self._events.append((self._latest_number, event))
        return self._latest_number

    def reached(self, number: int) -> bool:
        """Whether the event of this number has been reached. The transfer thread calls this."""
        while self._events and self._events[0][1].query():
            self._events.popleft()
        return not self._events or number < self._events[0][0]

    def digest(self, unit: int, runs: Sequence[tuple[int, int]], seed: int) -> int:
        """Returns 64 bits of the bytes of `runs`, in this order.

        A run is its first unit and its number of units, of `unit` bytes each. The digest is a sum
        of mixed words, each with its place, so words that changed places change it too.
        """
        width = unit // _WORD_BYTES
        parts = [self._words[first * width : (first + count) * width] for first, count in runs]
        words = torch.cat(parts)
        place = torch.arange(1, len(words) + 1, device=words.device, dtype=torch.int64)
        mixed = (words ^ (place * _GOLDEN + _signed(seed))) * _MIX
        mixed = (mixed ^ (mixed >> 29)) * _GOLDEN
        return int((mixed ^ (mixed >> 32)).sum().item()) & _WORD_MASK


def _signed(value: int) -> int:
    """The int64 with the same lower 64 bits."""
    value &= _WORD_MASK
    return value - (1 << 64) if value >> 63 else value
