"""What is offered, to whom, and what has to hold: options as text, understood.

`Plan` travels as Locust options: every field is one (`--load`, `--rate`, ...), so that master,
workers and the web UI know the same ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..simulator.errors import SimulationError
from ..simulator.metrics import Slo
from .errors import LoadError

LOADS = ("constant", "poisson", "burst", "ramp", "trace", "chat")
OPERATORS = {
    ">=": lambda value, limit: value >= limit,
    "<=": lambda value, limit: value <= limit,
    ">": lambda value, limit: value > limit,
    "<": lambda value, limit: value < limit,
}


def _told(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True)
class Plan:
    """Options of a run. Lengths in tokens, `LOW-HIGH` uniform."""

    load: str = _told("poisson", "constant, poisson, burst, ramp, trace or chat.")
    rate: str = _told("2", "Requests per second; LOW-HIGH for ramp; empty for trace: as recorded.")
    users: int = _told(10, "Users of the chat load.")
    duration: float = _told(60.0, "Seconds in which requests are offered.")
    slo: str = _told("ttft=2s,itl=200ms", "Targets that a request must meet to count as goodput.")
    prompt: str = _told("64-512", "Tokens of a prompt; of a user's message in chat.")
    output: str = _told("16-64", "Tokens of an answer.")
    shared: int = _told(0, "Tokens that all prompts begin with; of each system prompt in chat.")
    think: float = _told(2.0, "Mean seconds between an answer and the next message (chat).")
    steps: int = _told(6, "Rates that a ramp tries.")
    trace: str = _told("", "File (.jsonl, .jsonl.gz, ServeGen .npz) or synthetic[:N].")
    scale: float = _told(1.0, "Factor on a trace's lengths, for models with a short context.")
    dispatch: str = _told("timestamp", "timestamp, or thinktime: turns wait for the one before.")
    seed: int = _told(0, "Of arrivals, lengths and texts.")
    model: str = _told("", "Default: the first of /v1/models.")
    grpc: str = _told("", "HOST:PORT: gRPC (diptych.v1.Inference) instead of HTTP.")
    drain: float = _told(30.0, "Seconds for answers that are under way at the end.")
    gate: str = _told("", "What has to hold, as in goodput>=0.95,ttft_p99<=1500.")
    out: str = _told("", "File for the JSON of the run.")
    metrics: str = _told("", "URLs of the server's Prometheus metrics, comma-separated.")
    admin: str = _told("", "Diptych's admin URL, for the server's own counts.")

    @staticmethod
    def of(options: Any) -> Plan:
        """From anything that has the fields as attributes. Raises LoadError."""
        kinds: dict[str, Any] = {f.name: type(f.default) for f in fields(Plan)}
        values = {name: getattr(options, f"plan_{name}", None) for name in kinds}
        values["users"] = getattr(options, "num_users", None)  # Locust's own
        try:
            given = {name: kinds[name](v) for name, v in values.items() if v is not None}
        except ValueError as error:
            raise LoadError(str(error)) from None
        plan = Plan(**given)
        plan.check()
        return plan

    def check(self) -> None:
        """Raises LoadError."""
        if self.load not in LOADS:
            raise LoadError(f"profile {self.load}: expected one of {', '.join(LOADS)}")
        if self.dispatch not in ("timestamp", "thinktime"):
            raise LoadError(f"dispatch {self.dispatch}: expected timestamp or thinktime")
        if self.load == "trace" and not self.trace:
            raise LoadError("profile trace needs --trace FILE (or synthetic)")
        if self.duration <= 0 or self.users < 1 or self.steps < 1 or self.scale <= 0:
            raise LoadError("duration, users, steps and scale must be above 0")
        if self.think < 0 or self.shared < 0 or self.drain < 0:
            raise LoadError("think, shared and drain must not be below 0")
        self.targets, self.prompts, self.outputs, self.rates, self.gates  # noqa: B018

    @property
    def targets(self) -> Slo:
        try:
            slo = Slo.of(self.slo)
        except SimulationError as error:
            raise LoadError(str(error)) from None
        if slo.multiple:
            raise LoadError(f"slo {self.slo}: multiples are for simulations; give times")
        return slo

    @property
    def prompts(self) -> tuple[int, int]:
        return _range("prompt", self.prompt)

    @property
    def outputs(self) -> tuple[int, int]:
        return _range("output", self.output)

    @property
    def rates(self) -> tuple[float, float]:
        """Lowest and highest; (0, 0): as recorded."""
        if not self.rate and self.load == "trace":
            return 0.0, 0.0
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(?:-(\d+(?:\.\d+)?))?", self.rate)
        low = float(found[1]) if found else 0.0
        high = float(found[2] or found[1]) if found else 0.0
        if not 0 < low <= high or (low != high and self.load != "ramp"):
            raise LoadError(f"rate {self.rate}: expected a number, as 4; for ramp also 1-16")
        return low, high

    @property
    def gates(self) -> list[Gate]:
        return [Gate.of(part) for part in self.gate.split(",") if part.strip()]

    @property
    def label(self) -> str:
        return Path(self.trace).name.split(".")[0] if self.load == "trace" else self.load


def _range(name: str, text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= low <= high:
        raise LoadError(f"{name} {text}: expected tokens, as 128 or 64-512")
    return low, high


@dataclass(frozen=True, slots=True)
class Gate:
    """`goodput>=0.95`: a figure of the run, how, and the limit."""

    name: str
    sign: str
    limit: float

    @staticmethod
    def of(text: str) -> Gate:
        found = re.fullmatch(r"\s*([a-z0-9_]+)\s*(>=|<=|>|<)\s*(\d+(?:\.\d+)?)\s*", text)
        if not found:
            raise LoadError(f"gate {text}: expected NAME>=VALUE, as goodput>=0.95")
        if found[1] not in GATED:
            raise LoadError(f"gate {text}: expected one of {', '.join(GATED)}")
        return Gate(found[1], found[2], float(found[3]))

    def holds(self, summary: dict[str, Any]) -> bool:
        """A figure that the run does not have (no request, no answer, no gap) holds nothing."""
        if not summary["requests"]:
            return False
        value = gated(summary, self.name)
        return value is not None and OPERATORS[self.sign](value, self.limit)

    def __str__(self) -> str:
        return f"{self.name}{self.sign}{self.limit:g}"


_SHARES = ("goodput", "good_per_s", "errors", "tokens_per_s")
_TIMES = ("ttft", "itl", "tpot", "e2e", "second_token")
_RANKS = ("mean", "p50", "p90", "p95", "p99", "max")
#: figures that a gate can name: shares and rates, times in ms
GATED = (*_SHARES, *(f"{time}_{rank}" for time in _TIMES for rank in _RANKS))


def gated(summary: dict[str, Any], name: str) -> float | None:
    if name == "errors":
        return float(sum(summary["errors"].values()))
    if name in _SHARES:
        return summary[name]
    time, _, rank = name.rpartition("_")
    return summary[f"{time}_ms"].get(rank)
