"""What the last requests would have met under another policy, split or load (pure; virtual time).

The requests run through the simulator: the router's own code, and workers that are as fast as the
router predicts. `u` are a prompt's tokens that were not cached, and `B` is the number of answers
that decoded on the same worker when the request was placed:

    prefill(u) = prefill_base + prefill_token * u     fitted to the predicted prefill times
    step(B)    = step_base + step_row * B             fitted to the predicted times between tokens
    transfer   = the mean predicted part of it that the prefill does not hide

Tokens that a prefix cache spared in the real run are spared in the simulated ones too, whichever
worker is chosen, as the blocks are not recorded. The result has three columns: what was observed,
the same setup simulated, and the other setup simulated. How far the second is from the first is how
far to trust the third.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

import numpy as np

from ...protos.frames import Coefficients, RequestOutcome, WorkerCard
from ...router import RouterConfig
from ...router.goodput import FINISHED, judge
from ...router.policies import POLICIES
from ...simulator.fleet import Fleet, Split
from ...simulator.hardware import Hardware
from ...simulator.least_squares import fit_line
from ...simulator.metrics import Slo
from ...simulator.sim import Setting, Simulation
from ...simulator.trace import HASH_TOKENS, Trace, TraceRequest

MIN_REQUESTS = 8  #: With fewer requests nothing is said: a fitted line would mean nothing.
WORKERS_LIMIT = 64  #: Of both roles together, so that a simulation takes seconds.
LOAD_MINIMUM = 0.5  #: Times the recorded load, as the next.
LOAD_LIMIT = 8.0
SETTLE_S = 0.001  #: All simulated workers join at once: the router need not wait for more.
CURVE_PERCENTILES = tuple(range(0, 101, 5))  #: The points of a curve of latencies.
MEDIAN_INDEX = CURVE_PERCENTILES.index(50)
#: A decision of the router, as `Decision.to_plain` in router/decisions.py describes it.
DecisionRecord = dict[str, Any]


class WhatIfScenario(NamedTuple):
    """A policy, workers of each role, and a load to simulate."""

    policy: str  #: A key of `POLICIES`.
    prefill: int  #: Workers of that role.
    decode: int  #: Workers of that role.
    #: Times as many requests a second as there were, in the same pattern.
    load: float = 1.0

    def refusal(self) -> str | None:
        """Return why this cannot be simulated, or None if it can."""
        if self.policy not in POLICIES:
            return f"policy {self.policy!r}: expected one of {', '.join(POLICIES)}"
        if not (self.prefill >= 1 and self.decode >= 1):
            return "prefill and decode: at least one worker each"
        if self.prefill + self.decode > WORKERS_LIMIT:
            return f"prefill and decode: {WORKERS_LIMIT} workers at most"
        if not LOAD_MINIMUM <= self.load <= LOAD_LIMIT:
            return f"load: between {LOAD_MINIMUM:g} and {LOAD_LIMIT:g}"
        return None


def simulate_whatif(
    scenario: WhatIfScenario,
    decisions: list[DecisionRecord],
    cards: list[WorkerCard],
    config: RouterConfig,
) -> dict[str, Any] | str:
    """Return the observed run beside two simulated ones, or a sentence why there is no result.

    `decisions` are the last records, `cards` the workers of now. The runs are `life`, `same` (the
    present setup, simulated) and `other` (the scenario's).
    """
    served = _served_first_attempts(decisions)
    if len(served) < MIN_REQUESTS:
        return (
            f"{len(served)} of the last requests were served to their end; "
            f"{MIN_REQUESTS} are needed"
        )
    roles = [card.role for card in cards]  # empty: drained or leaving, so it gets nothing new
    present = WhatIfScenario(
        policy=config.policy, prefill=roles.count("prefill"), decode=roles.count("decode")
    )
    if not (present.prefill and present.decode):
        return "the cluster has no prefill or no decode worker now"
    refusal = present.refusal()
    if refusal:
        return f"the cluster as it is now cannot be simulated: {refusal}"

    # All simulated workers are of one kind; the first card stands for all.
    hardware = _fit_hardware(served, cards[0])
    first_arrival = _arrival(served[0])
    items = [_trace_item(decision, first_arrival) for decision in served]
    trace = Trace("the last requests", items, HASH_TOKENS)
    return {
        "requests": len(served),
        "span_s": round(trace.span_s, 3),
        "life": _observed_run(served),
        "same": _simulated_run(present, trace, hardware, config),
        "other": _simulated_run(scenario, trace, hardware, config),
    }


# ---- the requests --------------------------------------------------------------------------------


def _served_first_attempts(decisions: list[DecisionRecord]) -> list[DecisionRecord]:
    """Return those whose first attempt was served to its end, by arrival.

    A key's second part is the number of the attempt. Refused requests have no decode worker.
    """
    served = [
        decision
        for decision in decisions
        if decision["decode"]
        and decision["key"][1] == 0
        and decision["observed"].get("reason") in FINISHED
    ]
    return sorted(served, key=_arrival)


def _arrival(decision: DecisionRecord) -> float:
    """Return when the request reached the router, by the router's clock in seconds."""
    arrival: float = decision["at"] - decision["waited_s"]
    return arrival


def _trace_item(decision: DecisionRecord, first_arrival: float) -> TraceRequest:
    """Return the request to simulate: a prompt of only what was not cached in the real run."""
    return TraceRequest(
        arrival_s=_arrival(decision) - first_arrival,
        prompt_tokens=_uncached_tokens(decision),
        output_tokens=max(1, decision["observed"]["tokens"]),
    )


def _uncached_tokens(decision: DecisionRecord) -> int:
    """Return the prompt's tokens that were computed; at least one always is."""
    return max(1, decision["prompt_tokens"] - decision["hit_tokens"])


# ---- what a worker costs -------------------------------------------------------------------------


def _fit_hardware(served: list[DecisionRecord], card: WorkerCard) -> Hardware:
    """Return workers like `card`'s that are as fast as the router predicted."""
    prefill = fit_line(
        [_uncached_tokens(decision) for decision in served],
        [decision["prefill_s"] for decision in served],
    )
    step = fit_line(
        _answers_beside(served),
        [decision["itl_s"] for decision in served],
    )
    # Terms that the records cannot tell apart are 0. The whole transfer counts as exposed: only the
    # part that the prefill does not hide was recorded.
    cost = Coefficients(
        prefill_base=prefill.base,
        prefill_token=prefill.slope,
        prefill_pair=0.0,
        step_base=step.base,
        step_row=step.slope,
        step_weights=0.0,
        step_token=0.0,
        transfer_base=float(np.mean([decision["exposed_s"] for decision in served])),
        exposed_share=1.0,
    )
    return Hardware(
        gpu=card.gpu,
        tp=card.tensor_parallel,
        cost=cost,
        kv_tokens=card.blocks * card.block_tokens,
        gpus=1,
        chunk_tokens=card.chunk_tokens,
        max_running=card.max_running,
        itl_budget_s=card.step_ms / 1e3 or inf,  # 0: steps have no limit
    )


def _answers_beside(served: list[DecisionRecord]) -> list[int]:
    """Return how many answers ran on each request's decode worker when it was placed.

    The request itself counts. An answer's end is predicted from its first token and its gaps.
    """
    # The time to the first token counts from the arrival.
    ends = [
        _arrival(decision) + decision["ttft_s"] + decision["observed"]["tokens"] * decision["itl_s"]
        for decision in served
    ]
    return [
        sum(
            other["decode"] == decision["decode"] and other["at"] <= decision["at"] <= end
            for other, end in zip(served, ends, strict=True)
        )
        for decision in served
    ]


# ---- runs ----------------------------------------------------------------------------------------


def _simulated_run(
    scenario: WhatIfScenario, trace: Trace, hardware: Hardware, config: RouterConfig
) -> dict[str, Any]:
    """Run the trace in virtual time; the result is a column of the comparison.

    `met` and the latencies' curve are of all requests and of those that were served; `itl_ms` is
    the median of the requests' mean gaps.
    """
    split = Split(prefill=scenario.prefill, decode=scenario.decode)
    setting = Setting(
        Fleet(((hardware, split.replicas),)),
        split,
        replace(config, policy=scenario.policy, settle_s=SETTLE_S, decisions=0),
        # The configured targets for all, whatever a request, its class or its tenant names.
        Slo(config.ttft_target, config.itl_s, (hardware.cost,)),
    )
    workload = trace.workload(trace.rate * scenario.load, 0)
    outcomes = Simulation(setting, trace).run(workload)
    assert outcomes is not None, "nothing ends a simulation early here"

    served = [outcome for outcome in outcomes if not outcome.refusal_reason]
    mean_gaps_s = [outcome.tpot_s for outcome in served if outcome.output_tokens > 1]
    return {
        **scenario._asdict(),
        # The share of requests that met both targets; refused ones met none.
        "met": sum(outcome.targets_met for outcome in outcomes) / len(outcomes),
        "refused": len(outcomes) - len(served),
        "itl_ms": _curve_ms(mean_gaps_s)[MEDIAN_INDEX] if mean_gaps_s else None,
        "ttft_ms": _curve_ms([outcome.ttft_s for outcome in served]),
    }


def _observed_run(served: list[DecisionRecord]) -> dict[str, Any]:
    """Return what was observed of the requests; the result is a column of the comparison."""
    return {
        "met": sum(_met_targets(decision) for decision in served) / len(served),
        "ttft_ms": _curve_ms([decision["observed"]["ttft_ms"] / 1e3 for decision in served]),
    }


def _met_targets(decision: DecisionRecord) -> bool:
    """Return whether the request met its targets, by the rule of `router/goodput.py`.

    The record has no mean of the gaps, so only their p99 is judged.
    """
    observed = decision["observed"]
    outcome = RequestOutcome(
        tenant="",
        slo_class="",
        reason=observed["reason"],
        waited_s=observed["ttft_ms"] / 1e3,
        gaps=observed["tokens"] - 1,
        itl_p99_s=observed.get("itl_p99_ms", 0.0) / 1e3,
    )
    ttft_target_s: float = decision["ttft_target_s"]
    itl_target_s: float = decision["itl_target_s"]
    return judge(outcome, ttft_target_s, itl_target_s) == "both"


def _curve_ms(seconds: list[float]) -> list[float]:
    """Return the milliseconds at each of `CURVE_PERCENTILES`; empty if there are no values."""
    if not seconds:
        return []
    return [round(1e3 * float(value), 2) for value in np.percentile(seconds, CURVE_PERCENTILES)]
