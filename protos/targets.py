"""Targets as people write them, and the seconds that they come to (pure).

The target for the time to the first token (TTFT) is an expression:

    2s, 1500ms               a time
    3x                       three times the request's isolated prefill: what its whole prompt takes
                             alone in the cluster, with nothing of it cached
    300ms/1k                 a time for each 1,000 tokens of the prompt
    500ms + 300ms/1k         the sum of such terms
    max(1s, 3x)              the largest of such sums

    target = max over the sums of (fixed_s + per_1k_s * prompt_tokens / 1,000 + multiple * isolated_s)

The configuration, the headers of a request, the router, the simulator and the load tests read
these texts and compute these seconds here. The target for the time between two tokens (ITL) is a
time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache

DAY_S = 86_400.0  #: no time in a target is longer
MULTIPLE_LIMIT = 1000.0  #: no multiple of the isolated prefill is larger
SUMS_LIMIT = 8  #: of one `max(...)`
#: Characters of an expression, as it is written and as it is printed: a process prints the target
#: that it has parsed, and the next one parses what was printed.
TEXT_LIMIT = 200
EXAMPLES = "2s, 1500ms, max(1s, 3x) or 500ms + 300ms/1k"
_TERM = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(ms|s|x)(/1k)?")


class TargetError(ValueError):
    """A text is no target; the message quotes the text and shows what is expected."""


@dataclass(frozen=True, slots=True)
class TargetSum:
    """A sum of terms: a time, a time for the prompt's tokens, a multiple of its isolated prefill."""

    fixed_s: float = 0.0
    per_1k_s: float = 0.0  #: for each 1,000 tokens of the prompt
    multiple: float = 0.0  #: of the isolated prefill

    def seconds(self, prompt_tokens: float, isolated_s: float) -> float:
        """Return what the sum comes to."""
        per_token_s = self.per_1k_s / 1000
        return self.fixed_s + per_token_s * prompt_tokens + self.multiple * isolated_s

    def scaled(self, factor: float = 1.0) -> TargetSum:
        """Return the sum with every term times the factor, to four significant digits."""
        return TargetSum(
            fixed_s=_rounded(self.fixed_s * factor),
            per_1k_s=_rounded(self.per_1k_s * factor),
            multiple=_rounded(self.multiple * factor),
        )

    def __str__(self) -> str:
        terms: list[str] = []
        if self.fixed_s:
            terms.append(format_time(self.fixed_s))
        if self.per_1k_s:
            terms.append(f"{format_time(self.per_1k_s)}/1k")
        if self.multiple:
            terms.append(f"{_format_number(self.multiple)}x")
        return " + ".join(terms)


@dataclass(frozen=True, slots=True)
class TtftTarget:
    """A target for the time from a request's arrival to its first token: the largest of its sums."""

    sums: tuple[TargetSum, ...]  #: one at least

    @staticmethod
    def flat(seconds: float) -> TtftTarget:
        """Return the target that is the same time for every request."""
        return TtftTarget((TargetSum(fixed_s=seconds),))

    @staticmethod
    def parse(text: str) -> TtftTarget:
        """Return the target that the text says. Raises TargetError."""
        if len(text) > TEXT_LIMIT:
            raise TargetError(f"a target has {TEXT_LIMIT} characters at most, not {len(text)}")
        compact = re.sub(r"\s", "", text).lower()
        maximum = re.fullmatch(r"max\((.*)\)", compact)
        sum_texts = maximum[1].split(",") if maximum else [compact]
        if len(sum_texts) > SUMS_LIMIT:
            raise TargetError(f"{text}: max() has {SUMS_LIMIT} parts at most")
        target = TtftTarget(tuple(_parse_sum(sum_text, text) for sum_text in sum_texts))
        printed_length = len(str(target))
        if printed_length > TEXT_LIMIT:
            raise TargetError(
                f"a target has {TEXT_LIMIT} characters at most, and {text} is printed with "
                f"{printed_length}"
            )
        return target

    @property
    def is_flat(self) -> bool:
        """Whether the target is the same time for every request."""
        return not any(part.per_1k_s or part.multiple for part in self.sums)

    @property
    def needs_isolated(self) -> bool:
        """Whether the isolated prefill has to be known."""
        return any(part.multiple for part in self.sums)

    @property
    def least_s(self) -> float:
        """The seconds of the shortest prompt on the fastest worker: those of the fixed times."""
        return max(part.fixed_s for part in self.sums)

    def seconds(self, prompt_tokens: float, isolated_s: float) -> float:
        """Return the target of a prompt; `isolated_s` counts if the target `needs_isolated`."""
        return max([part.seconds(prompt_tokens, isolated_s) for part in self.sums])

    def deciding_sum(self, prompt_tokens: float, isolated_s: float) -> TargetSum:
        """Return the sum that is the largest for this prompt, of equal ones the first."""
        return max(self.sums, key=lambda part: part.seconds(prompt_tokens, isolated_s))

    def scaled(self, factor: float) -> TtftTarget:
        """Return the target with every term times the factor, to four significant digits."""
        return TtftTarget(tuple(part.scaled(factor) for part in self.sums))

    def __str__(self) -> str:
        texts = [str(part) for part in self.sums]
        return texts[0] if len(texts) == 1 else f"max({', '.join(texts)})"


@lru_cache(maxsize=1024)
def parse_cached(text: str) -> TtftTarget:
    """Return the target that the text says, as `TtftTarget.parse`: texts come again and again."""
    return TtftTarget.parse(text)


def parse_time(text: str) -> float:
    """Return the seconds of a text such as `50ms` or `2s`. Raises TargetError."""
    match = _TERM.fullmatch(re.sub(r"\s", "", text).lower())
    if match is None or match[2] == "x" or match[3]:
        raise TargetError(f"{text} is no time like 50ms or 2s")
    seconds = _seconds(match)
    if not 0 < seconds <= DAY_S:
        raise TargetError(f"{text}: a target is more than 0 and at most a day")
    return seconds


def format_time(seconds: float) -> str:
    """Return a time as in `2s`, or one of less than a second as in `500ms`."""
    if seconds < 1:
        return f"{_format_number(seconds * 1e3)}ms"
    return f"{_format_number(seconds)}s"


def _format_number(value: float) -> str:
    """Return ten significant digits of a number, without an exponent, which no target may have."""
    text = f"{value:.10g}"
    return f"{Decimal(text):f}" if "e" in text else text


def _parse_sum(sum_text: str, text: str) -> TargetSum:
    """Return the sum of one part of an expression. Raises TargetError, which quotes all of it."""
    fixed_s = 0.0
    per_1k_s = 0.0
    multiple = 0.0
    for term in sum_text.split("+"):
        match = _TERM.fullmatch(term)
        if match is None or (match[2] == "x" and match[3]):
            raise TargetError(f"{text}: {term or 'nothing'} is no part of a target like {EXAMPLES}")
        if match[2] == "x":
            multiple += float(match[1])
        elif match[3]:
            per_1k_s += _seconds(match)
        else:
            fixed_s += _seconds(match)
    if fixed_s + per_1k_s + multiple <= 0:
        raise TargetError(f"{text}: a target is more than 0")
    if fixed_s > DAY_S or per_1k_s > DAY_S or multiple > MULTIPLE_LIMIT:
        raise TargetError(
            f"{text}: a time is at most a day, a multiple at most {MULTIPLE_LIMIT:g}x"
        )
    return TargetSum(fixed_s=fixed_s, per_1k_s=per_1k_s, multiple=multiple)


def _seconds(match: re.Match[str]) -> float:
    """Return the seconds of a matched time."""
    value = float(match[1])
    return value / 1e3 if match[2] == "ms" else value


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
