"""How long things take: a closed form per worker, corrected by what was seen.

    prefill(u, n) = (base + u*(token + pair*(n - u/2))) * correction    u uncached of n tokens
    step(B, K)    = (base + max(row*B, weights) + kv*K) * correction    B rows, K KV tokens

The pair term is `protos.frames.Coefficients`' with n^2 - (n-u)^2 = 2*u*(n - u/2). A correction is a
log-EWMA of observed over predicted, in two layers: slow for all workers of a type (GPU, TP), fast
for each worker, relative to its type. What a request does not say, its output length, is a moving
average per tenant and class: it ranks choices, and correctness never depends on it.
"""

from __future__ import annotations

from collections import OrderedDict
from math import exp, log

from msgspec import structs

from ..protos.frames import Coefficients

FAST, SLOW = 1 / 20, 1 / 1000  #: weight of a new sample
LEARN = 1 / 10  #: the same, of a closed form that is learned
RATIO_MAX = 8.0  #: a sample beyond counts as this
CORRECTION_MAX = 8.0  #: of a worker against its type
RING, RECOMPUTE = 256, 32
TENANTS_MAX = 10_000
PRIOR_STEP_S, PRIOR_ROW_S = 0.02, 0.001


def prior(tokens_per_s: float) -> Coefficients:
    """Of a worker that says nothing of its speed."""
    return Coefficients(0.0, 1.0 / tokens_per_s, 0.0, PRIOR_STEP_S, PRIOR_ROW_S, 0.0, 0.0)


def prefill_s(c: Coefficients, uncached: float, prompt: float) -> float:
    """Seconds, uncorrected."""
    each = c.prefill_token + c.prefill_pair * (prompt - uncached / 2)
    return c.prefill_base + uncached * each


def step_s(c: Coefficients, rows: float, kv_tokens: float) -> float:
    """Seconds, uncorrected."""
    return c.step_base + max(c.step_row * rows, c.step_weights) + c.step_token * kv_tokens


class Drift:
    """Log-EWMA of observed/predicted; the first samples count more."""

    __slots__ = ("samples", "value", "weight")

    def __init__(self, weight: float) -> None:
        self.weight, self.value, self.samples = weight, 0.0, 0

    def observe(self, ratio: float) -> None:
        self.samples += 1
        alpha = max(self.weight, 1.0 / (self.samples + 1))
        self.value += alpha * (log(min(max(ratio, 1 / RATIO_MAX), RATIO_MAX)) - self.value)


class Correction:
    """One worker's factor on a closed form; `shared` is its type's slow layer."""

    __slots__ = ("factor", "own", "shared")

    def __init__(self, shared: Drift) -> None:
        self.shared, self.own = shared, Drift(FAST)
        self.factor = exp(shared.value)

    def observe(self, ratio: float) -> None:
        """`ratio`: observed over the uncorrected prediction."""
        if ratio <= 0:
            return
        self.shared.observe(ratio)
        self.own.observe(ratio / exp(self.shared.value))
        self._apply()

    def fade(self) -> None:
        """Half of what is the worker's own is forgotten: it was idle, so nothing can mend it."""
        self.own.value /= 2
        self.own.samples = min(self.own.samples, 3)
        self._apply()

    def _apply(self) -> None:
        limit = log(CORRECTION_MAX)
        self.factor = exp(self.shared.value + min(max(self.own.value, -limit), limit))


class Learned:
    """The closed form of a type of worker that says none, from its workers' reports."""

    __slots__ = ("_prefills", "_steps", "cost")

    def __init__(self, first: Coefficients) -> None:
        self.cost, self._prefills, self._steps = first, 0, 0

    def prefill(self, token_s: float) -> None:
        """Seconds for each token of the prompts of a report."""
        self._prefills += 1
        known = self.cost.prefill_token
        known += max(LEARN, 1 / (self._prefills + 1)) * (token_s - known)
        self.cost = structs.replace(self.cost, prefill_token=known)

    def step(self, seconds: float, rows: int) -> None:
        """The mean step of a report."""
        self._steps += 1
        known = self.cost.step_base
        seen = max(seconds - self.cost.step_row * rows, 0.0)
        known += max(LEARN, 1 / (self._steps + 1)) * (seen - known)
        self.cost = structs.replace(self.cost, step_base=known)


class Residuals:
    """The last 256 errors of the corrected prediction, as factors; `upper` is their quantile."""

    def __init__(self, quantile: float = 0.9, unknown: float = 1.1) -> None:
        self._ring = [1.0] * RING
        self._quantile, self._count = quantile, 0
        self.upper = unknown

    def observe(self, ratio: float) -> None:
        self._ring[self._count % RING] = ratio
        self._count += 1
        if self._count % RECOMPUTE == 0:
            known = sorted(self._ring[: min(self._count, RING)])
            self.upper = min(max(known[int(self._quantile * len(known))], 1.0), 2.0)


class OutputLengths:
    """Expected answer length of a tenant and class; an unknown tenant's is its class's."""

    def __init__(self, first: float = 256.0, weight: float = 0.05) -> None:
        self._first, self._weight = first, weight
        self._known: OrderedDict[tuple[str, str], float] = OrderedDict()

    def expect(self, tenant: str, slo_class: str, most: int) -> float:
        known = self._known.get((tenant, slo_class))
        if known is None:
            known = self._known.get(("", slo_class), self._first)
        return min(known, most)

    def observe(self, tenant: str, slo_class: str, tokens: float) -> None:
        for key in {("", slo_class), (tenant, slo_class)}:
            before = self._known.pop(key, self._first)
            self._known[key] = before + self._weight * (tokens - before)
        while len(self._known) > TENANTS_MAX:
            self._known.popitem(last=False)
