"""Which replicas there are: `H200:32` (GPUs by type), `6P2D` (replicas by role), and faults.

A split names roles: P prefill, D decode, M mixed. Of a fleet of several GPU types each pool may
have its own split: `H100:8=2P,H200:8=2D`; without one, the split counts over all replicas in order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import SimulationError
from .hardware import Hardware

ROLES = {"P": "prefill", "D": "decode", "M": "mixed"}


@dataclass(frozen=True, slots=True)
class Split:
    """Replicas by role. Parsed from and printed as `6P2D`, `5P2D1M`, `8M`."""

    prefill: int = 0
    decode: int = 0
    mixed: int = 0

    @staticmethod
    def of(text: str) -> Split:
        if not re.fullmatch(r"(\d+[PDM])+", text):
            raise SimulationError(f"split {text}: expected replicas by role, like 6P2D or 8M")
        counts = dict.fromkeys("PDM", 0)
        for number, role in re.findall(r"(\d+)([PDM])", text):
            counts[role] += int(number)
        return Split(counts["P"], counts["D"], counts["M"])

    @property
    def total(self) -> int:
        return self.prefill + self.decode + self.mixed

    @property
    def serves(self) -> bool:
        """Both phases have a worker."""
        return self.mixed > 0 or (self.prefill > 0 and self.decode > 0)

    def roles(self) -> list[str]:
        return ["prefill"] * self.prefill + ["decode"] * self.decode + ["mixed"] * self.mixed

    def __str__(self) -> str:
        parts = ((self.prefill, "P"), (self.decode, "D"), (self.mixed, "M"))
        return "".join(f"{count}{role}" for count, role in parts if count)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Pools of equal replicas, in the order given: (hardware, replicas)."""

    pools: tuple[tuple[Hardware, int], ...]

    @staticmethod
    def of(text: str, model: str, tp: int) -> Fleet:
        pools = []
        for part in text.split(","):
            found = re.fullmatch(r"([A-Za-z0-9]+):(\d+)", part.strip())
            if not found:
                raise SimulationError(f"fleet {text}: expected GPU:COUNT,..., like H200:32")
            gpu, count = found[1], int(found[2])
            if count == 0 or count % tp:
                raise SimulationError(f"fleet {part}: {count} GPUs are no whole replicas of {tp}")
            pools.append((Hardware.of(model, gpu, tp), count // tp))
        return Fleet(tuple(pools))

    @property
    def replicas(self) -> int:
        return sum(count for _, count in self.pools)

    @property
    def gpus(self) -> int:
        return sum(hardware.gpus * count for hardware, count in self.pools)

    @property
    def reference(self) -> Hardware:
        """What an isolated prefill is timed on: the first pool."""
        return self.pools[0][0]

    def workers(self, split: Split | tuple[Split, ...]) -> list[tuple[str, Hardware]]:
        """(role, hardware) of every replica; one split for each pool, or one over all."""
        hardware = [[one] * count for one, count in self.pools]
        if isinstance(split, Split):
            flat = [one for pool in hardware for one in pool]
            if split.total != len(flat):
                raise SimulationError(f"split {split}: the fleet has {len(flat)} replicas")
            return list(zip(split.roles(), flat, strict=True))
        found = []
        for one, pool in zip(split, hardware, strict=True):
            if one.total != len(pool):
                raise SimulationError(f"split {one}: the pool has {len(pool)} replicas")
            found += list(zip(one.roles(), pool, strict=True))
        return found


def splits(replicas: int, mixed: bool = False) -> list[Split]:
    """Every split with both roles; `mixed`: and all replicas mixed."""
    found = [Split(p, replicas - p) for p in range(1, replicas)]
    return found + ([Split(mixed=replicas)] if mixed or not found else [])


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong. Workers by their place in the fleet; times in seconds."""

    report_delay_s: float = 0.0  #: age at which the router hears of block events and steps
    slow: tuple[tuple[int, float], ...] = ()  #: (worker, times slower than its card says)
    misprediction: float = 0.0  #: a prefill takes up to so much more or less, uniformly
    kill: tuple[tuple[int, float], ...] = ()  #: (worker, when it dies)

    @staticmethod
    def of(text: str) -> Faults:
        """`stale=1s,slow=3x@0,wrong=10%,kill=2@60s`: workers by their place in the fleet."""
        values: dict = {"slow": [], "kill": []}
        patterns = {
            "stale": r"([\d.]+)s",
            "wrong": r"([\d.]+)%",
            "slow": r"([\d.]+)x@(\d+)",
            "kill": r"(\d+)@([\d.]+)s",
        }
        for part in filter(None, text.replace(" ", "").split(",")):
            name, _, value = part.partition("=")
            found = re.fullmatch(patterns[name], value) if name in patterns else None
            if not found:
                raise SimulationError(f"faults {part}: expected stale=1s,slow=3x@0,wrong=10%,...")
            if name == "stale":
                values["report_delay_s"] = float(found[1])
            elif name == "wrong":
                values["misprediction"] = float(found[1]) / 100
            elif name == "slow":
                values["slow"].append((int(found[2]), float(found[1])))
            else:
                values["kill"].append((int(found[1]), float(found[2])))
        return Faults(**values | {name: tuple(values[name]) for name in ("slow", "kill")})
