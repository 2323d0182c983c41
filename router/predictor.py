"""How far the closed forms are from what was observed, and how long answers are.

`protos.frames.Coefficients` says how long a prefill, a step and a transfer take. Here is what
corrects it: a log-EWMA of observed over predicted, in two layers. The slow layer is shared by all
workers of a type (GPU, tensor parallelism); the fast one is a worker's own, relative to its type.
What a request does not say, its output length, is a moving average per tenant and SLO class: it
ranks choices, and correctness never depends on it.
"""

from __future__ import annotations

from collections import OrderedDict
from math import exp, log

from msgspec import structs

from ..protos.frames import Coefficients

#: Weights of a new sample in a moving average: after 1/weight samples, an old one counts 1/e.
FAST = 1 / 20  #: weight of a new sample in a worker's own layer
SLOW = 1 / 1000  #: the same, in the layer of its type
LEARNING_WEIGHT = 1 / 10  #: the same, of a closed form that is learned
#: A correction that fades counts as made of so many samples at most: the next one weighs 1/5 again.
FIRST_SAMPLES_KEPT = 3
RATIO_LIMIT = 8.0  #: a sample beyond counts as this (or, below, as 1/8): one outlier says little
CORRECTION_LIMIT = 8.0  #: a worker counts as at most so many times slower, or faster, than its type
#: A worker's own correction may be wrong by this factor: up to it nobody counts as slow in a shortlist.
OWN_ERROR = 1.25
RESIDUALS_KEPT = 256  #: the last errors whose quantile is taken
RECOMPUTE_EVERY = 32  #: errors between two looks at their quantile: sorting takes a while
UPPER_LIMIT = 2.0  #: of the error quantile: more caution than that would leave workers idle
MEANS_MAX = 10_000  #: of output lengths, by tenant and class; the one updated longest ago goes
PRIOR_STEP_S = 0.02  #: assumed seconds of each decode step, with the reading of the weights
PRIOR_ROW_S = 0.001  #: assumed seconds that each sequence adds to a step


def clamp(value: float, lower: float, upper: float) -> float:
    """Return `value`, or the bound that it exceeds."""
    return min(max(value, lower), upper)


def prior(tokens_per_s: float) -> Coefficients:
    """Return the speed that is assumed of a worker whose card says nothing of it.

    `tokens_per_s` is the assumed prefill rate, in prompt tokens. Costs that grow with the length of
    a sequence (`prefill_pair`, `step_token`) are left out.
    `step_weights` is a step's minimum for reading the weights: `step_base` has it already.
    Transfers count as free.
    """
    return Coefficients(
        prefill_base=0.0,
        prefill_token=1.0 / tokens_per_s,
        prefill_pair=0.0,
        step_base=PRIOR_STEP_S,
        step_row=PRIOR_ROW_S,
        step_weights=0.0,
        step_token=0.0,
    )


class Drift:
    """An exponentially weighted mean (EWMA) of the logarithm of observed over predicted.

    The first samples count more: the mean is that of the samples and of one first guess, 1.0.
    """

    __slots__ = ("factor", "samples", "value", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.value = 0.0  #: the logarithm of the factor
        #: As of the last sample; kept, as each shortlist asks for it once per worker.
        self.factor = 1.0
        self.samples = 0

    def observe(self, ratio: float) -> None:
        """Add one sample of observed over predicted."""
        self.samples += 1
        weight = max(self.weight, 1.0 / (self.samples + 1))
        sample = log(clamp(ratio, 1 / RATIO_LIMIT, RATIO_LIMIT))
        self.value += weight * (sample - self.value)
        self.factor = exp(self.value)


class Correction:
    """One worker's factor on a closed form; `shared` is the slow layer of its type.

    `factor` follows `shared` when this worker observes or fades, not when others of its type do.
    """

    __slots__ = ("factor", "own", "shared")

    def __init__(self, shared: Drift) -> None:
        self.shared = shared
        self.own = Drift(FAST)
        self.factor = exp(shared.value)

    def observe(self, ratio: float) -> None:
        """Add one sample: the observed time over the uncorrected prediction."""
        if ratio <= 0:  # no time was observed
            return
        self.shared.observe(ratio)
        self.own.observe(ratio / exp(self.shared.value))
        self._apply()

    @property
    def sure_slowness(self) -> float:
        """How many times slower than its type the worker is, beyond `OWN_ERROR`; 1 at least.

        By this the best of many workers are found. Whoever takes those of a thousand that seem the
        fastest takes those whose own corrections err most: they get more prompts than they can
        compute, while others have nothing to do.
        """
        return max(exp(self.own.value) / OWN_ERROR, 1.0)

    def fade(self) -> None:
        """Forget half of what is the worker's own: while it is idle, no sample can correct it."""
        self.own.value /= 2
        self.own.samples = min(self.own.samples, FIRST_SAMPLES_KEPT)
        self._apply()

    def _apply(self) -> None:
        limit = log(CORRECTION_LIMIT)
        self.factor = exp(self.shared.value + clamp(self.own.value, -limit, limit))


class LearnedCost:
    """The closed form of a type of worker whose cards have none, from the workers' reports."""

    __slots__ = ("_prefill_samples", "_step_samples", "cost")

    def __init__(self, first: Coefficients) -> None:
        self.cost = first
        self._prefill_samples = 0
        self._step_samples = 0

    def observe_prefill(self, token_s: float) -> None:
        """Add one report's mean seconds for each prompt token."""
        self._prefill_samples += 1
        weight = max(LEARNING_WEIGHT, 1 / (self._prefill_samples + 1))
        previous = self.cost.prefill_token
        mean = previous + weight * (token_s - previous)
        self.cost = structs.replace(self.cost, prefill_token=mean)

    def observe_step(self, step_s: float, rows: int) -> None:
        """Add one report's mean step of `rows` rows."""
        self._step_samples += 1
        weight = max(LEARNING_WEIGHT, 1 / (self._step_samples + 1))
        sample = max(step_s - self.cost.step_row * rows, 0.0)
        previous = self.cost.step_base
        mean = previous + weight * (sample - previous)
        self.cost = structs.replace(self.cost, step_base=mean)


class Residuals:
    """The last 256 errors of the corrected prefill times, as factors of the prediction.

    Multiplied by `upper`, a prediction is exceeded by one prompt in ten.
    """

    def __init__(self, quantile: float = 0.9, first_upper: float = 1.1) -> None:
        """`first_upper` holds until there are `RECOMPUTE_EVERY` errors."""
        self._ring = [1.0] * RESIDUALS_KEPT
        self._quantile = quantile
        self._count = 0
        self.upper = first_upper  #: the quantile of the errors, between 1 and `UPPER_LIMIT`

    def observe(self, ratio: float) -> None:
        """Add one error: the observed over the corrected time."""
        self._ring[self._count % RESIDUALS_KEPT] = ratio
        self._count += 1
        if self._count % RECOMPUTE_EVERY == 0:
            errors = sorted(self._ring[: min(self._count, RESIDUALS_KEPT)])
            self.upper = clamp(errors[int(self._quantile * len(errors))], 1.0, UPPER_LIMIT)


class OutputLengths:
    """Expected tokens of an answer, by tenant and class; an unknown tenant's are its class's."""

    def __init__(self, first: float = 256.0, weight: float = 0.05) -> None:
        """`first` is assumed before any answer has ended; `weight` is that of a new one."""
        self._first = first
        self._weight = weight
        self._means: OrderedDict[tuple[str, str], float] = OrderedDict()

    def expect(self, tenant: str, slo_class: str, max_tokens: int) -> float:
        """Return the expected tokens of one answer, at most `max_tokens`."""
        mean = self._means.get((tenant, slo_class))
        if mean is None:
            mean = self._means.get(("", slo_class), self._first)
        return min(mean, max_tokens)

    def observe(self, tenant: str, slo_class: str, tokens: float) -> None:
        """Add one answer's length to the tenant's mean and to the class's."""
        class_mean = self._means.get(("", slo_class), self._first)
        for key in {("", slo_class), (tenant, slo_class)}:
            previous = self._means.pop(key, class_mean)
            self._means[key] = previous + self._weight * (tokens - previous)
        while len(self._means) > MEANS_MAX:
            self._means.popitem(last=False)
