"""Counts what the steps of an engine computed since its start (pure)."""

from __future__ import annotations

from typing import Any

from ..kv_transfer.statistics import Histogram

#: Upper bounds of the histograms' buckets: seconds of a step, how often an answer was preempted,
#: and tokens of a step.
STEP_SECONDS_BOUNDS = (
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
    5.0,
)
PREEMPTION_BOUNDS = (0, 1, 2, 5, 10, 20)
STEP_TOKENS_BOUNDS = tuple(2**power for power in range(15))


class StepCounters:
    """What an engine has computed, for `EngineLike.observe` and `EngineLike.statistics`.

    The engine's thread counts; any thread may read.
    """

    def __init__(self) -> None:
        self.steps = 0
        #: Tokens that were prefilled: those of prompts that no cache had and no peer sent. After a
        #: preemption, what has to be computed again counts again; of the answer, too, but for vLLM.
        self.prefill_tokens = 0
        #: Seconds of steps with prefill, their decoding rows included. Of a step that had help, what
        #: it takes without: the router learns from these seconds what to expect.
        self.prefill_s = 0.0
        self.decode_steps = 0  #: Steps without prefill.
        self.decode_s = 0.0  #: Seconds of steps without prefill, as if none had had help.
        self.helped_steps = 0  #: Steps that idle cores of neighbours helped with.
        #: What steps really took.
        self.step_s = {
            "prefill": Histogram(STEP_SECONDS_BOUNDS),
            "decode": Histogram(STEP_SECONDS_BOUNDS),
        }
        #: Of each step: the ids that were prefilled, plus the rows from which an id was drawn or by
        #: which a guessed id was verified. With vLLM: the ids that vLLM scheduled.
        self.step_tokens = Histogram(STEP_TOKENS_BOUNDS)
        #: How often each answer that came to its end here had been preempted here.
        self.request_preemptions = Histogram(PREEMPTION_BOUNDS)

    def count_step(
        self,
        seconds: float,
        *,
        prefill_tokens: int,
        step_tokens: int,
        alone_s: float | None = None,
    ) -> None:
        """Count a step, with what it adds to the counts of these names.

        `alone_s` is what a step takes that had help, without it; None: it had none.
        """
        self.steps += 1
        self.helped_steps += alone_s is not None
        if alone_s is None:
            alone_s = seconds
        self.step_tokens.observe(step_tokens)
        if prefill_tokens:
            self.prefill_tokens += prefill_tokens
            self.prefill_s += alone_s
            self.step_s["prefill"].observe(seconds)
        else:
            self.decode_steps += 1
            self.decode_s += alone_s
            self.step_s["decode"].observe(seconds)

    def values(self) -> dict[str, Any]:
        """Return a snapshot, by the keys of `EngineLike.statistics`."""
        return {
            "steps": self.steps,
            "helped_steps": self.helped_steps,
            "request_preemptions": self.request_preemptions.values(),
            "prefill_tokens": self.prefill_tokens,
            "step_s": {phase: seconds.values() for phase, seconds in self.step_s.items()},
            "step_tokens": self.step_tokens.values(),
        }
