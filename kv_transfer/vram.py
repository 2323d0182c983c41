"""A KV pool in GPU memory, for the same transfer service: what differs from host memory.

Unproven on a GPU: nothing here has run on one. The digest and the gate are tested on CPU tensors.

Checksums are computed where the bytes are, by tensor operations, so no byte crosses to the host.
They are not xxh3, so a pool in GPU memory and one in host memory are not compatible: `DIGEST` goes
into the hash that peers compare. A write is posted when the CUDA event behind the kernels that made
its KV has been reached (`commands.Push.event`): the transport reads memory without the stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

DIGEST = b"words64"
_GOLDEN, _MIX = -7046029254386353131, -4417276706812531889  # odd 64-bit constants, as int64


class VramPool:
    """`transport.Pool` over a flat uint8 tensor of a GPU. Its owner records events in order."""

    memory, fd = "VRAM", None
    view = memoryview(b"")

    def __init__(self, tensor: torch.Tensor) -> None:
        assert tensor.dtype == torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous()
        self._words = tensor.view(torch.int64)
        self.base, self.size = tensor.data_ptr(), tensor.numel()
        self.device = tensor.device.index or 0
        self._events: deque[tuple[int, torch.cuda.Event]] = deque()
        self._last = 0

    def record(self) -> int:
        """The number of an event behind everything on the current stream so far. Owner's thread."""
        event = torch.cuda.Event()
        event.record()
        self._last += 1
        self._events.append((self._last, event))
        return self._last

    def reached(self, number: int) -> bool:
        """Whether the event of this number has come. Transfer thread."""
        while self._events and self._events[0][1].query():
            self._events.popleft()
        return not self._events or number < self._events[0][0]

    def digest(self, unit: int, runs: Sequence[tuple[int, int]], seed: int) -> int:
        """64 bits of the bytes of `runs` ((first unit, units) of `unit` bytes) in this order.

        A sum of mixed words, each with its place, so words that changed places change it too.
        """
        width = unit // 8
        words = torch.cat([self._words[at * width : (at + n) * width] for at, n in runs])
        place = torch.arange(1, len(words) + 1, device=words.device, dtype=torch.int64)
        mixed = (words ^ (place * _GOLDEN + _signed(seed))) * _MIX
        mixed = (mixed ^ (mixed >> 29)) * _GOLDEN
        return int((mixed ^ (mixed >> 32)).sum().item()) & 0xFFFFFFFFFFFFFFFF


def _signed(value: int) -> int:
    value &= 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >> 63 else value
