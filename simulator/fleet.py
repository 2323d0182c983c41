"""Which replicas there are: fleets (`H200:32`), their roles (`6P2D`), and what goes wrong in them.

A fleet names GPUs by type. A split names how many replicas have each role: P prefill, D decode,
M mixed (both). A pool is a number of replicas of equal hardware. One split counts over all replicas
of a fleet, in the order of its pools; a tuple of splits has one for each pool.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ..protos.frames import Coefficients
from .errors import SimulationError
from .hardware import DEFAULT_ENGINE, Hardware
from .tiers import TierSizes

NUMBER = r"(\d+\.?\d*|\.\d+)"  #: a pattern, with one group
#: By the name of a fault, what its value looks like; `Faults` says what the values mean.
FAULT_PATTERNS = {
    "stale": rf"{NUMBER}s",
    "wrong": rf"{NUMBER}%",
    "slow": rf"{NUMBER}x@(\d+)",
    "kill": rf"(\d+)@{NUMBER}s",
}


@dataclass(frozen=True, slots=True)
class Split:
    """Replicas by role. It is parsed from and printed as `6P2D`, `5P2D1M`, `8M`."""

    prefill: int = 0
    decode: int = 0
    mixed: int = 0

    @staticmethod
    def parse(text: str) -> Split:
        """Return the split of a text like `5P2D1M`; of a role named twice both numbers count.

        Raises SimulationError.
        """
        if not re.fullmatch(r"(\d+[PDM])+", text):
            raise SimulationError(f"split {text}: expected replicas by role, like 6P2D or 8M")
        counts = dict.fromkeys("PDM", 0)
        for number, role in re.findall(r"(\d+)([PDM])", text):
            counts[role] += int(number)
        return Split(prefill=counts["P"], decode=counts["D"], mixed=counts["M"])

    @property
    def replicas(self) -> int:
        """Replicas of all roles."""
        return self.prefill + self.decode + self.mixed

    @property
    def serves_both_phases(self) -> bool:
        """Whether there is a worker for prompts and one for answers."""
        return self.mixed > 0 or (self.prefill > 0 and self.decode > 0)

    def roles(self) -> list[str]:
        """Return the role of each replica: first prefill, then decode, then mixed."""
        return ["prefill"] * self.prefill + ["decode"] * self.decode + ["mixed"] * self.mixed

    def __str__(self) -> str:
        counts = ((self.prefill, "P"), (self.decode, "D"), (self.mixed, "M"))
        return "".join(f"{count}{role}" for count, role in counts if count)


#: One split over all replicas of a fleet, or one for each of its pools.
FleetSplit = Split | tuple[Split, ...]


@dataclass(frozen=True, slots=True)
class Fleet:
    """Pools of equal replicas."""

    pools: tuple[tuple[Hardware, int], ...]  #: (a replica, how many there are of it)

    @staticmethod
    def parse(text: str, model: str, tp: int, engine: str = DEFAULT_ENGINE) -> Fleet:
        """Return the fleet `GPU:COUNT,...`, with replicas of `tp` GPUs that run this engine.

        Raises SimulationError.
        """
        pools: list[tuple[Hardware, int]] = []
        for part in text.split(","):
            match = re.fullmatch(r"([A-Za-z0-9]+):(\d+)", part.strip())
            if not match:
                raise SimulationError(f"fleet {text}: expected GPU:COUNT,..., like H200:32")
            gpu = match[1]
            count = int(match[2])
            if count == 0 or count % tp:
                raise SimulationError(f"fleet {part}: {count} GPUs are no whole replicas of {tp}")
            pools.append((Hardware.of(model, gpu, tp, engine), count // tp))
        return Fleet(tuple(pools))

    def with_tiers(self, sizes: TierSizes | None) -> Fleet:
        """Return the fleet with these tiers below each replica's KV pool; None: with none.

        Raises SimulationError if their size in tokens is not known.
        """
        pools: list[tuple[Hardware, int]] = []
        for hardware, count in self.pools:
            tiers = None
            if sizes is not None:
                tiers = sizes.of_worker(hardware.kv_token_bytes, hardware.gpus)
            pools.append((replace(hardware, tiers=tiers), count))
        return Fleet(tuple(pools))

    @property
    def replicas(self) -> int:
        """Replicas of all pools."""
        return sum(count for _, count in self.pools)

    @property
    def gpus(self) -> int:
        """GPUs of all replicas; of CPU workers, their cores."""
        return sum(hardware.gpus * count for hardware, count in self.pools)

    @property
    def reference(self) -> Hardware:
        """A replica of the first pool, by which the fleet's engine is named."""
        return self.pools[0][0]

    @property
    def costs(self) -> tuple[Coefficients, ...]:
        """The cost of each pool's replicas; the fastest one times isolated prefills."""
        return tuple(hardware.cost for hardware, _ in self.pools)

    def workers(self, split: FleetSplit) -> list[tuple[str, Hardware]]:
        """Return (role, hardware) of every replica.

        Raises SimulationError if the split has another number of replicas, or of pools.
        """
        pools = [[hardware] * count for hardware, count in self.pools]
        if isinstance(split, Split):
            replicas = [hardware for pool in pools for hardware in pool]
            if split.replicas != len(replicas):
                raise SimulationError(f"split {split}: the fleet has {len(replicas)} replicas")
            return list(zip(split.roles(), replicas, strict=True))

        if len(split) != len(pools):
            raise SimulationError(f"{len(split)} splits: the fleet has {len(pools)} pools")
        workers: list[tuple[str, Hardware]] = []
        for pool_split, pool in zip(split, pools, strict=True):
            if pool_split.replicas != len(pool):
                raise SimulationError(f"split {pool_split}: the pool has {len(pool)} replicas")
            workers += zip(pool_split.roles(), pool, strict=True)
        return workers


def possible_splits(replicas: int, mixed: bool = False) -> list[Split]:
    """Return every split that has prefill and decode workers and no mixed ones.

    With `mixed` the split of only mixed replicas comes last; it also does where one replica leaves
    no other split.
    """
    splits = [Split(prefill, replicas - prefill) for prefill in range(1, replicas)]
    if mixed or not splits:
        splits.append(Split(mixed=replicas))
    return splits


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong in a run. Workers are named by their place in the fleet, from 0."""

    report_delay_s: float = 0.0  #: age of a worker's report when the router gets it
    slow_workers: tuple[tuple[int, float], ...] = ()  #: (worker, times slower than its card says)
    #: A prefill takes up to this share longer or shorter than predicted, drawn uniformly.
    misprediction_share: float = 0.0
    killed_workers: tuple[tuple[int, float], ...] = ()  #: (worker, seconds at which it dies)

    @staticmethod
    def parse(text: str) -> Faults:
        """Return the faults of `stale=1s,slow=3x@0,wrong=10%,kill=2@60s`, each optional.

        `slow` and `kill` may come several times. Raises SimulationError, also for a time that would
        be negative (`wrong` above 100 %) or 0 (`slow=0x`).
        """
        report_delay_s = 0.0
        misprediction_share = 0.0
        slow_workers: list[tuple[int, float]] = []
        killed_workers: list[tuple[int, float]] = []
        for part in filter(None, text.replace(" ", "").split(",")):
            name, _, value = part.partition("=")
            found = re.fullmatch(FAULT_PATTERNS[name], value) if name in FAULT_PATTERNS else None
            if not found:
                raise SimulationError(f"faults {part}: expected stale=1s,slow=3x@0,wrong=10%,...")
            match name:
                case "stale":
                    report_delay_s = float(found[1])
                case "wrong":
                    misprediction_share = float(found[1]) / 100
                    if misprediction_share > 1:
                        raise SimulationError(f"faults {part}: expected 100% at most")
                case "slow":
                    slowness = float(found[1])
                    if not slowness:
                        raise SimulationError(f"faults {part}: expected a factor above 0")
                    slow_workers.append((int(found[2]), slowness))
                case "kill":
                    killed_workers.append((int(found[1]), float(found[2])))
        return Faults(
            report_delay_s=report_delay_s,
            slow_workers=tuple(slow_workers),
            misprediction_share=misprediction_share,
            killed_workers=tuple(killed_workers),
        )
