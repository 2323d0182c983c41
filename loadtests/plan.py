"""What is offered, to whom, and what has to hold: options as text, parsed and checked.

A load is a stream of requests. In a constant, poisson, burst, ramp or trace load they come at
planned times, whatever becomes of those before (an open loop); in a chat load each user waits for
the answer. A ramp raises the rate step by step. A gate is a figure of the run that has to hold.

`LoadPlan` travels as Locust options: every field is one (`--load`, `--rate`, ...), so that master,
workers and the web UI know the same ones.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..simulator.errors import SimulationError
from ..simulator.metrics import OFFERED_RANKS, Slo, isolated_cost
from ..simulator.sources.synthetic import TokenRange
from .errors import LoadError

LOADS = ("constant", "poisson", "burst", "ramp", "trace", "chat")
#: When a trace's later turns are sent: at their recorded time, or after the answer before and the
#: recorded pause.
DISPATCHES = ("timestamp", "thinktime")
OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


def _option(default: Any, help_text: str) -> Any:
    """Returns a field of `LoadPlan`; Locust shows the help text."""
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Options of a run. Lengths in tokens, `LOW-HIGH` uniform."""

    load: str = _option("poisson", "constant, poisson, burst, ramp, trace or chat.")
    rate: str = _option(
        "2", "Requests per second; LOW-HIGH for ramp; empty for trace: as recorded."
    )
    users: int = _option(10, "Users of the chat load.")
    duration: float = _option(60.0, "Seconds in which requests are offered.")
    slo: str = _option("ttft=2s,itl=200ms", "Targets that a request must meet to count as goodput.")
    isolated: str = _option(
        "",
        "How long a prompt takes alone on the server, as 20ms + 150ms/1k: for targets like "
        "max(1s, 3x).",
    )
    prompt: str = _option("64-512", "Tokens of a prompt; of a user's message in chat.")
    output: str = _option("16-64", "Tokens of an answer.")
    shared: int = _option(0, "Tokens that all prompts begin with; of each system prompt in chat.")
    think: float = _option(2.0, "Mean seconds between an answer and the next message (chat).")
    steps: int = _option(6, "Rates that a ramp tries.")
    trace: str = _option(
        "",
        "File (.jsonl, Azure .csv, either .gz; ServeGen .npz) or synthetic[:N], N being its requests.",
    )
    scale: float = _option(1.0, "Factor on a trace's lengths, for models with a short context.")
    dispatch: str = _option("timestamp", "timestamp, or thinktime: turns wait for the one before.")
    seed: int = _option(0, "Of arrivals, lengths and texts.")
    model: str = _option("", "Default: the first of /v1/models.")
    grpc: str = _option("", "HOST:PORT: gRPC (diptych.v1.Inference) instead of HTTP.")
    drain: float = _option(30.0, "Seconds for answers that are under way at the end.")
    gate: str = _option("", "What has to hold, as in goodput>=0.95,ttft_p99<=1500.")
    out: str = _option("", "File for the JSON of the run.")
    metrics: str = _option("", "URLs of the server's Prometheus metrics, comma-separated.")
    admin: str = _option("", "Diptych's admin URL, for the server's own counts.")

    @staticmethod
    def of(options: Any) -> LoadPlan:
        """Reads Locust's options, where each field is called `plan_<name>`. Raises LoadError."""
        kinds: dict[str, Any] = {option.name: type(option.default) for option in fields(LoadPlan)}
        texts = {name: getattr(options, f"plan_{name}", None) for name in kinds}
        texts["users"] = getattr(options, "num_users", None)  # Locust's own
        try:
            values = {name: kinds[name](text) for name, text in texts.items() if text is not None}
        except ValueError as error:
            raise LoadError(str(error)) from None
        plan = LoadPlan(**values)
        plan.check()
        return plan

    def check(self) -> None:
        """Checks that the options fit each other. Raises LoadError."""
        if self.load not in LOADS:
            raise LoadError(f"profile {self.load}: expected one of {', '.join(LOADS)}")
        if self.dispatch not in DISPATCHES:
            raise LoadError(f"dispatch {self.dispatch}: expected timestamp or thinktime")
        if self.load == "trace" and not self.trace:
            raise LoadError("profile trace needs --trace FILE (or synthetic)")
        if self.duration <= 0 or self.users < 1 or self.steps < 1 or self.scale <= 0:
            raise LoadError("duration, users, steps and scale must be above 0")
        if self.think < 0 or self.shared < 0 or self.drain < 0:
            raise LoadError("think, shared and drain must not be below 0")
        # Each of these parses its option, and raises LoadError.
        _ = (self.targets, self.prompts, self.outputs, self.rates, self.gates)

    @property
    def targets(self) -> Slo:
        """What a request must meet: its first token's time, and the gaps between tokens."""
        try:
            costs = (isolated_cost(self.isolated),) if self.isolated else ()
            slo = Slo.parse(self.slo, costs)
        except SimulationError as error:
            raise LoadError(str(error)) from None
        if slo.ttft.needs_isolated and not costs:
            raise LoadError(
                f"slo {self.slo}: 3x is of the prompt's time alone on the server: give that with "
                "--isolated, as in 20ms + 150ms/1k (`diptych status -o json` has a router's)"
            )
        return slo

    @property
    def prompts(self) -> TokenRange:
        """How many tokens a prompt has."""
        return _token_range("prompt", self.prompt)

    @property
    def outputs(self) -> TokenRange:
        """How many tokens an answer has."""
        return _token_range("output", self.output)

    @property
    def rates(self) -> tuple[float, float]:
        """Lowest and highest requests per second, which differ in a ramp only.

        (0, 0): as recorded in the trace.
        """
        if not self.rate and self.load == "trace":
            return 0.0, 0.0
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(?:-(\d+(?:\.\d+)?))?", self.rate)
        low = float(match[1]) if match else 0.0
        high = float(match[2] or match[1]) if match else 0.0
        is_range_without_ramp = low != high and self.load != "ramp"
        if not 0 < low <= high or is_range_without_ramp:
            raise LoadError(f"rate {self.rate}: expected a number, as 4; for ramp also 1-16")
        return low, high

    @property
    def gates(self) -> list[LoadGate]:
        """All that has to hold; empty: the run cannot fail by its figures."""
        return [LoadGate.of(part) for part in self.gate.split(",") if part.strip()]

    @property
    def label(self) -> str:
        """What the load is called in statistics: the trace's name, or the kind of load."""
        return Path(self.trace).name.split(".")[0] if self.load == "trace" else self.load


def _token_range(name: str, text: str) -> TokenRange:
    """Returns the range of `128` or `64-512`; `name` is the option, for the error."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    low = int(match[1]) if match else 0
    high = int(match[2] or match[1]) if match else 0
    if not 1 <= low <= high:
        raise LoadError(f"{name} {text}: expected tokens, as 128 or 64-512")
    return TokenRange(low, high)


@dataclass(frozen=True, slots=True)
class LoadGate:
    """`goodput>=0.95`: a figure of the run, how to compare it, and the limit."""

    name: str  #: one of `GATED`
    sign: str  #: one of `OPERATORS`
    limit: float  #: a share of 1, a number, a rate per second, or a time in ms

    @staticmethod
    def of(text: str) -> LoadGate:
        """Reads a gate from its text. Raises LoadError."""
        match = re.fullmatch(r"\s*([a-z0-9_]+)\s*(>=|<=|>|<)\s*(\d+(?:\.\d+)?)\s*", text)
        if not match:
            raise LoadError(f"gate {text}: expected NAME>=VALUE, as goodput>=0.95")
        name, sign, limit = match.groups()
        if name not in GATED:
            raise LoadError(f"gate {text}: expected one of {', '.join(GATED)}")
        return LoadGate(name, sign, float(limit))

    def holds(self, summary: dict[str, Any]) -> bool:
        """Returns whether the figure keeps the limit. A figure that the run lacks keeps none.

        A run lacks figures if it had no request, no answer or no gap.
        """
        if not summary["requests"]:
            return False
        value = gated_figure(summary, self.name)
        return value is not None and OPERATORS[self.sign](value, self.limit)

    def __str__(self) -> str:
        return f"{self.name}{self.sign}{self.limit:g}"


#: Figures that are no times: a share, requests/s, a number of requests, tokens/s.
_SHARES = ("goodput", "good_per_s", "errors", "tokens_per_s")
_TIMES = ("ttft", "itl", "tpot", "e2e", "second_token")
_RANKS = ("mean", "p50", "p90", "p95", "p99", "max")
#: figures that a gate can name: shares, rates and counts; times in ms
GATED = (
    *_SHARES,
    *(f"{time}_{rank}" for time in _TIMES for rank in _RANKS),
    *(f"ttft_offered_p{rank}" for rank in OFFERED_RANKS),
)


def gated_figure(summary: dict[str, Any], name: str) -> float | None:
    """Returns the figure that a gate names; None when the run does not have it.

    `summary` is what `outcomes.summarize` returns.
    """
    if name == "errors":
        return float(sum(summary["errors"].values()))
    if name in _SHARES:
        return summary[name]
    time, _, rank = name.rpartition("_")
    return summary[f"{time}_ms"].get(rank)
