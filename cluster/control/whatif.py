"""What the last requests would have met under another policy, split or load (pure; virtual time).

They run through the simulator: the same router code, workers as fast as the router thinks they are.

    prefill(u) = base + token * u     from its predictions, u prompt tokens that were not cached
    step(B)    = base + row * B       from its predictions, B answers that ran on that worker then
    transfer   = what it expects not to hide behind the prefill, on average

What a prefix cache spared in life is spared here too, whoever is chosen: the blocks are not known.
The run as it was stands beside the other: how far that is from life is how far to trust both.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import nnls

from ...protos.frames import Coefficients, WorkerCard
from ...router import RouterConfig
from ...router.goodput import GAPS_FOR_P99
from ...router.policies import POLICIES
from ...simulator.fleet import Fleet, Split
from ...simulator.hardware import Hardware
from ...simulator.metrics import Slo
from ...simulator.sim import Setting, Simulation
from ...simulator.trace import HASH_TOKENS, Item, Trace

ENOUGH = 8  #: requests below which nothing is said
MOST_WORKERS, MOST_LOAD = 64, 8.0
CURVE = tuple(range(0, 101, 5))  #: percentiles of a curve
FULL = ("stop", "length")


class WhatIf(NamedTuple):
    """What is asked. `load`: times as many requests in the same pattern, at least half of it."""

    policy: str
    prefill: int
    decode: int
    load: float = 1.0

    def refusal(self) -> str | None:
        if self.policy not in POLICIES:
            return f"policy {self.policy!r}: expected one of {', '.join(POLICIES)}"
        if not (self.prefill >= 1 and self.decode >= 1):
            return "prefill and decode: at least one worker each"
        if self.prefill + self.decode > MOST_WORKERS:
            return f"prefill and decode: {MOST_WORKERS} workers at most"
        if not 0.5 <= self.load <= MOST_LOAD:
            return f"load: between 0.5 and {MOST_LOAD:g}"
        return None


def whatif(
    asked: WhatIf, decisions: list[dict[str, Any]], cards: list[WorkerCard], config: RouterConfig
) -> dict[str, Any] | str:
    """The runs side by side, or why there are none. `decisions` as `Decision.told` says them."""
    served = _served(decisions)
    roles = [card.role or card.pool for card in cards]
    now = WhatIf(config.policy, roles.count("prefill"), roles.count("decode"))
    if len(served) < ENOUGH:
        return f"{len(served)} of the last requests were served to their end; {ENOUGH} are needed"
    if now.refusal():
        return "the cluster has no prefill or no decode worker now"
    hardware = _hardware(served, cards[0])
    trace = Trace("the last requests", [_item(one, served[0]) for one in served], HASH_TOKENS)
    return {
        "requests": len(served),
        "span_s": round(trace.span_s, 3),
        "life": _life(served),
        "same": _run(now, trace, hardware, config),
        "other": _run(asked, trace, hardware, config),
    }


def _served(decisions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Whole first attempts, oldest first."""
    found = [
        one
        for one in decisions
        if one["decode"] and one["key"][1] == 0 and one["observed"].get("reason") in FULL
    ]
    return sorted(found, key=lambda one: one["at"] - one["waited_s"])


def _item(one: dict[str, Any], first: dict[str, Any]) -> Item:
    at = (one["at"] - one["waited_s"]) - (first["at"] - first["waited_s"])
    return Item(at, _uncached(one), max(1, one["observed"]["tokens"]))


def _uncached(one: dict[str, Any]) -> int:
    return max(1, one["prompt_tokens"] - one["hit_tokens"])


# ---- what a worker costs -------------------------------------------------------------------------


def _hardware(served: list[dict[str, Any]], card: WorkerCard) -> Hardware:
    tokens, prefill = [_uncached(one) for one in served], [one["prefill_s"] for one in served]
    beside = _beside(served)
    prefill_base, token = _line(tokens, prefill)
    step_base, row = _line(beside, [one["itl_s"] for one in served])
    cost = Coefficients(
        prefill_base=prefill_base,
        prefill_token=token,
        prefill_pair=0.0,
        step_base=step_base,
        step_row=row,
        step_weights=0.0,
        step_token=0.0,
        transfer_base=sum(one["exposed_s"] for one in served) / len(served),
        exposed_share=1.0,
    )
    return Hardware(
        card.gpu,
        card.tensor_parallel,
        cost,
        kv_tokens=card.blocks * card.block_tokens,
        gpus=1,
        chunk_tokens=card.chunk_tokens,
        max_running=card.max_running,
        budget_s=card.step_ms / 1e3 or inf,
    )


def _beside(served: list[dict[str, Any]]) -> list[int]:
    """How many answers ran on each one's decode worker when it was placed, itself included."""
    ends = [one["at"] + one["ttft_s"] + one["observed"]["tokens"] * one["itl_s"] for one in served]
    return [
        sum(
            other["decode"] == one["decode"] and other["at"] <= one["at"] <= end
            for other, end in zip(served, ends, strict=True)
        )
        for one in served
    ]


def _line(at: list[int], values: list[float]) -> tuple[float, float]:
    """base, slope >= 0 by least squares."""
    matrix = np.array([[1.0, one] for one in at])
    scale = matrix.max(axis=0)
    found, _ = nnls(matrix / scale, np.array(values, dtype=float))
    base, slope = found / scale
    return float(base), float(slope)


# ---- runs ----------------------------------------------------------------------------------------


def _run(asked: WhatIf, trace: Trace, hardware: Hardware, config: RouterConfig) -> dict[str, Any]:
    split = Split(asked.prefill, asked.decode)
    router = replace(config, policy=asked.policy, settle_s=0.001, decisions=0)
    slo = Slo(config.ttft_s, 0.0, config.itl_s)
    setting = Setting(Fleet(((hardware, split.total),)), split, router, slo)
    outcomes = Simulation(setting, trace).run(trace.workload(trace.rate * asked.load, 0))
    assert outcomes is not None  # nothing ends it early
    served = [one for one in outcomes if not one.refused]
    gaps = [one.tpot for one in served if one.output > 1]
    return {
        **asked._asdict(),
        "met": sum(one.met for one in outcomes) / len(outcomes),
        "refused": len(outcomes) - len(served),
        "itl_ms": _curve(gaps)[10] if gaps else None,
        "ttft_ms": _curve([one.ttft for one in served]),
    }


def _life(served: list[dict[str, Any]]) -> dict[str, Any]:
    """What was observed of the same requests; the gaps' p99 is judged as in the simulator."""

    def met(one: dict[str, Any]) -> bool:
        seen = one["observed"]
        gaps = seen["tokens"] - 1 >= GAPS_FOR_P99 and seen.get("itl_p99_ms", 0.0) / 1e3
        return seen["ttft_ms"] / 1e3 <= one["ttft_target_s"] and gaps <= one["itl_target_s"]

    return {
        "met": sum(map(met, served)) / len(served),
        "ttft_ms": _curve([one["observed"]["ttft_ms"] / 1e3 for one in served]),
    }


def _curve(seconds: list[float]) -> list[float]:
    """Milliseconds at each percentile of `CURVE`."""
    if not seconds:
        return []
    return [round(1e3 * float(value), 2) for value in np.percentile(seconds, CURVE)]
