"""One step ahead: the tokens of step after step, whatever comes and goes meanwhile."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from diptych.engine.gpu.drawn import DrawnRows
from diptych.engine.gpu.layer_events import LayerCallbacks
from diptych.engine.gpu.pipeline import DecodePipeline
from diptych.engine.gpu.plan import LIST_SIZE, PROMPT_BIT, TOP_SIZE, DecodeRows, RowField
from diptych.engine.gpu.slot_update import SlotUpdate
from diptych.engine.gpu.slots import SlotTable, device_can_sample
from diptych.engine.pacing import StepWork
from diptych.engine.scheduler import Scheduler
from diptych.engine.sequence import Sequence, SequenceOutput
from diptych.protos.frames import Grammar, Sampling, ThinkingBudget, Token
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
    rows: list[Row]
    ids: list[int] = field(default_factory=list)

    def draw(self, update: SlotUpdate, required_ids: np.ndarray | None = None) -> None:
        assert not self.ids, "sampled twice"
        last = self.device.last
        ids = [row.source if row.source >= 0 else last[-1 - row.source] for row in self.rows]
        self.ids = [model(i, r.position, r.seed) for i, r in zip(ids, self.rows, strict=True)]
        if required_ids is not None:
            self.device.late_draws += 1
            self.ids = [
                required if required >= 0 else drawn
                for required, drawn in zip(required_ids.tolist(), self.ids, strict=True)
            ]
        self.device.last = self.ids
        self.device.updates.append(update)

    def read(self) -> DrawnRows:
        assert self.ids, "its sampling was not launched"
        self.device.under_way.discard(id(self))
        numbers = np.full(len(self.rows), self.device.peak, np.float32)
        none = np.zeros((len(self.rows), 0))
        return DrawnRows(self.ids, numbers, numbers, numbers, none, none)


@dataclass(frozen=True)
class Row:
    source: int
    position: int
    seed: int
    draw: int
    blocks: list[int]


@dataclass
class Device:
    """A runner that computes when it is told; what it was told is in `steps`."""

    s: Scheduler
    row_limit: int = 64
    slot_table: SlotTable = field(default_factory=lambda: SlotTable(64, 100))
    steps: list[list[Row]] = field(default_factory=list)
    updates: list[SlotUpdate] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    under_way: set[int] = field(default_factory=set)
    peak: float = 1.0
    late_draws: int = 0

    def launch(self, told: DecodeRows, *, draw: bool = True) -> Ticket:
        names = (RowField.SOURCE, RowField.POSITION, RowField.SEED, RowField.DRAW)
        fields = zip(*(told.packed[name].tolist() for name in names), strict=True)
        rows = [Row(*of, blocks) for of, blocks in zip(fields, told.blocks, strict=True)]
        for row in rows:
            assert row.position < len(row.blocks) * 64, "its KV has no place"
        writes = Counter(row.blocks[row.position // 64] for row in rows)
        assert set(writes.values()) <= {1}, "two rows write to one block"
        self.steps.append(rows)
        ticket = Ticket(self, rows)
        if draw:
            ticket.draw(self.slot_table.take_update())
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


def test_no_step_is_launched_ahead_while_so_few_run_that_tokens_are_guessed() -> None:
    """A guess needs the ids before it, and more rows than a step that is launched ahead has."""
    world = World(scheduler(30, draft_tokens=4, draft_below=1))
    world.s.add(request("a", 10, 5))
    world.step()  # prefill
    world.step()
    assert not world.device.under_way and len(world.device.steps) == 1
    world.s.add(request("b", 10, 20))
    world.step()  # prefill, and the next token of "a"
    world.step()
    assert world.device.under_way, "two run: nobody guesses"
    while any(output.attempt_key[0] == "a" for output in world.step()):
        pass
    for _ in range(3):
        world.step()
        assert not world.device.under_way, "one runs again"


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


class BrokenGrammars:
    def matcher(self, grammar: Grammar, stop_ids: tuple[int, ...]) -> None:
        raise RuntimeError("a bug of the grammar library")


def test_a_grammar_that_breaks_ends_its_own_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    world = World(scheduler(30))
    world.pipeline.grammars = BrokenGrammars()  # type: ignore[assignment]
    one = request("a", 10, 12)
    one.sampling = Sampling(12, seed=3, grammar=Grammar("regex", "a+"))
    other = request("b", 12, 12)
    alone = expected(other, 12, -1)
    for sequence in (one, other):
        world.s.add(sequence)
    for _ in range(30):
        world.step()
    (failed,) = (output for output in world.outputs if output.error)
    assert failed.attempt_key == ("a", 0) and "the worker's log says why" in failed.error
    assert "a bug of the grammar library" in caplog.text
    world.outputs.remove(failed)
    assert world.tokens()["b"] == alone


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(9),
        Sampling(9, temperature=1.0),
        Sampling(9, temperature=0.6, top_p=0.9),
        Sampling(9, temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05),
        Sampling(9, temperature=1.0, min_p=0.1),
        Sampling(9, logprobs=20),
        Sampling(9, logprobs=1, logprob_ids=(3, 4)),
        Sampling(9, presence_penalty=0.5),
        Sampling(9, frequency_penalty=0.5),
        Sampling(9, logit_bias=((3, 1.0),)),
        Sampling(9, min_tokens=2),
        Sampling(9, allowed_ids=(3, 5)),
        Sampling(9, grammar=Grammar("regex", "a+")),
        Sampling(9, thinking=ThinkingBudget(4, 8, (7,))),
    ],
)
def test_the_device_samples_whatever_is_asked(sampling: Sampling) -> None:
    """One row that the device could not draw would send the whole batch through the host."""
    one = seq("a", 5)
    one.sampling = sampling
    assert device_can_sample(one)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(9, logprobs=TOP_SIZE + 1),
        Sampling(9, logit_bias=tuple((token_id, 1.0) for token_id in range(LIST_SIZE + 1))),
    ],
)
def test_what_fits_into_no_slot_is_left_to_the_host(sampling: Sampling) -> None:
    one = seq("a", 5)
    one.sampling = sampling
    assert not device_can_sample(one)


def test_a_spent_budget_of_thinking_is_sampled_behind_the_id_that_spends_it() -> None:
    """The layers of the next step are launched before that id is read, its sampling behind it."""
    world = World(scheduler(30))
    one = request("a", 10, 12)
    one.sampling = Sampling(12, seed=3, thinking=ThinkingBudget(4, 77))
    other = request("b", 12, 12)
    alone = expected(other, 12, -1)
    for sequence in (one, other):
        world.s.add(sequence)
    for _ in range(40):
        world.step()
    assert world.tokens()["a"][4] == 77 and 77 not in world.tokens()["a"][:4]
    assert world.tokens()["b"] == alone
    assert 1 <= world.device.late_draws <= 3, "only the steps at the border wait"


def test_counts_follow_a_sequence_from_step_to_step() -> None:
    """The device counts what it draws; the host names each id before the run once."""
    world = World(scheduler(30))
    one = request("a", 10, 20)
    one.sampling = Sampling(20, seed=3, frequency_penalty=0.5)
    world.s.add(one)
    for _ in range(30):
        world.step()
    counted = np.frombuffer(b"".join(u.triples for u in world.device.updates), np.int32)
    triples = counted.reshape(-1, 3)
    assert len(triples) == 11, "the prompt and the id of the prefill, once"
    assert (triples[:10, 2] == PROMPT_BIT).all() and triples[10, 2] == 1
    assert [u.cleared for u in world.device.updates if u.cleared] == [[triples[0, 0]]]


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
