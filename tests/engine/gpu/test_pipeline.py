"""One step ahead: the tokens of step after step, whatever comes and goes meanwhile."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import pytest
from diptych.engine.gpu.layer_events import LayerCallbacks
from diptych.engine.gpu.pipeline import DecodePipeline, device_can_sample
from diptych.engine.gpu.plan import DecodeRow
from diptych.engine.pacing import StepWork
from diptych.engine.scheduler import Scheduler
from diptych.engine.sequence import Sequence, SequenceOutput
from diptych.protos.frames import Grammar, Sampling, Token
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.pure import scheduler, seq

MAX_LEN = 400


def model(last: int, position: int, seed: int) -> int:
    """The id behind `last`: any function of what a step is told."""
    return (last * 31 + position * 7 + seed) % 50


def expected(one: Sequence, count: int, stop: int) -> list[int]:
    ids = list(one.token_ids)
    while len(ids) < one.prompt_tokens + count:
        ids.append(model(ids[-1], len(ids) - 1, one.sampling.seed))
        if ids[-1] == stop:
            break
    return ids[one.prompt_tokens :]


@dataclass
class Ticket:
    device: Device
    ids: list[int]
    peaks: list[float]

    def read(self) -> tuple[list[int], list[float]]:
        self.device.under_way.discard(id(self))
        return self.ids, self.peaks


@dataclass
class Device:
    """A runner that computes when it is told; what it was told is in `steps`."""

    s: Scheduler
    row_limit: int = 64
    steps: list[list[DecodeRow]] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    under_way: set[int] = field(default_factory=set)
    peak: float = 1.0

    def launch(self, rows: list[DecodeRow]) -> Ticket:
        for row in rows:
            assert row.position < len(row.blocks) * 64, "its KV has no place"
        writes = Counter(row.blocks[row.position // 64] for row in rows)
        assert set(writes.values()) <= {1}, "two rows write to one block"
        ids = [row.source if row.source >= 0 else self.last[-1 - row.source] for row in rows]
        self.last = [model(i, r.position, r.seed) for i, r in zip(ids, rows, strict=True)]
        self.steps.append(rows)
        ticket = Ticket(self, self.last, [self.peak] * len(rows))
        self.under_way.add(id(ticket))
        assert len(self.under_way) <= 2
        return ticket


@dataclass
class World:
    """A scheduler whose prefills are just booked, and whose decodes run on the pipeline."""

    s: Scheduler
    outputs: list[SequenceOutput] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.device = Device(self.s)
        self.pipeline = DecodePipeline(self.device, self.s, self.tell, MAX_LEN)

    def tell(self, one: Sequence, token: object) -> SequenceOutput:
        if not isinstance(token, Token):
            self.s.fail(one, True)
            return SequenceOutput(one.attempt_key, error=str(token))
        offset = one.generated_tokens
        return SequenceOutput(one.attempt_key, offset, token, self.s.append_token(one, token.id))

    def step(self) -> list[SequenceOutput]:
        """As `Engine.step`."""
        told = self.pipeline.step()
        if told is None:
            plan = self.s.plan()
            if plan.prefill:
                work = [*plan.prefill, *((one, 1) for one in plan.decode)]
                done = [one for one, count in work if self.s.record_computed(one, count)]
                told = [self.tell(one, Token(self.next(one))) for one in done]
            elif plan.decode:
                assert self.pipeline.can_run(plan.decode)
                self.pipeline.start(plan.decode)
                told = self.pipeline.step()
        self.s.pool.validate()
        self.outputs += told or []
        return told or []

    def next(self, one: Sequence) -> int:
        return model(one.token_ids[-1], len(one.token_ids) - 1, one.sampling.seed)

    def tokens(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for output in self.outputs:
            assert output.token is not None and output.offset == len(
                found.get(output.attempt_key[0], [])
            )
            found.setdefault(output.attempt_key[0], []).append(output.token.id)
        return found


def request(name: str, length: int, count: int, stop: int = -1) -> Sequence:
    one = seq(name, length, count)
    one.sampling = Sampling(count, stop_ids=(stop,), seed=length)
    return one


@given(
    st.lists(
        st.tuples(st.integers(1, 150), st.integers(1, 90), st.integers(0, 40)),
        min_size=1,
        max_size=6,
    ),
    st.integers(7, 30),
    st.integers(0, 49),
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 5)), max_size=2),
)
def test_tokens_are_those_of_step_after_step(arrivals, blocks, stop, drops) -> None:
    """Requests come at any step, some are dropped, the pool is small enough for preemption."""
    world = World(scheduler(blocks, growth_tokens=16))
    wanted = {}
    for index, (length, count, _) in enumerate(arrivals):
        one = request(f"r{index}", length, count, stop)
        wanted[f"r{index}"] = (one, expected(one, count, stop))
    dropped = set()
    for step in range(2000):
        for index, (_, _, when) in enumerate(arrivals):
            if when == step:
                world.s.add(wanted[f"r{index}"][0])
        for when, index in drops:
            if when == step and (f"r{index}", 0) in [name[0] for name in world.s.live]:
                world.s.remove((f"r{index}", 0))
                dropped.add(f"r{index}")
        world.step()
        if step > 60 and not world.s.live:
            break
    found = world.tokens()
    for name, (_, tokens) in wanted.items():
        if name in dropped:
            assert found.get(name, []) == tokens[: len(found.get(name, []))]
        else:
            assert found[name] == tokens
    world.pipeline.finish_abandoned_step()
    assert world.pipeline.step() is None
    assert world.s.pool.available_blocks == world.s.pool.total_blocks


def test_the_next_step_is_launched_before_the_last_one_is_read() -> None:
    world = World(scheduler(30))
    world.s.add(request("a", 10, 20))
    world.step()  # prefill
    world.step()
    first, second = world.device.steps
    assert first[0].source >= 0 and second[0].source == -1  # what row 0 gave
    assert second[0].position == first[0].position + 1
    assert second[0].draw == first[0].draw + 1
    assert world.pipeline.work == StepWork(decode_rows=1, decode_kv_tokens=first[0].position + 1)
    assert len(world.device.under_way) == 1


def test_a_newcomer_ends_the_lead_and_is_prefilled_next() -> None:
    world = World(scheduler(30))
    world.s.add(request("a", 10, 20))
    world.step()
    world.step()
    world.s.add(request("b", 10, 20))
    launched = len(world.device.steps)
    world.step()  # books what is under way, launches nothing
    assert len(world.device.steps) == launched
    assert [output.attempt_key[0] for output in world.step()] == ["b", "a"]


def test_a_step_for_nobody_is_forgotten() -> None:
    world = World(scheduler(30))
    world.s.add(request("a", 10, 20))
    world.step()
    world.step()
    world.s.remove(("a", 0))
    assert world.step() == []
    assert not world.device.under_way
    world.s.add(request("b", 10, 1))
    assert [output.attempt_key[0] for output in world.step()] == ["b"]


@pytest.mark.parametrize("peak", [math.nan, math.inf])
def test_damage_ends_its_sequence_with_the_reason(peak: float) -> None:
    world = World(scheduler(30))
    world.s.add(request("a", 10, 20))
    world.step()
    world.device.peak = peak
    (output,) = world.step()
    assert "damaged weights or overflow" in (output.error or "")


@pytest.mark.parametrize(
    ("sampling", "here"),
    [
        (Sampling(9), True),
        (Sampling(9, temperature=1.0), True),
        (Sampling(9, temperature=0.0, top_k=5), True),  # greedy takes the largest anyway
        (Sampling(9, temperature=1.0, top_k=5), False),
        (Sampling(9, temperature=1.0, top_p=0.9), False),
        (Sampling(9, temperature=1.0, min_p=0.1), False),
        (Sampling(9, logprobs=0), False),
        (Sampling(9, repetition_penalty=1.1), False),
        (Sampling(9, presence_penalty=0.5), False),
        (Sampling(9, frequency_penalty=0.5), False),
        (Sampling(9, logit_bias=((3, 1.0),)), False),
        (Sampling(9, min_tokens=2), False),
        (Sampling(9, grammar=Grammar("regex", "a+")), False),
    ],
)
def test_what_needs_the_host_is_left_to_it(sampling: Sampling, here: bool) -> None:
    one = seq("a", 5)
    one.sampling = sampling
    assert device_can_sample(one) == here


class Event:
    done = False

    def __init__(self) -> None:
        self.waited = False

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return Event.done

    def synchronize(self) -> None:
        self.waited = True


def test_layers_are_told_when_they_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when they are launched: a transfer would read what is not there yet."""
    told: list[int] = []
    behind = LayerCallbacks(told.append, Event)
    behind.launched(0)
    behind.launched(1)
    assert told == []
    monkeypatch.setattr(Event, "done", True)
    behind.launched(2)
    assert told == [0, 1, 2]
    monkeypatch.setattr(Event, "done", False)
    behind.launched(3)
    behind.finish()
    assert told == [0, 1, 2, 3]
