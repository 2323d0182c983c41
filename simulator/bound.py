"""An upper bound of the goodput that any policy can reach on this hardware: a fluid linear program.

The program relaxes the real problem: nothing queues, everyone shares an infinite prefix cache,
transfers are free, lengths are known, and each replica may mix prefill and decode at will.

Two roundings are no relaxations, so the bound holds but for what they cost: each request counts as
the mean of its class, and decode steps take one of a few lengths (`_step_times`).

Requests fall into classes i, replicas into pools g of n_g equal ones. A mode m is a pool that
decodes with steps of t seconds. All variables are requests/s, except tau_m: the number of replicas
whose whole time goes to the steps of mode m.

    maximise  rate                             requests/s that are offered
    subject to
    served_i <= rate * share_i
    sum_i served_i >= target * rate            `target`: the share that must be in time
    served_i <= sum_g prefilled_ig             each phase of a served request is done somewhere
    served_i <= sum_m decoded_im               but for answers of one token, which the prefill makes
    sum_i prefilled_ig * prefill_s_ig + sum_{m in g} tau_m <= n_g              time of the replicas
    sum_i decoded_im * decode_compute_s_im <= tau_m * (1 - step_base / t)      rows and attention
    sum_i decoded_im * decode_read_s_im <= tau_m * (1 - step_s(0, 0) / t)      KV beside weights
    sum_i decoded_im * t * context_tokens_i / kv_tokens_g <= tau_m             KV that is resident
    prefilled_ig = 0 where class i's mean prefill, alone on a replica of pool g, takes longer than
                     the TTFT target of the class's shortest prompt

The seconds are those of `protos.frames.Coefficients`. Two kinds of hardware go in: a fleet as it is
simulated, and `kernel_hardware`, which is nearer to physics and so gives a higher bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from ..protos.frames import Coefficients
from .errors import SimulationError
from .fleet import Fleet
from .hardware import Hardware, find_gpu, find_model
from .metrics import Slo
from .trace import Trace

#: Groups by prompt length; each is cut into as many groups by cached length.
LENGTH_GROUPS = 20
#: Step times that are considered, as shares of the ITL target (between two tokens of an answer).
STEP_SHARES = (0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0)
#: Share of the data sheet's FLOP/s that the best published kernels reach, by GPU type and data
#: type: a bound must not be below what an engine could do.
KERNEL_EFFICIENCY = {
    ("H100", "bf16"): 0.84,
    ("H200", "bf16"): 0.84,
    ("B200", "bf16"): 0.75,
    ("H100", "fp8"): 0.68,
    ("H200", "fp8"): 0.68,
    ("B200", "fp8"): 0.54,
    ("B200", "nvfp4"): 0.42,
}
#: Share of the data sheet's memory, and of its bandwidth, that kernels reach.
KERNEL_MEMORY_SHARE = 0.9

#: Rows whose experts each step reads, as the program is linear. More would make steps of few rows too
#: slow, and then an engine could exceed the bound.
LEAST_ROWS = 1

#: Equal replicas and how many of them there are, as in `Fleet.pools`.
Pool = tuple[Hardware, int]


# ---- the load ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestClasses:
    """Requests in classes of like lengths. Each array has one value for each class.

    Values are means over the class, where nothing else is said.
    """

    uncached_tokens: np.ndarray  #: of the prompt, that have to be computed
    pairs: np.ndarray  #: pairs of query and key that the prefill computes
    decode_steps: np.ndarray  #: of the answer; its first token comes of the prefill
    context_tokens: np.ndarray  #: KV tokens that the steps of the answer read, summed
    shortest_prompt: np.ndarray  #: tokens of the class's shortest prompt
    share: np.ndarray  #: of all requests; the shares add up to 1

    def mean(self, values: np.ndarray) -> float:
        """Return the mean over all requests of a value for each class."""
        return float(values @ self.share)


def classify_requests(trace: Trace, reuse: bool = True) -> RequestClasses:
    """Return the trace's requests in classes of like prompt and like cached length.

    A block is cached for a request if any earlier request had it, at whatever time; never, if
    `reuse` is False.
    """
    prompt = np.array([item.prompt_tokens for item in trace.requests], dtype=float)
    output = np.array([item.output_tokens for item in trace.requests], dtype=float)
    cached = _cached_tokens(trace) if reuse else np.zeros(len(trace.requests))
    groups = _group_by_length(prompt, cached)

    def group_means(values: np.ndarray) -> np.ndarray:
        return np.array([values[group].mean() for group in groups])

    return RequestClasses(
        uncached_tokens=group_means(prompt - cached),
        pairs=group_means((prompt**2 - cached**2) / 2),
        decode_steps=group_means(output - 1),
        # Step k reads prompt + k tokens, from the first step to the one before the last token.
        context_tokens=group_means((output - 1) * (prompt + output / 2)),
        shortest_prompt=np.array([prompt[group].min() for group in groups]),
        share=np.array([len(group) for group in groups]) / len(prompt),
    )


def _cached_tokens(trace: Trace) -> np.ndarray:
    """Return for each request how many leading tokens an earlier one had in prompt or answer."""
    cached_blocks: set[int] = set()
    cached_tokens = np.zeros(len(trace.requests))
    for index, item in enumerate(trace.requests):
        count = 0
        for block in item.prompt_blocks:
            if block not in cached_blocks:
                break
            count += 1
        # One token of a prompt is always computed: the first answer token comes of it.
        cached_tokens[index] = min(count * trace.block_tokens, item.prompt_tokens - 1)
        cached_blocks.update(item.prompt_blocks, item.answer_blocks)
    return cached_tokens


def _group_by_length(prompt: np.ndarray, cached: np.ndarray) -> list[np.ndarray]:
    """Return the requests' positions in groups by prompt length, cut again by cached length."""
    groups: list[np.ndarray] = []
    for same_prompt in np.array_split(np.argsort(prompt, kind="stable"), LENGTH_GROUPS):
        by_cached = same_prompt[np.argsort(cached[same_prompt], kind="stable")]
        groups += [group for group in np.array_split(by_cached, LENGTH_GROUPS) if len(group)]
    return groups


class RequestSeconds(NamedTuple):
    """How much time of a replica the mean request takes, in each of its phases."""

    prefill_s: float
    decode_s: float


def mean_request_seconds(hardware: Hardware, load: RequestClasses, itl_s: float) -> RequestSeconds:
    """Return the replica time of the mean request, if each phase has replicas of its own.

    A decode replica is full of KV, and each of its steps reads `kv_tokens`. So an answer takes the
    time of `context_tokens / kv_tokens` steps of the whole replica. A step counts as the ITL target
    `itl_s` at most: where a full replica's step takes longer, `decode_s` is too low.
    """
    cost = hardware.cost.with_experts_of()
    prefill_s = cost.mean_prefill_s(load.mean(load.uncached_tokens), load.mean(load.pairs))
    step_s = min(itl_s, cost.step_s(rows=0, kv_tokens=hardware.kv_tokens))
    decode_s = load.mean(load.context_tokens) * step_s / hardware.kv_tokens
    return RequestSeconds(prefill_s, decode_s)


# ---- hardware at kernel efficiency ---------------------------------------------------------------


def kernel_hardware(hardware: Hardware, model: str, *, efficient: bool = True) -> Hardware:
    """Return the replica as fast as kernels are: no overheads, no all-reduce.

    `efficient` False gives the data sheet itself. Raises SimulationError for measured CPU workers,
    which have no data sheet.
    """
    shape = find_model(model)
    gpu = find_gpu(hardware.gpu)
    dtype = shape.arithmetic(gpu)
    flops_share = KERNEL_EFFICIENCY[hardware.gpu, dtype] if efficient else 1.0
    memory_share = KERNEL_MEMORY_SHARE if efficient else 1.0

    flops = gpu.flops[dtype] * flops_share * hardware.tp
    hbm_bytes_per_s = gpu.hbm_bytes_per_s * memory_share * hardware.tp
    kv_bytes = gpu.hbm_bytes * memory_share * hardware.tp - shape.weight_bytes
    kv_copies = shape.kv_copies(hardware.tp)
    row_s = 2 * shape.active_parameters / flops
    cost = Coefficients(
        prefill_base=0.0,
        # A fitted prefill may be faster than the kernels are said to be: then these count as fast.
        prefill_token=min(row_s, hardware.cost.prefill_token),
        prefill_pair=min(shape.attention_flops_per_pair / flops, hardware.cost.prefill_pair),
        step_base=0.0,
        step_row=row_s,
        step_weights=shape.weight_bytes_read(LEAST_ROWS) / hbm_bytes_per_s,
        step_token=shape.kv_bytes_per_token * kv_copies / hbm_bytes_per_s,
    )
    kv_tokens = int(kv_bytes / (shape.kv_bytes_per_token * kv_copies))
    return replace(hardware, cost=cost, kv_tokens=kv_tokens)


# ---- the linear program --------------------------------------------------------------------------


class DecodeMode(NamedTuple):
    """A pool that decodes with steps of one length."""

    pool_index: int
    step_s: float


class _Columns:
    """Which column of the program's matrix each variable has."""

    def __init__(self, classes: int, pools: int, modes: int) -> None:
        sizes = np.cumsum([classes, pools * classes, modes * classes, modes])
        columns = np.arange(sizes[-1])
        self.served = columns[: sizes[0]]  #: by class
        self.prefilled = columns[sizes[0] : sizes[1]].reshape(pools, classes)
        self.decoded = columns[sizes[1] : sizes[2]].reshape(modes, classes)
        self.mode_times = columns[sizes[2] :]
        self.rate = int(sizes[-1])
        self.count = self.rate + 1


class _Term(NamedTuple):
    """Columns with their coefficients; one coefficient may stand for all of the columns."""

    columns: np.ndarray | int
    coefficients: np.ndarray | float


class _Constraints:
    """The rows `coefficients @ variables <= limit` of the program, as a sparse matrix."""

    def __init__(self) -> None:
        self.columns: list[np.ndarray] = []
        self.coefficients: list[np.ndarray] = []
        self.limits: list[float] = []

    def add(self, *terms: _Term, limit: float = 0.0) -> None:
        """Add the row that says: the sum of the terms is at most `limit`."""
        columns = [np.atleast_1d(term.columns) for term in terms]
        coefficients = [
            np.broadcast_to(np.asarray(term.coefficients, dtype=float), own_columns.shape)
            for own_columns, term in zip(columns, terms, strict=True)
        ]
        self.columns.append(np.concatenate(columns))
        self.coefficients.append(np.concatenate(coefficients))
        self.limits.append(limit)

    def matrix(self, width: int) -> sparse.csr_matrix:
        """Return all rows; `width` is the number of variables."""
        row_ends = np.cumsum([0, *(len(columns) for columns in self.columns)])
        values = np.concatenate(self.coefficients)
        columns = np.concatenate(self.columns)
        return sparse.csr_matrix((values, columns, row_ends), shape=(len(self.columns), width))


class _Program:
    """The linear program of one load on pools of replicas; the module's docstring has the rows."""

    def __init__(self, load: RequestClasses, pools: Sequence[Pool], slo: Slo) -> None:
        self.load = load
        self.pools = pools
        self.modes = [
            DecodeMode(pool_index, step_s)
            for pool_index, (hardware, _) in enumerate(pools)
            for step_s in _step_times(hardware, slo.itl_s)
        ]
        self.ttft_targets = np.array(
            [slo.ttft_target_s(int(prompt)) for prompt in load.shortest_prompt]
        )
        self.columns = _Columns(len(load.share), pools=len(pools), modes=len(self.modes))
        self.upper_bounds = np.full(self.columns.count, np.inf)
        self.constraints = _Constraints()

    def solve(self, target_share: float) -> float:
        """Return the largest rate; see `largest_rate`."""
        self._add_demand(target_share)
        for pool_index in range(len(self.pools)):
            self._add_pool(pool_index)
        for mode_index in range(len(self.modes)):
            self._add_mode(mode_index)

        columns = self.columns
        objective = np.zeros(columns.count)
        objective[columns.rate] = -1.0  # the solver minimises
        solution = linprog(
            objective,
            self.constraints.matrix(columns.count),
            np.array(self.constraints.limits),
            bounds=np.stack([np.zeros(columns.count), self.upper_bounds], axis=1),
        )
        if not solution.success:
            raise SimulationError(f"the bound's linear program: {solution.message}")
        return max(0.0, float(solution.x[columns.rate]))

    def _add_demand(self, target_share: float) -> None:
        """No more requests are served than offered, prefilled or decoded; enough of them are.

        Answers of one token are complete when they are prefilled.
        """
        columns = self.columns
        for index, share in enumerate(self.load.share):
            served = _Term(columns.served[index], 1.0)
            self.constraints.add(served, _Term(columns.rate, -share))
            self.constraints.add(served, _Term(columns.prefilled[:, index], -1.0))
            if self.load.decode_steps[index]:
                self.constraints.add(served, _Term(columns.decoded[:, index], -1.0))
        self.constraints.add(_Term(columns.served, -1.0), _Term(columns.rate, target_share))

    def _add_pool(self, pool_index: int) -> None:
        """A pool's replicas have the time for its prefills and steps; no prefill is too slow."""
        hardware, replicas = self.pools[pool_index]
        prefill_s = _prefill_seconds(hardware, self.load)
        prefilled = self.columns.prefilled[pool_index]
        own_modes = [mode.pool_index == pool_index for mode in self.modes]
        mode_times = _Term(self.columns.mode_times[own_modes], 1.0)
        self.constraints.add(_Term(prefilled, prefill_s), mode_times, limit=replicas)
        self.upper_bounds[prefilled[prefill_s > self.ttft_targets]] = 0.0

    def _add_mode(self, mode_index: int) -> None:
        """The steps of a mode have room for rows and attention, for reading, and for the KV."""
        mode = self.modes[mode_index]
        hardware, _ = self.pools[mode.pool_index]
        cost = hardware.cost
        compute_s = _decode_compute_seconds(hardware, self.load)
        read_s = _decode_read_seconds(hardware, self.load)
        resident_share = mode.step_s * self.load.context_tokens / hardware.kv_tokens
        compute_room = 1 - cost.step_base / mode.step_s
        read_room = 1 - cost.step_s(rows=0, kv_tokens=0) / mode.step_s

        decoded = self.columns.decoded[mode_index]
        mode_time = self.columns.mode_times[mode_index]
        self.constraints.add(_Term(decoded, compute_s), _Term(mode_time, -compute_room))
        self.constraints.add(_Term(decoded, read_s), _Term(mode_time, -read_room))
        self.constraints.add(_Term(decoded, resident_share), _Term(mode_time, -1.0))


def _prefill_seconds(hardware: Hardware, load: RequestClasses) -> np.ndarray:
    """Return the mean prefill of each class, alone on a replica."""
    means = zip(load.uncached_tokens.tolist(), load.pairs.tolist(), strict=True)
    return np.array([hardware.cost.mean_prefill_s(tokens, pairs) for tokens, pairs in means])


def _decode_compute_seconds(hardware: Hardware, load: RequestClasses) -> np.ndarray:
    """Return what the rows and the attention of each class's mean answer take."""
    means = zip(load.decode_steps.tolist(), load.context_tokens.tolist(), strict=True)
    return np.array([hardware.cost.decode_compute_s(steps, context) for steps, context in means])


def _decode_read_seconds(hardware: Hardware, load: RequestClasses) -> np.ndarray:
    """Return what reading the KV of each class's mean answer takes."""
    return np.array([hardware.cost.decode_read_s(context) for context in load.context_tokens])


def _step_times(hardware: Hardware, itl_s: float) -> list[float]:
    """Return the step times worth considering, in seconds.

    They are a grid up to the ITL target, and the step that reads all KV of a full replica.
    """
    empty_step_s = hardware.cost.step_s(rows=0, kv_tokens=0)
    full_step_s = hardware.cost.step_s(rows=0, kv_tokens=hardware.kv_tokens)
    step_times = {*(itl_s * share for share in STEP_SHARES), min(full_step_s, itl_s)}
    return sorted(step_s for step_s in step_times if step_s > empty_step_s)


def _with_fixed_experts(hardware: Hardware) -> Hardware:
    """Return the replica with steps that all read the experts of `LEAST_ROWS`."""
    return replace(hardware, cost=hardware.cost.with_experts_of(LEAST_ROWS))


def largest_rate(
    load: RequestClasses, pools: Sequence[Pool], slo: Slo, target_share: float
) -> float:
    """Return the requests/s that may be offered with `target_share` of them in time.

    Raises SimulationError if the solver finds no solution.
    """
    return _Program(load, pools, slo).solve(target_share)


def goodput_bound(
    trace: Trace,
    fleet: Fleet,
    slo: Slo,
    target_share: float,
    model: str = "",
    *,
    reuse: bool = True,
) -> float:
    """Return the bound in requests/s for each GPU of the fleet.

    `target_share` of the requests must meet their targets. With the name of a `model`, hardware
    counts at kernel efficiency; without, as it is simulated.
    `reuse` False: no prefix is ever cached.
    """
    pools: list[Pool] = [
        (kernel_hardware(hardware, model) if model else _with_fixed_experts(hardware), replicas)
        for hardware, replicas in fleet.pools
    ]
    load = classify_requests(trace, reuse)
    return largest_rate(load, pools, slo, target_share) / fleet.gpus
