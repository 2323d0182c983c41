"""Readers, and loads made of traces."""

import gzip
import json
from collections import Counter

import numpy as np
import pytest
from diptych.simulator.errors import SimulationError
from diptych.simulator.sources import load_trace
from diptych.simulator.sources.servegen import read_day
from diptych.simulator.trace import (
    Trace,
    TraceRequest,
    all_turns,
    block_id_of,
    count_turns,
    looked_up_hashes,
)

from .support import trace_file


def two_block_requests(count=20):
    """Two blocks each: the first is everybody's."""
    return [TraceRequest(float(i), 1024, 10, (0, i + 1)) for i in range(count)]


def test_a_load_superposes_copies_and_never_squeezes_time():
    trace = Trace("t", two_block_requests(), 512, quantum_s=1.0)
    assert trace.rate == pytest.approx(1.0)
    load = trace.workload(2.5, seed=1)
    assert len(load) == 60  # three copies
    span = 60 / 2.5
    assert load[0].arrival_s >= 0 and load[-1].arrival_s < span and span >= trace.span_s
    assert [request.index for request in load] == list(range(60))


def test_copies_share_the_block_that_most_requests_share_and_nothing_else():
    trace = Trace("t", two_block_requests(), 512)
    load = trace.workload(3.0, seed=0)
    assert len({one.prompt_block_ids[0] for one in load}) == 1
    assert len({one.prompt_block_ids[1] for one in load}) == len(load)
    for one in load:  # what a worker says of its blocks is what the router looks up
        prompt_blocks = one.block_names[: one.prompt_tokens // 512]
        said = [
            mark
            for index, name in enumerate(prompt_blocks)
            for mark in looked_up_hashes(block_id_of(name), index, 8)
        ]
        assert [content for content in one.prompt_hashes if content] == said


def test_equal_seeds_give_equal_loads_and_others_do_not():
    trace = Trace("t", two_block_requests(), 512, quantum_s=3.0)
    times = [[request.arrival_s for request in trace.workload(1.0, seed)] for seed in (1, 1, 2)]
    assert times[0] == times[1] != times[2]


def test_a_load_as_recorded_keeps_the_order_and_the_clock():
    trace = Trace("t", two_block_requests(), 512)
    load = trace.workload(trace.rate, 0)
    assert [request.arrival_s for request in load] == [float(i) for i in range(20)]


def test_answers_are_the_blocks_of_the_next_prompt(tmp_path):
    path = tmp_path / "t.jsonl"
    first = {"timestamp": 0, "input_length": 600, "output_length": 500, "hash_ids": [1, 2]}
    after = {"timestamp": 9, "input_length": 1700, "output_length": 5, "hash_ids": [1, 3, 4, 5]}
    path.write_text("\n".join(json.dumps(row) for row in (first, after)))
    trace = load_trace(str(path))
    # 1,100 tokens: two full blocks, the second is what the answer filled
    assert trace.requests[0].answer_blocks == trace.requests[1].prompt_blocks[1:2] != ()
    assert trace.requests[1].answer_blocks == ()
    request = trace.workload(trace.rate, 0)[0]
    later = trace.workload(trace.rate, 0)[1]
    assert len(request.prompt_block_ids) == 2 and request.block_names == later.block_names[:2]


def test_blocks_that_nobody_else_shows_have_names_of_their_own():
    rows = [
        TraceRequest(0.0, 3 * 512 + 100, 600, (1, 2, 3, 4)),  # its fourth block is partial
        TraceRequest(1.0, 3 * 512 + 100, 600, (1, 2, 3, 4)),
        TraceRequest(2.0, 1024, 600),
    ]
    trace = Trace("t", rows, 512)
    names = [one.block_names for one in trace.workload(trace.rate, 0)]
    assert [len(of_one) for of_one in names] == [4, 4, 3], "full ones of prompt and answer"
    assert names[0][:3] == names[1][:3]
    assert len({*names[0], *names[1], *names[2]}) == 3 + 1 + 1 + 3


def test_turns_of_a_session_wait_for_the_end_of_the_one_before():
    items = [
        TraceRequest(0.0, 100, 10, session=0),
        TraceRequest(5.0, 200, 10, session=0),
        TraceRequest(0.0, 9, 9),
    ]
    trace = Trace("t", items, 64, has_sessions=True, span_s=10.0)
    open_loop, closed = trace.workload(0.3, 0), trace.workload(0.3, 0, closed_loop=True)
    assert len(open_loop) == 3 and len(closed) == 2 and count_turns(closed) == 3
    assert sorted(request.index for request in all_turns(closed)) == [0, 1, 2]
    follower = next(request.next_turn for request in closed if request.next_turn)
    assert follower.think_s == pytest.approx(5.0 - 10 * 0.02)


def test_the_synthetic_trace_has_sessions_tenants_and_a_seed():
    trace, same, other = (
        load_trace("synthetic:300"),
        load_trace("synthetic:300"),
        load_trace("synthetic:300", seed=1),
    )
    assert trace.requests == same.requests != other.requests
    assert len({item.tenant for item in trace.requests}) > 3
    again = [
        item
        for item in trace.requests
        if set(item.prompt_blocks) & set(trace.requests[0].prompt_blocks)
    ]
    assert len(again) > 1


def test_poisson_lengths_lie_inside_what_was_asked():
    trace = load_trace("poisson:256-1024:64-128:50")
    assert len(trace.requests) == 50
    assert all(
        256 <= item.prompt_tokens <= 1024 and 64 <= item.output_tokens <= 128
        for item in trace.requests
    )


@pytest.mark.parametrize(
    "source",
    [
        "nothing.jsonl",
        "synthetic:x",
        "synthetic:1-2:3-4",
        "poisson:1-2",
        "poisson",
        "poisson:0-1:1-2",
        "poisson:1-2:0-1",
    ],
)
def test_a_wrong_source_is_said(source):
    with pytest.raises(SimulationError):
        load_trace(source)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0)])
def test_a_request_without_a_prompt_or_an_answer_is_said(lengths):
    requests = [TraceRequest(0.0, 1, 1), TraceRequest(1.0, *lengths)]
    with pytest.raises(SimulationError, match=r"trace t, request 1 by arrival: [05] tokens"):
        Trace("t", requests, 64)


def test_all_of_a_trace_has_its_last_request():
    trace = Trace("t", two_block_requests(), 512)
    assert trace.head(1.0) is trace
    assert len(trace.head(0.5).requests) == 10


def write_rows(path, *rows):
    lines = [json.dumps({"timestamp": 0, "output_length": 5, **row}) for row in rows]
    path.write_text("\n".join(lines))
    return str(path)


def test_block_ids_may_be_any_numbers_and_too_few(tmp_path):
    rows = [
        {"input_length": 2000, "hash_ids": [1]},
        {"input_length": 1024, "hash_ids": [-7, 2**127]},
        {"input_length": 1100, "hash_ids": [-7, 2**127, 5]},
    ]
    trace = load_trace(write_rows(tmp_path / "t.jsonl", *rows))
    load = trace.workload(3 * trace.rate, 0)
    assert [len(one.block_names) for one in trace.workload(trace.rate, 0)] == [3, 2, 2]
    names = {one.block_names[1] for one in load if one.prompt_tokens != 2000}
    assert len(load) == 9 and len(names) == 3, "one in each copy"


def test_arrivals_count_from_the_first_row(tmp_path):
    rows = [{"input_length": 9, "timestamp": 1.7e12 + 1000 * at} for at in range(3)]
    trace = load_trace(write_rows(tmp_path / "t.jsonl", *rows))
    assert [one.arrival_s for one in trace.requests] == [0.0, 1.0, 2.0]
    assert trace.rate == 1.5


def test_rows_with_and_without_a_session_are_one_sentence_in_either_order(tmp_path):
    rows = [{"input_length": 9}, {"input_length": 9, "session": 1}]
    for order in (rows, rows[::-1]):
        with pytest.raises(SimulationError, match="some rows have a session, and some have none"):
            load_trace(write_rows(tmp_path / "t.jsonl", *order))


def test_a_row_without_a_field_is_said(tmp_path):
    path = tmp_path / "t.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(json.dumps({"timestamp": 0}))
    with pytest.raises(SimulationError, match="input_length"):
        load_trace(str(path))


@pytest.mark.parametrize(
    ("name", "rate", "quantum"),
    [
        ("mooncake_conv_0_20min.jsonl.gz", 3.05, 3.0),
        ("azure2023_code_0_25min.jsonl.gz", 3.22, 0.0),
    ],
)
def test_public_traces_read_as_their_statistics_say(name, rate, quantum):
    trace = load_trace(trace_file(name))
    assert trace.rate == pytest.approx(rate, rel=0.01) and trace.quantum_s == quantum


def test_servegen_clients_become_tenants_with_a_system_prompt():
    trace = load_trace(trace_file("servegen_language_m-small.npz"))
    assert 3000 < len(trace.requests) < 5000
    assert len({item.tenant for item in trace.requests}) > 5


def test_a_servegen_day_repeats_no_more_than_the_system_prompts_of_its_clients(tmp_path):
    path = tmp_path / "two_clients.npz"
    lengths = [[640, 640], [640, 640]]
    np.savez(
        path,
        t=[0, 600],
        q=[0.0, 1.0],
        client=[3, 8],
        rate=[[0.0, 0.05], [0.05, 0.05]],  # of client 3, and of client 8, in two windows
        pat=np.zeros((2, 2)),
        p1=np.ones((2, 2)),
        p2=np.ones((2, 2)),
        ds_client=[3, 8],
        ds_ts=[0, 0],
        ds_in=lengths,
        ds_out=lengths,
    )
    requests = read_day(path, "day", 0, rate=0.1, part=1.0).requests
    first_window = {one.tenant for one in requests if one.arrival_s < 600}
    second_window = {one.tenant for one in requests if one.arrival_s >= 600}
    assert (first_window, second_window) == ({"client8"}, {"client3", "client8"})
    counts = Counter(block for one in requests for block in one.prompt_blocks)
    shared = {block for block, count in counts.items() if count > 1}
    by_tenant = {one.tenant: one.prompt_blocks[:2] for one in requests}
    assert shared == {block for blocks in by_tenant.values() for block in blocks}
    assert len(shared) == 4, "a quarter of ten blocks each"


@pytest.mark.parametrize(
    "content",
    [
        b"version https://git-lfs.github.com/spec/v1\n",
        b"PK\x03\x04 the rest did not come",
        b"",
    ],
)
def test_a_file_of_client_models_that_is_none_is_one_sentence(tmp_path, content):
    path = tmp_path / "t.npz"
    path.write_bytes(content)
    with pytest.raises(SimulationError, match=r"t\.npz: not a ServeGen file"):
        load_trace(str(path))


def test_client_models_that_are_damaged_are_one_sentence(tmp_path):
    path = tmp_path / "t.npz"
    np.savez(path, rate=np.zeros((10, 1000)), ds_in=np.zeros((10, 1000)))
    content = bytearray(path.read_bytes())
    content[5000:5100] = b"x" * 100
    path.write_bytes(content)
    with pytest.raises(SimulationError, match=r"t\.npz: not a ServeGen file"):
        load_trace(str(path))


def test_a_window_takes_its_lengths_from_the_six_hours_in_which_it_lies(tmp_path):
    path = tmp_path / "one_client.npz"
    windows = 72
    np.savez(
        path,
        t=np.arange(windows) * 600.0,
        q=[0.0, 1.0],
        client=[3],
        rate=np.full((1, windows), 0.05),
        pat=np.zeros((1, windows)),
        p1=np.ones((1, windows)),
        p2=np.ones((1, windows)),
        ds_client=[3, 3],
        ds_ts=[0, 6 * 3600],
        ds_in=[[100, 100], [900, 900]],
        ds_out=[[10, 10], [10, 10]],
    )
    requests = read_day(path, "day", 0, rate=0.05, part=1.0).requests
    first_half = {one.prompt_tokens for one in requests if one.arrival_s < 6 * 3600}
    second_half = {one.prompt_tokens for one in requests if one.arrival_s >= 6 * 3600}
    assert (first_half, second_half) == ({100}, {900})


ROW = '{"timestamp": 5, "input_length": 70, "output_length": 3}'


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([ROW, ROW[:-9]], "line 2: no valid JSON"),
        ([ROW, "", "[1, 2]"], "line 3: Expected `object`"),
        (['{"prompt": "hello", "response": "hi"}'], "line 1: .*`timestamp`; expected rows like"),
        (
            [ROW.replace("70", '"seventy"')],
            r"line 1: Expected `int`, got `str` - at `\$.input_length`",
        ),
        ([ROW.replace("70", "-70")], "line 1: .*>= 0"),
    ],
)
def test_a_row_that_is_wrong_is_one_sentence_with_its_line(tmp_path, lines, said):
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(SimulationError, match=said) as raised:
        load_trace(str(path))
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


def test_a_file_that_is_cut_short_is_one_sentence(tmp_path):
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(f"{ROW}\n".encode() * 999)[:-9])
    with pytest.raises(SimulationError, match="cannot be read"):
        load_trace(str(path))


def test_rows_without_block_ids_share_nothing_and_may_name_a_tenant(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(f'{ROW}\n{ROW[:-1]}, "tenant": "acme"}}\n')
    trace = load_trace(str(path))
    assert [(one.prompt_blocks, one.tenant) for one in trace.requests] == [((), ""), ((), "acme")]
    assert [one.tenant for one in trace.workload(trace.rate, 0)] == ["", "acme"]


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:46.6805900,374,44
"""


def test_azure_files_are_read_as_published(tmp_path):
    path = tmp_path / "AzureLLMInferenceTrace_conv.csv"
    path.write_bytes(AZURE.replace("\n", "\r\n").encode())
    packed = tmp_path / "packed.csv.gz"
    packed.write_bytes(gzip.compress(AZURE.encode()))
    for source in (path, packed):
        first, second = load_trace(str(source)).requests
        assert (first.prompt_tokens, first.output_tokens, first.arrival_s) == (374, 44, 0.0)
        assert second.arrival_s == pytest.approx(4.314579)
    # As of 2024 the moments have a time zone.
    path.write_text(AZURE.replace("690,", "69+00:00,").replace("900,", "90+00:00,"))
    assert load_trace(str(path)).requests[1].arrival_s == pytest.approx(4.314579)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\n", "no column TIMESTAMP: .* Azure's"),
        (AZURE + "yesterday,1,2\n", "line 4: expected TIMESTAMP,ContextTokens"),
        (AZURE + "2023-11-16 18:15:46.6,1\n", "line 4: expected"),
        (AZURE + "2023-11-16 18:15:46.6,1,-2\n", "line 4: expected"),
        (AZURE + "2023-11-16 18:15:46.6+00:00,1,2\n", "some timestamps have a time zone"),
    ],
)
def test_another_kind_of_csv_is_refused_in_one_sentence(tmp_path, text, said):
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(SimulationError, match=said):
        load_trace(str(path))
