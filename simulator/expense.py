"""What a fleet costs and consumes for each token that it answers.

    price of a million tokens = price of the fleet's hour / tokens in time in an hour * 1e6
    joules of a token         = sum of the GPUs' power / tokens in time in a second

Tokens are those of answers to requests that met their targets: else a fleet would be the cheaper the
more it is overloaded. What prompts cost is in their price. Prices are what the user
states, for an hour of one GPU, in any currency. The power is the most that the GPUs may take
(TDP, `GpuType.power_w`), without hosts, switches and cooling: no source of ours says what they take
under load, so the joules are an upper bound for the GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite

from .errors import SimulationError
from .fleet import Fleet
from .hardware import find_gpu, load_constants

SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, slots=True)
class Prices:
    """What an hour of one GPU costs, by GPU type. Empty: nobody said."""

    per_gpu_hour: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def parse(texts: str | Sequence[str]) -> Prices:
        """Return the prices of `GPU=PRICE` parts, such as `H100=2.2,H200=3`.

        Raises SimulationError for a part that is none, and for an unknown GPU type.
        """
        parts = texts.split(",") if isinstance(texts, str) else ",".join(texts).split(",")
        per_gpu_hour: dict[str, float] = {}
        for part in parts:
            if not part.strip():
                continue
            match = re.fullmatch(r"([A-Za-z0-9]+)=(\d+(?:\.\d+)?|\.\d+)", part.strip())
            if not match:
                raise SimulationError(
                    f"price {part.strip()}: expected GPU=PRICE, as in H200=3.5 for an hour of one"
                )
            find_gpu(match[1])
            if not float(match[2]) or match[1] in per_gpu_hour:
                raise SimulationError(f"price {part.strip()}: expected one price, more than 0")
            per_gpu_hour[match[1]] = float(match[2])
        return Prices(per_gpu_hour)

    def of_fleet_hour(self, fleet: Fleet) -> float | None:
        """Return the price of an hour of the whole fleet; None without any prices.

        Raises SimulationError if one of its GPU types has no price, and others have.
        """
        if not self.per_gpu_hour:
            return None
        if any(hardware.threads for hardware, _ in fleet.pools):
            raise SimulationError("price: measured CPU workers have no GPUs")
        total = 0.0
        for hardware, replicas in fleet.pools:
            if hardware.gpu not in self.per_gpu_hour:
                raise SimulationError(f"price: none is stated for {hardware.gpu}")
            total += self.per_gpu_hour[hardware.gpu] * hardware.gpus * replicas
        return total


def price_per_million_tokens(hour_price: float | None, tokens_per_s: float) -> float | None:
    """Return the price of a million tokens in time; None without a price or without tokens."""
    if hour_price is None or not tokens_per_s or not isfinite(tokens_per_s):
        return None
    return hour_price / (tokens_per_s * SECONDS_PER_HOUR) * 1e6


def joules_per_token(fleet: Fleet, tokens_per_s: float) -> float | None:
    """Return the GPUs' energy for a token in time, at most; None without GPUs or tokens."""
    if not tokens_per_s or not isfinite(tokens_per_s):
        return None
    if any(hardware.threads for hardware, _ in fleet.pools):
        return None
    gpus = load_constants().gpus
    watts = sum(
        gpus[hardware.gpu].power_w * hardware.gpus * replicas for hardware, replicas in fleet.pools
    )
    return watts / tokens_per_s
