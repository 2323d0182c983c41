"""What it would cost to serve one request on one worker, in seconds. Pure functions.

    first token on p = what p has left + loading what only its tiers hold + prefill of the uncached
                       tokens, or a fetch and the rest
    first token on d = what d has left of prompts + prefill there, in chunks beside its decodes
    decode on d      = step with this request + exposed transfer + memory + hand-over, where
                       exposed  = max(share * transfer, transfer behind the link's backlog - rest of
                                  the prefill)
                       memory   = what a fuller KV pool costs
                       handover = by how much the gap between first and second token exceeds the
                                  ITL target

The closed forms themselves are the methods of `protos.frames.Coefficients`. ITL, the inter-token
latency, is the time between two tokens of an answer; a worker's decode *rows* are the sequences
that one step computes a token for.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from .request_queue import QueuedRequest
from .shortlist import DecodeCandidate
from .worker_state import WorkerState

#: of the ITL target, for a step with a prefill in it: a new sequence waits for two steps
ITL_SHARE = 0.5
FETCH_TOKENS = 256  #: fewer tokens are computed rather than fetched
FETCH_S = 0.002  #: a fetch takes this at least
#: A fetch must be so many times faster than computing: its prediction knows nothing of the
#: holder's other transfers, and it may fail.
FETCH_MARGIN = 1.5
STEP_GROWTH = 1.15  #: factor by which a step may grow while a prompt is computed beside
CHUNK_MIN = 64  #: tokens; in smaller chunks a prompt would take too many steps
#: of the time of a worker that decodes, what prefill gets at least: see `paced_prefill_s`
PREFILL_SHARE_MIN = 0.25
PLANNED_STEP_SHARE = 0.9  #: of an engine's step limit: what it plans steps for, as times vary
EQUAL_COST = 1e-12  #: costs that differ by less are equal: the rest is rounding


class PrefillPlan(NamedTuple):
    """How one worker would compute a prompt, were it idle."""

    seconds: float  #: of the prefill, and of a load from the tiers and a fetch before it
    compared_s: float  #: by which workers are compared: a fetch counts `FETCH_MARGIN` times
    cached_tokens: int  #: cached there, in its pool or its tiers, or fetched
    loaded_tokens: int  #: of those: only the worker's tiers have them, and it loads them first
    fetch_from: WorkerState | None  #: the worker that holds the fetched prefix; None: no fetch


class PrefillSpan(NamedTuple):
    """When a prompt is predicted to begin and to be computed on a prefill worker: moments, in
    seconds of the router's clock."""

    begins_at: float
    ends_at: float


def plan_prefill(request: QueuedRequest, worker: WorkerState) -> PrefillPlan:
    """Return how the worker would compute the prompt: from its own cache, or with a fetch.

    What its tiers hold is always loaded, also where computing it would be faster.
    """
    prompt_tokens = request.prompt_tokens
    cached_tokens = request.cached_tokens(worker)
    loaded_tokens = request.demoted_tokens(worker)
    load_s = worker.load_token_s * loaded_tokens
    computed_s = load_s + worker.cost.prefill_s(prompt_tokens - cached_tokens, prompt_tokens)
    holder = request.holder
    fetched_tokens = request.held_tokens - cached_tokens
    if holder is None or not request.fetchable or fetched_tokens < FETCH_TOKENS:
        return PrefillPlan(computed_s, computed_s, cached_tokens, loaded_tokens, None)
    rest_s = load_s + worker.cost.prefill_s(prompt_tokens - request.held_tokens, prompt_tokens)
    fetch_s = FETCH_S + request.holder_load_s + holder.cost.transfer_token * fetched_tokens
    compared_s = rest_s + FETCH_MARGIN * fetch_s
    if compared_s >= computed_s or not holder.alive:
        return PrefillPlan(computed_s, computed_s, cached_tokens, loaded_tokens, None)
    return PrefillPlan(rest_s + fetch_s, compared_s, request.held_tokens, loaded_tokens, holder)


def local_first_token_s(
    request: QueuedRequest, worker: WorkerState, plan: PrefillPlan, now: float
) -> float:
    """Return the seconds to the first token if the decode worker computes the prompt itself.

    The prompt is cut into the largest chunks whose step stays within `ITL_SHARE` of the target;
    inf: the worker's running sequences leave no room for such chunks.
    """
    uncached_tokens = request.prompt_tokens - plan.cached_tokens
    chunk_tokens = float(worker.card.chunk_tokens)
    if worker.rows:
        spare_s = ITL_SHARE * request.itl_s - STEP_GROWTH * worker.next_step_s
        token_s = worker.cost.prefill_token_s(uncached_tokens, request.prompt_tokens)
        chunk_tokens = min(spare_s / token_s, chunk_tokens)
        if chunk_tokens < CHUNK_MIN:
            return inf
    # Each chunk comes with one step of what decodes there.
    decode_s = uncached_tokens / chunk_tokens * worker.step_s
    return worker.backlog_s(now) + decode_s + plan.seconds


def paced_prefill_s(worker: WorkerState, prefill_s: float, itl_s: float) -> float:
    """Return how long a prefill of `prefill_s` takes in chunks beside what the worker decodes.

    The engine cuts the prompt so that each step stays within its limit. Where decode leaves less
    than `PREFILL_SHARE_MIN` of that, the target is out of reach, and the engine gives it up.
    """
    return prefill_s / max(spare_share(worker, itl_s), PREFILL_SHARE_MIN)


def spare_share(worker: WorkerState, itl_s: float, steps: int = 1) -> float:
    """Return the share of its time that a worker's decodes leave for prefill; negative: too little.

    A worker without a step limit of its own is taken to go by `itl_s`, a request's target. So many
    `steps` of decodes are to fit into that limit.
    """
    if not worker.rows:
        return 1.0
    limit_s = PLANNED_STEP_SHARE * (worker.card.step_ms / 1e3 or itl_s)
    return 1.0 - steps * worker.step_s / limit_s


def decode_candidate(
    request: QueuedRequest, worker: WorkerState, span: PrefillSpan, moved_tokens: int
) -> DecodeCandidate:
    """Return what decoding on this worker costs; `moved_tokens` of the prompt move there.

    `span` is when the prompt is computed, elsewhere.
    """
    step_s = worker.step_with(request.kv_tokens_read)
    transfer_s = worker.cost.transfer_s(moved_tokens)
    transfer_begins_at = max(worker.link_busy_until, span.begins_at)
    exposed_s = max(
        worker.cost.exposed_share * transfer_s, transfer_begins_at + transfer_s - span.ends_at
    )
    running_s = worker.next_step_s
    if worker.busy_until > span.ends_at:  # the worker computes a prompt of its own then
        running_s = max(running_s, ITL_SHARE * request.itl_s)
    # a new sequence waits for the running step and then for its own
    handover_s = max(exposed_s + running_s + step_s - request.itl_s, 0.0)
    return DecodeCandidate(
        worker=worker,
        cost=step_s + exposed_s + worker.memory_s + handover_s,
        tie_breaker=request.tie_breaker(worker.slot),
        moved_tokens=moved_tokens,
        step_s=step_s,
        exposed_s=exposed_s,
        memory_s=worker.memory_s,
        handover_s=handover_s,
    )


def disturbs_nobody(request: QueuedRequest, worker: WorkerState, default_itl_s: float) -> bool:
    """Whether a decode worker keeps everybody's ITL target with this request, and holds it all.

    `default_itl_s` is the target for which the worker has its spare KV tokens ready.
    """
    if not worker.rows:
        return True
    spare_tokens = worker.default_spare_kv_tokens
    if request.itl_s != default_itl_s:
        spare_tokens = worker.spare_kv_tokens(request.itl_s)
    fits_step = spare_tokens >= request.kv_tokens_read
    return fits_step and worker.expected_free_tokens >= request.expected_tokens


def cheapest_position(costs: Sequence[float], tie_hash: int) -> int | None:
    """Return the position of the least cost; equal ones share by the request's hash.

    None: all costs are inf, or there are none.
    """
    lowest = min(costs, default=inf)
    if lowest == inf:
        return None
    equal = [position for position, cost in enumerate(costs) if cost <= lowest + EQUAL_COST]
    return equal[tie_hash % len(equal)]
