"""Readers, and loads made of traces."""

import gzip
import json

import pytest
from diptych.simulator.errors import SimulationError
from diptych.simulator.trace import Item, Trace, load, total, turns

from .support import trace_file


def rows(count=20):
    """Two blocks each: the first is everybody's."""
    return [Item(float(i), 1024, 10, (0, i + 1)) for i in range(count)]


def test_a_load_superposes_copies_and_never_squeezes_time():
    trace = Trace("t", rows(), 512, quantum_s=1.0)
    assert trace.rate == pytest.approx(1.0)
    made = trace.workload(2.5, seed=1)
    assert len(made) == 60  # three copies
    span = 60 / 2.5
    assert made[0].at >= 0 and made[-1].at < span and span >= trace.span_s
    assert [one.index for one in made] == list(range(60))


def test_copies_share_the_block_that_most_requests_share_and_nothing_else():
    made = Trace("t", rows(), 512).workload(3.0, seed=0)
    assert len({one.blocks[0] for one in made}) == 1
    assert len({one.blocks[1] for one in made}) == len(made)
    for one in made:  # names are what the router's hashes say
        named = [name for run in one.runs for name in run.names]
        assert [h for h in one.hashes if h] == named


def test_equal_seeds_give_equal_loads_and_others_do_not():
    trace = Trace("t", rows(), 512, quantum_s=3.0)
    times = [[one.at for one in trace.workload(1.0, seed)] for seed in (1, 1, 2)]
    assert times[0] == times[1] != times[2]


def test_a_load_as_recorded_keeps_the_order_and_the_clock():
    made = Trace("t", rows(), 512).workload(Trace("t", rows(), 512).rate, 0)
    assert [one.at for one in made] == [float(i) for i in range(20)]


def test_answers_are_the_blocks_of_the_next_prompt(tmp_path):
    path = tmp_path / "t.jsonl"
    first = {"timestamp": 0, "input_length": 600, "output_length": 500, "hash_ids": [1, 2]}
    after = {"timestamp": 9, "input_length": 1700, "output_length": 5, "hash_ids": [1, 3, 4, 5]}
    path.write_text("\n".join(json.dumps(row) for row in (first, after)))
    trace = load(str(path))
    # 1,100 tokens: two full blocks, the second is what the answer filled
    assert trace.items[0].answer == (3,)
    assert trace.items[1].answer == ()
    one = trace.workload(trace.rate, 0)[0]
    later = trace.workload(trace.rate, 0)[1]
    assert one.whole == 2 and one.answers[0] == later.runs[1]


def test_blocks_that_the_same_requests_have_are_one_run_and_no_others():
    rows = [
        Item(0.0, 4 * 512, 600, (1, 2, 3, 4), answer=(5,)),
        Item(1.0, 7 * 512, 9, (1, 2, 3, 4, 5, 6, 7)),
        Item(2.0, 3 * 512, 9, (1, 2, 9)),
        Item(3.0, 3 * 512, 9, (8, 10, 9)),  # not chained: 9 lies behind two blocks
    ]
    made = Trace("t", rows, 512).workload(Trace("t", rows, 512).rate, 0)
    runs = [[(run.block, run.blocks) for run in one.runs] for one in made]
    assert runs[0] == [(1, 2), (3, 2)] and [run[:2] for run in made[0].answers] == [(5, 1)]
    assert runs[1] == [(1, 2), (3, 2), (5, 1), (6, 2)]
    assert runs[2] == [(1, 2), (9, 1)] and runs[3] == [(8, 2), (9, 1)]
    long = [Item(0.0, 20 * 512, 9, tuple(range(20)))]
    (one,) = Trace("t", long, 512).workload(1.0, 0)
    assert [run.blocks for run in one.runs] == [8, 8, 4]


def test_turns_of_a_session_wait_for_the_end_of_the_one_before():
    items = [Item(0.0, 100, 10, session=0), Item(5.0, 200, 10, session=0), Item(0.0, 9, 9)]
    trace = Trace("t", items, 64, sessions=True, span_s=10.0)
    open_loop, closed = trace.workload(0.3, 0), trace.workload(0.3, 0, closed=True)
    assert len(open_loop) == 3 and len(closed) == 2 and total(closed) == 3
    assert sorted(one.index for one in turns(closed)) == [0, 1, 2]
    follower = next(one.then for one in closed if one.then)
    assert follower.think_s == pytest.approx(5.0 - 10 * 0.02)


def test_the_synthetic_trace_has_sessions_tenants_and_a_seed():
    one, same, other = load("synthetic:300"), load("synthetic:300"), load("synthetic:300", seed=1)
    assert one.items == same.items != other.items
    assert len({item.tenant for item in one.items}) > 3
    again = [item for item in one.items if set(item.blocks) & set(one.items[0].blocks)]
    assert len(again) > 1


def test_poisson_lengths_lie_inside_what_was_asked():
    trace = load("poisson:256-1024:64-128:50")
    assert len(trace.items) == 50
    assert all(256 <= item.prompt <= 1024 and 64 <= item.output <= 128 for item in trace.items)


@pytest.mark.parametrize("source", ["nothing.jsonl", "synthetic:x", "poisson:1-2", "poisson"])
def test_a_wrong_source_is_said(source):
    with pytest.raises(SimulationError):
        load(source)


def test_a_row_without_a_field_is_said(tmp_path):
    path = tmp_path / "t.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(json.dumps({"timestamp": 0}))
    with pytest.raises(SimulationError, match="input_length"):
        load(str(path))


@pytest.mark.parametrize(
    ("name", "rate", "quantum"),
    [
        ("mooncake_conv_0_20min.jsonl.gz", 3.05, 3.0),
        ("azure2023_code_0_25min.jsonl.gz", 3.22, 0.0),
    ],
)
def test_public_traces_read_as_their_statistics_say(name, rate, quantum):
    trace = load(trace_file(name))
    assert trace.rate == pytest.approx(rate, rel=0.01) and trace.quantum_s == quantum


def test_servegen_clients_become_tenants_with_a_system_prompt():
    trace = load(trace_file("servegen_language_m-small.npz"))
    assert 3000 < len(trace.items) < 5000
    assert len({item.tenant for item in trace.items}) > 5
