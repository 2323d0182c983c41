"""Tiers of KV below a simulated worker's pool: host memory and disk.

A block that the pool evicts goes to memory, and to disk too if there is one. That is assumed to cost the
worker nothing, as our engine copies ahead of the eviction. A tier that is full drops the block whose last
use is longest ago; an eviction from the pool and a load are uses. The disk holds what memory holds and
older blocks behind; those come back slower. One that is smaller than memory is of no use. Loads go one
after the other, whichever tier they are from.

Sizes and speeds are of one worker, written `memory=256GiB,disk=2TiB` or, with speeds of their own,
`memory=256GiB@40GB/s,disk=2TiB@6GB/s`.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from ..engine.blocks import BlockPool
from .errors import SimulationError

#: KV that comes back from host memory, for each GPU of a worker. Assumed: about half of what PCIe 5.0 x16
#: carries (64 GB/s), as a block is copied layer by layer, in small pieces.
MEMORY_BYTES_PER_S = 30e9
#: KV that comes back from disk, for each GPU. Assumed: one NVMe drive of 6 GB/s for two GPUs.
DISK_BYTES_PER_S = 3e9
UNITS = {"GiB": 1 << 30, "TiB": 1 << 40}
PATTERN = r"(memory|disk)=(\d+\.?\d*|\.\d+)(GiB|TiB)(?:@(\d+\.?\d*|\.\d+)GB/s)?"


@dataclass(frozen=True, slots=True)
class TierSizes:
    """What the tiers of one worker hold, and how fast it comes back."""

    memory_bytes: float
    disk_bytes: float = 0.0  #: 0: no disk
    #: None: `MEMORY_BYTES_PER_S` and `DISK_BYTES_PER_S` times the worker's GPUs
    memory_bytes_per_s: float | None = None
    disk_bytes_per_s: float | None = None

    @staticmethod
    def parse(text: str) -> TierSizes | None:
        """Return the tiers of a text as in the module's docstring; None for an empty one.

        Raises SimulationError.
        """
        if not text:
            return None
        sizes: dict[str, float] = {}
        speeds: dict[str, float | None] = {}
        for part in text.replace(" ", "").split(","):
            found = re.fullmatch(PATTERN, part)
            if not found or found[1] in sizes:
                raise SimulationError(
                    f"tiers {part}: expected memory=256GiB,disk=2TiB, with speeds if you like: "
                    "memory=256GiB@40GB/s"
                )
            name = found[1]
            sizes[name] = float(found[2]) * UNITS[found[3]]
            speeds[name] = float(found[4]) * 1e9 if found[4] else None
            if not sizes[name] or speeds[name] == 0.0:
                raise SimulationError(f"tiers {part}: expected a size and a speed above 0")
        if "memory" not in sizes:
            raise SimulationError(f"tiers {text}: a disk needs memory above it")
        return TierSizes(
            memory_bytes=sizes["memory"],
            disk_bytes=sizes.get("disk", 0.0),
            memory_bytes_per_s=speeds["memory"],
            disk_bytes_per_s=speeds.get("disk"),
        )

    def scaled(self, factor: float) -> TierSizes:
        """Return tiers that hold `factor` times as much, at the same speed."""
        return TierSizes(
            memory_bytes=self.memory_bytes * factor,
            disk_bytes=self.disk_bytes * factor,
            memory_bytes_per_s=self.memory_bytes_per_s,
            disk_bytes_per_s=self.disk_bytes_per_s,
        )

    def of_worker(self, kv_token_bytes: float, gpus: int) -> WorkerTiers:
        """Return the tiers in tokens, of a worker with so many GPUs.

        `kv_token_bytes` has the KV of one token, of all GPUs together, copies included; 0: it is not
        known. Raises SimulationError if it is not, or memory does not hold a token.
        """
        if not kv_token_bytes:
            raise SimulationError("tiers: nobody has measured how large the KV of these workers is")
        if self.memory_bytes < kv_token_bytes:
            raise SimulationError("tiers: the memory does not hold the KV of one token")
        memory_speed = self.memory_bytes_per_s or MEMORY_BYTES_PER_S * gpus
        disk_speed = self.disk_bytes_per_s or DISK_BYTES_PER_S * gpus
        return WorkerTiers(
            memory_tokens=int(self.memory_bytes / kv_token_bytes),
            disk_tokens=int(self.disk_bytes / kv_token_bytes),
            memory_token_s=kv_token_bytes / memory_speed,
            disk_token_s=kv_token_bytes / disk_speed,
        )

    def __str__(self) -> str:
        parts = [_part("memory", self.memory_bytes, self.memory_bytes_per_s)]
        if self.disk_bytes:
            parts.append(_part("disk", self.disk_bytes, self.disk_bytes_per_s))
        return ",".join(parts)


def _part(name: str, size: float, bytes_per_s: float | None) -> str:
    """Return a tier as `TierSizes.parse` reads it, to six decimals."""
    speed = f"@{_decimal(bytes_per_s / 1e9)}GB/s" if bytes_per_s else ""
    return f"{name}={_decimal(size / UNITS['GiB'])}GiB{speed}"


def _decimal(value: float) -> str:
    return f"{value:.6f}".rstrip("0").rstrip(".")


@dataclass(frozen=True, slots=True)
class WorkerTiers:
    """The tiers of one worker, in tokens of KV."""

    memory_tokens: int
    disk_tokens: int
    memory_token_s: float  #: seconds in which the KV of a token comes back from memory
    disk_token_s: float  #: the same, from disk


class SimulatedTiers:
    """Which blocks the tiers of one worker hold, and how long loads take.

    A block is known by its content: a hash of its tokens and of all before them. Times are seconds of
    the simulated clock.
    """

    def __init__(self, tiers: WorkerTiers, block_tokens: int) -> None:
        """`block_tokens`: tokens of a block."""
        self._block_tokens = block_tokens
        self._tiers = tiers
        self._memory_blocks = tiers.memory_tokens // block_tokens
        #: In either tier: memory holds nothing that a larger disk lacks.
        self._all_blocks = max(self._memory_blocks, tiers.disk_tokens // block_tokens)
        #: Contents in the order of their last use, the oldest first: in memory, and in either tier.
        self._in_memory: OrderedDict[bytes, None] = OrderedDict()
        self._held: OrderedDict[bytes, None] = OrderedDict()
        self._free_at = 0.0  #: when the last load ends

    def store(self, content: bytes) -> list[bytes]:
        """Keep a block that the pool evicts; return the contents that no tier holds any more."""
        left: list[bytes] = []
        self._use(content)
        while len(self._held) > self._all_blocks:
            oldest, _ = self._held.popitem(last=False)
            left.append(oldest)
        return left

    def _use(self, content: bytes) -> None:
        """Makes this the latest use, in memory too; memory drops what was not used for longest."""
        for order in (self._in_memory, self._held):
            order[content] = None
            order.move_to_end(content)
        if len(self._in_memory) > self._memory_blocks:
            self._in_memory.popitem(last=False)

    def count_held(self, contents: Sequence[bytes]) -> int:
        """Return how many leading contents a tier holds."""
        for count, content in enumerate(contents):
            if content not in self._held:
                return count
        return len(contents)

    def load(self, contents: Sequence[bytes], now: float) -> float:
        """Load the blocks of a prefix, all of which a tier holds; return when they are in the pool.

        They stay in the tiers, and come to memory as far as it holds them. The head counts as used last,
        as a prefix is worth nothing without it.
        """
        seconds = 0.0
        for content in contents:
            in_memory = content in self._in_memory
            token_s = self._tiers.memory_token_s if in_memory else self._tiers.disk_token_s
            seconds += token_s * self._block_tokens
        for content in reversed(contents):
            self._use(content)
        self._free_at = max(self._free_at, now) + seconds
        return self._free_at


def put_below(pool: BlockPool, tiers: SimulatedTiers) -> None:
    """Let the tiers take the blocks that the pool evicts.

    The pool keeps what the router is told of them (their marks), as it does for a live worker's tiers.
    """

    def take(content: bytes, marks: Sequence[bytes]) -> None:
        left = tiers.store(content)
        pool.note_in_tier(content, marks)
        pool.forget_in_tiers(left)

    pool.before_eviction = take
