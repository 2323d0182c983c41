"""A scheduler without an engine: sequences, and steps that are booked but not computed."""

from __future__ import annotations

from collections.abc import Iterable

from diptych.engine.blocks import BlockPool
from diptych.engine.scheduler import Scheduler, SchedulerLimits, StepPlan
from diptych.engine.sequence import Sequence
from diptych.kv_transfer.identity import block_hashes
from diptych.protos.frames import Sampling

STOP = 999


def scheduler(blocks: int = 100, **limits: float) -> Scheduler:
    """Without a watermark unless the test gives one."""
    return Scheduler(
        BlockPool(blocks + 1), SchedulerLimits(**{"watermark": 0.0, **limits}), b"salt"
    )


def seq(
    name: str, length: int, most: int = 10, first_only: bool = False, seed: int = 0
) -> Sequence:
    ids = [seed * 10_000 + index for index in range(length)]
    sampling = Sampling(most, stop_ids=(STOP,))
    return Sequence((name, 0), ids, length, sampling, block_hashes(ids, b"salt"), first_only)


def transferred(s: Scheduler, one: Sequence, token: int = 7, waited: float = 0.0) -> Sequence:
    """Reserves and commits it, as if its KV had arrived."""
    assert s.reserve(one)
    one.token_ids.append(token)
    s.commit(one, waited)
    return one


def carry_out(s: Scheduler, plan: StepPlan, token: int = 7) -> list[Sequence]:
    """What the engine does with a plan; the sequences that finished."""
    done = []
    for one, count in [*plan.prefill, *((one, 1) for one in plan.decode)]:
        if s.record_computed(one, count) and s.append_token(one, token):
            done.append(one)
    s.pool.validate()
    return done


def names(sequences: Iterable[Sequence]) -> list[str]:
    return [one.attempt_key[0] for one in sequences]


def chunks(s: Scheduler) -> list[list[tuple[str, int]]]:
    """Prefill of each step until there is none."""
    steps = []
    while plan := s.plan():
        if not plan.prefill:
            break
        steps.append([(one.attempt_key[0], count) for one, count in plan.prefill])
        carry_out(s, plan)
    return steps
