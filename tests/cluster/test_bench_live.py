"""`diptych bench live`: its cells, its figures, and whole runs against servers that compute nothing."""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
import tracemalloc
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import gevent
import msgspec
import pytest
from diptych.cluster.bench.live import client, compare
from diptych.cluster.bench.live.cells import (
    Forecast,
    LiveOptions,
    LiveTable,
    cell_setup,
    table_cells,
)
from diptych.cluster.bench.live.choose import pick_layouts
from diptych.cluster.bench.live.compare import (
    LayoutRuns,
    _chat_rows,
    compare_completion,
    compare_goodput,
    differing_requests,
    geometric_mean,
    run_figures,
    table_document,
)
from diptych.cluster.bench.live.errors import LiveBenchError
from diptych.cluster.bench.live.layouts import (
    DiptychServing,
    Layout,
    VllmServing,
    diptych_arguments,
    parse_diptych_layout,
    parse_vllm_layouts,
    vllm_commands,
)
from diptych.cluster.bench.live.loads import (
    ChatLoad,
    LengthRange,
    Load,
    PoissonLoad,
    chat_sessions,
    digest,
    poisson_arrivals,
    warm_up_requests,
)
from diptych.cluster.bench.live.page import markdown
from diptych.cluster.bench.live.results import (
    CellResult,
    ClientReport,
    ItlJudge,
    LiveSlo,
    MeasuredAnswer,
)
from diptych.cluster.bench.live.run import LiveRun, machine_facts, run, servers_of
from diptych.cluster.bench.live.servers import RunningServer
from diptych.cluster.bench.live.simulated import simulation_row
from diptych.loadtests.endpoint import EndpointFacts
from diptych.loadtests.outcomes import LoadOutcome
from diptych.loadtests.prompts import Words

from tests.simulator.support import COST
from tests.simulator.test_recorded import log_of
from tests.support.fake_vllm import calls, write_fake_python
from tests.support.variants import daily

BIN = Path(sys.executable).parent
SLO = LiveSlo.parse("2s:50ms")
FEW = LengthRange(20, 40)
SHORT = LengthRange(4, 8)
WORDS = Words(("of", "to"), 3)
PAGE = {"table": "slo", "rows": [], "missing": [], "differing_requests": [], "ordinary_clients": []}


def make_options(folder: Path, *against: str, **changes: Any) -> LiveOptions:
    options = LiveOptions(
        table=LiveTable.SLO,
        model=folder,
        cores=tuple(sorted(os.sched_getaffinity(0))),
        layouts=tuple(parse_vllm_layouts(list(against))),
        slos=(SLO, LiveSlo.parse("4s:200ms")),
        seeds=(1,),
        rates=(20.0,),
        requests=5,
        prompt=FEW,
        output=SHORT,
        seconds=1.0,
        sessions=3,
        turns=3,
        warm_up=2,
    )
    return replace(options, **changes)


def live_run(options: LiveOptions, folder: Path, python: Path) -> dict[str, Any]:
    lines: list[str] = []
    document = run(
        LiveRun(options, folder / "out", servers_of(options, "no diptych", python)), lines.append
    )
    document["lines"] = lines
    return document


# ---- loads ---------------------------------------------------------------------------------------


def poisson(seed: int = 1, rate: float = 1.0) -> PoissonLoad:
    return PoissonLoad(rate=rate, requests=200, prompt=FEW, output=SHORT, seed=seed)


def test_a_seed_decides_every_request_and_the_warm_up_has_others() -> None:
    arrivals = poisson_arrivals(poisson())
    assert arrivals == poisson_arrivals(poisson())
    assert digest(poisson(), WORDS) == digest(poisson(), WORDS) != digest(poisson(2), WORDS)
    assert 150 < arrivals[-1].arrival_s < 250
    assert {FEW.low, FEW.high} <= {arrival.prompt_tokens for arrival in arrivals}
    other_words = Words(WORDS.alphabet, WORDS.template, seed=2)
    warm_up = {other_words.text(arrival) for arrival in warm_up_requests(poisson(), 4)}
    assert not warm_up & {WORDS.text(arrival) for arrival in arrivals}


def test_a_digest_sees_other_words() -> None:
    chats = ChatLoad(
        sessions=2, turns=2, prompt=FEW, message=FEW, output=SHORT, think_s=0.0, seed=1
    )
    other_words = Words(("of", "and"), 3)
    for load in (poisson(), chats):
        assert digest(load, WORDS) != digest(load, other_words)


# ---- layouts and cells ---------------------------------------------------------------------------


def test_layouts_share_the_cores_and_get_equal_limits(tmp_path: Path) -> None:
    serving = DiptychServing(
        model=tmp_path, cores=(0, 1, 2, 3), max_model_len=99, ttft="2s", itl_s=0.05
    )
    split = diptych_arguments(parse_diptych_layout("1P1D"), serving, tmp_path)
    mixed = diptych_arguments(parse_diptych_layout("1M"), serving, tmp_path)
    assert "pools.decode.engine.threads=2" in split and "router.disaggregate=auto" in split
    assert "pools.decode.engine.threads=4" in mixed and "router.disaggregate=never" in mixed
    assert mixed[mixed.index("--prefill") + 1] == "0" and mixed[mixed.index("--decode") + 1] == "1"
    assert "slo.itl_ms=50" in split and "pools.prefill.engine.kv_mib=2048" in split

    peer = VllmServing(
        python=tmp_path, model=tmp_path, cores=(0, 1, 2, 3), max_model_len=99, prefix_cache=False
    )
    one, chunk_2048, two, pair = parse_vllm_layouts(["vllm"])
    commands = vllm_commands(one, peer, [1, 2], tmp_path)
    assert commands.proxy is None and commands.port == 1
    assert "256" in commands.servers[0].command
    assert "2048" in vllm_commands(chunk_2048, peer, [1, 2], tmp_path).servers[0].command
    commands = vllm_commands(two, peer, [1, 2, 3], tmp_path)
    assert [server.command[2] for server in commands.servers] == ["0,1", "2,3"]
    assert commands.port == 3
    commands = vllm_commands(pair, peer, [1, 2, 3], tmp_path)
    assert commands.proxy and "--prefill=http://127.0.0.1:1" in commands.proxy.command
    sides = {server.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] for server in commands.servers}
    assert len(sides) == 2


@pytest.mark.parametrize("name", ["vllm-chunk0", "vllm-1x", "sglang", ""])
def test_an_unknown_peer_is_refused_by_name(name: str) -> None:
    with pytest.raises(LiveBenchError, match="--against"):
        parse_vllm_layouts([name])


@pytest.mark.parametrize("name", ["1P", "2D", "best"])
def test_a_layout_that_cannot_serve_is_refused_by_name(name: str) -> None:
    with pytest.raises(LiveBenchError, match="--layouts"):
        parse_diptych_layout(name)


def test_too_few_cores_are_refused(tmp_path: Path) -> None:
    serving = DiptychServing(model=tmp_path, cores=(0,), max_model_len=9, ttft="1s", itl_s=1.0)
    with pytest.raises(LiveBenchError, match="1P1D needs 2 cores"):
        diptych_arguments(parse_diptych_layout("1P1D"), serving, tmp_path)


def test_layouts_alternate_within_a_rate_and_a_seed(tmp_path: Path) -> None:
    options = make_options(tmp_path, "vllm-2x", "vllm-pd", rates=(0.5, 1.0), seeds=(1, 2))
    keys = [cell.key for cell in table_cells(options)]
    assert keys[:3] == ["slo-vllm-2x-0.5-seed1", "slo-vllm-pd-0.5-seed1", "slo-vllm-2x-1-seed1"]
    assert len(keys) == len(set(keys)) == 8
    assert Forecast().seconds(table_cells(options)) > 8 * 90


def test_a_forecast_repeats_what_a_cell_took(tmp_path: Path) -> None:
    (cell,) = table_cells(make_options(tmp_path, "vllm-2x"))
    assert isinstance(cell.load, PoissonLoad)
    forecast = Forecast()
    result = CellResult(
        key=cell.key,
        layout=cell.layout.name,
        setup={},
        started_s=20.0,
        wall_s=90.0,  # with the warm-up
        report=ClientReport(digest="d", span_s=60.0, cpu_s=0.0, answers=[]),
    )
    forecast.learn(cell, cell.load, result)
    assert forecast.seconds([cell]) == pytest.approx(90.0)


def test_plan_picks_a_layout_for_every_rate_and_target(tmp_path: Path) -> None:
    workers = [
        {"threads": threads, "kv_tokens": 9000, "cost": msgspec.to_builtins(COST)}
        for threads in (1, 2)
    ]
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({"model": "m", "cores": 2, "workers": workers}))
    options = make_options(tmp_path, rates=(0.1, 0.5))
    lines: list[str] = []
    picks = pick_layouts([path], options, lines.append)
    assert set(picks) == {f"{rate} {slo}" for rate in (0.1, 0.5) for slo in options.slos}
    assert all(parse_diptych_layout(name).replicas <= 2 for name in picks.values())
    assert len(lines) == 4
    path.write_text("{}")
    with pytest.raises(LiveBenchError, match="plan cannot learn"):
        pick_layouts([path], options, lines.append)


def test_a_run_is_simulated_on_workers_as_fast_as_its_log_says(tmp_path: Path) -> None:
    lines, met = log_of("1P1D", 1.3, "always")
    (tmp_path / "router.jsonl").write_bytes(b"".join(lines))
    row = simulation_row("slo-1P1D-1.3-seed1", tmp_path)
    assert row["live"]["value"] == pytest.approx(met, abs=0.02)
    low, high = row["live"]["interval"]
    assert low < row["live"]["value"] < high and row["agrees"]
    assert row["simulated"] == pytest.approx(met, abs=0.05)

    empty = simulation_row("slo-1P1D-0.1-seed1", tmp_path / "nothing")
    page = markdown({**PAGE, "simulated": [row, empty]})
    assert f"| slo-1P1D-1.3-seed1 | {row['live']['value']:.3f} (" in page
    assert "| slo-1P1D-0.1-seed1 | cannot be simulated: " in page


# ---- figures -------------------------------------------------------------------------------------


def answer(ttft_s: float = 1.0, gaps_ms: tuple[float, ...] = (40.0,) * 9, **fields: Any) -> Any:
    return MeasuredAnswer(
        sent_s=0.0,
        prompt_tokens=10,
        output_tokens=len(gaps_ms) + 1,
        ttft_s=ttft_s,
        gaps_ms=list(gaps_ms),
        **fields,
    )


def layout_runs(name: str, answers: list[MeasuredAnswer], **fields: Any) -> LayoutRuns:
    report = ClientReport(digest=fields.pop("digest", "d"), span_s=10.0, cpu_s=0.0, answers=answers)
    cell = CellResult(f"{name}-seed1", name, {}, started_s=0.0, wall_s=0.0, report=report)
    return LayoutRuns(name, not name.startswith("vllm"), "1", (cell,))


def test_a_request_is_judged_by_its_mean_gap_and_by_its_own_p99() -> None:
    spiky = answer(gaps_ms=(10.0,) * 8 + (200.0,))
    assert spiky.met(SLO, ItlJudge.TPOT) and not spiky.met(SLO, ItlJudge.GAP_P99)
    steady = answer()
    assert steady.met(SLO, ItlJudge.TPOT) and steady.met(SLO, ItlJudge.GAP_P99)
    for missed in (answer(ttft_s=2.1), answer(error="timeout"), answer(gaps_ms=(51.0,) * 9)):
        assert not missed.met(SLO, ItlJudge.TPOT) and not missed.met(SLO, ItlJudge.GAP_P99)


def test_goodput_has_an_interval_that_holds_the_figure() -> None:
    runs = layout_runs("1M", [answer()] * 30 + [answer(ttft_s=3.0)] * 8 + [answer(error="503")] * 2)
    figures = run_figures(runs, [SLO])
    goodput = figures["goodput"][str(SLO)]["tpot"]
    low, high = goodput.interval
    assert goodput.value == 3.0 and 2.4 < low < 3.0 < high < 3.6
    assert figures["failed"] == 2 and figures["errors"] == {"503": 2}
    assert figures["done_per_s"].value == 3.8
    assert figures["ttft_s"]["p50"].value == 1.0


def test_failed_requests_rank_behind_all_served_ones() -> None:
    """A server that refuses what would be slow must not have the faster p99."""
    honest = layout_runs("vllm-pd", [answer()] * 95 + [answer(ttft_s=3.0)] * 5)
    refusing = layout_runs("1M", [answer()] * 95 + [answer(error="503")] * 5)
    figures = run_figures(refusing, [SLO])
    assert figures["ttft_s"]["p50"].value == 1.0 and figures["ttft_s"]["p99"].value is None
    assert run_figures(honest, [SLO])["ttft_s"]["p99"].value == 3.0
    assert "| 1.00 / failed |" in markdown({**PAGE, "rows": [msgspec.to_builtins(figures)]})
    assert compare_completion(refusing, [honest])["ttft_p99_ratio"] is None
    assert compare_completion(honest, [honest])["ttft_p99_ratio"] == 1.0
    nobody = run_figures(layout_runs("1M", [answer(error="503")]), [SLO])
    assert nobody["ttft_s"]["p50"].value is None


def test_later_turns_that_failed_are_counted_and_rank_last() -> None:
    runs = [
        layout_runs("1M", [answer(), answer(turn=1), *[answer(error="503", turn=1)] * 9]),
        layout_runs("vllm-pd", [answer(turn=1)] * 9 + [answer(ttft_s=2.0, turn=2)]),
    ]
    ours, peer = _chat_rows(runs)
    assert (ours["turns"], ours["failed"], ours["ttft_p50_s"]) == (10, 9, None)
    assert (peer["turns"], peer["failed"], peer["ttft_p99_s"]) == (10, 0, 2.0)
    assert ours["ttft_p99_ratio"] is None
    document = {**PAGE, "chats": [ours, peer]}
    assert "| 1M | 10 | 9 | failed | failed | - | - |" in markdown(document)
    nothing = _chat_rows([layout_runs("1M", [answer()])])
    assert "| 1M | 0 | 0 | - | - | - | - |" in markdown({**PAGE, "chats": nothing})


def test_chats_are_compared_with_peers_of_the_same_seeds() -> None:
    def of_seeds(name: str, ttft_s: float, *seeds: int) -> LayoutRuns:
        runs = layout_runs(name, [answer(ttft_s=ttft_s, turn=1)])
        (result,) = runs.results
        results = (msgspec.structs.replace(result, key=f"{name}-seed{seed}") for seed in seeds)
        return replace(runs, results=tuple(results))

    ours = of_seeds("1M", 1.0, 1, 2)
    partial = of_seeds("vllm-2x", 0.1, 1)  # its cell of seed 2 failed
    row, *_ = _chat_rows([ours, partial, of_seeds("vllm-pd", 2.0, 1, 2)])
    assert row["ttft_p50_ratio"] == 0.5
    row, *_ = _chat_rows([ours, partial])
    assert "ttft_p50_ratio" not in row


def test_ratios_pair_requests_and_name_the_best_peer() -> None:
    good, bad = answer(), answer(ttft_s=9.0)
    ours = layout_runs("1P1D", [good] * 30 + [bad] * 10)
    worse = layout_runs("vllm-2x", [good] * 5 + [bad] * 35)
    best = layout_runs("vllm-pd", [good] * 15 + [bad] * 25)
    row = compare_goodput(ours, [worse, best], SLO, ItlJudge.TPOT)
    low, high = row["interval"]
    assert row["peer"] == "vllm-pd" and row["ratio"] == 2.0 and 1.2 < low < 2.0 < high < 4.0
    equal = compare_goodput(ours, [layout_runs("vllm-pd", ours.answers)], SLO, ItlJudge.TPOT)
    assert equal["interval"] == [1.0, 1.0], "equal requests, equal draws"
    assert geometric_mean([row, equal]) == pytest.approx((30.5 / 15.5) ** 0.5, abs=1e-3)


def test_a_peer_that_meets_nothing_gives_no_ratio_and_an_open_interval() -> None:
    none = layout_runs("vllm-pd", [answer(ttft_s=9.0)] * 10)
    ours = layout_runs("1M", [answer()] * 10)
    row = compare_goodput(ours, [none], SLO, ItlJudge.TPOT)
    assert row["ratio"] is None and row["interval"] == [None, None] and row["served_by_anybody"]
    assert row["smoothed_ratio"] == 21.0
    nobody = compare_goodput(none, [none], SLO, ItlJudge.TPOT)
    assert not nobody["served_by_anybody"] and geometric_mean([nobody]) is None


def test_other_requests_are_found() -> None:
    runs = [layout_runs("1M", [answer()]), layout_runs("vllm-pd", [answer()], digest="other")]
    assert differing_requests(runs) == ["vllm-pd-seed1"]


def test_overloads_of_two_layouts_are_no_other_requests(tmp_path: Path) -> None:
    """Each is a multiple of what its own layout can serve, so they never are the same."""
    options = make_options(
        tmp_path, "vllm-chunk256", "vllm-2x", table=LiveTable.OVERLOAD, cores=(0, 1)
    )
    cells = table_cells(options)
    digests = {cell.key: "closed" if cell.label == "capacity" else cell.key for cell in cells}

    def differing(digests: dict[str, str]) -> list[str]:
        reports = {
            key: ClientReport(digest, span_s=1.0, cpu_s=0.0, answers=[answer(error="503")])
            for key, digest in digests.items()
        }
        results = {
            key: CellResult(key, "", {}, started_s=0.0, wall_s=0.0, report=report)
            for key, report in reports.items()
        }
        document: list[str] = table_document(options, cells, results, {})["differing_requests"]
        return document

    assert differing(digests) == []
    capacity = "overload-vllm-2x-capacity-seed1"
    assert differing(digests | {capacity: "other"}) == [capacity]


def test_many_requests_are_drawn_a_part_at_a_time() -> None:
    """An overload of 170,000 requests took gigabytes at once."""
    runs = layout_runs("1M", [answer(error="503")] * 20_000)
    tracemalloc.start()
    try:
        figures = run_figures(runs, [SLO])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert figures["done_per_s"].interval == (0.0, 0.0)
    assert peak_bytes < 250e6


def test_parts_of_draws_are_as_good_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = layout_runs("1M", [answer()] * 30 + [answer(ttft_s=3.0)] * 10)
    at_once = run_figures(runs, [SLO])
    monkeypatch.setattr(compare, "BLOCK_INDICES", 100)  # two draws
    assert run_figures(runs, [SLO]) == at_once, "requests of one seed are drawn row by row"


# ---- the client ----------------------------------------------------------------------------------


class FakeHttp:
    """A server that answers in `ANSWER_S` while `serves` says so, and refuses everything else."""

    ANSWER_S = 0.02
    requests = 0

    def __init__(self, facts: EndpointFacts) -> None:
        type(self).requests = 0

    @classmethod
    def serves(cls, request: int) -> bool:
        return True

    def chat(self, outcome: LoadOutcome, messages: list[dict[str, str]], tokens: int) -> str:
        type(self).requests += 1
        if not self.serves(self.requests):
            outcome.error = "503"
            return ""
        gevent.sleep(self.ANSWER_S)
        outcome.ttft_s = outcome.e2e_s = self.ANSWER_S
        outcome.output_tokens = tokens
        return "text"


def offered(
    monkeypatch: pytest.MonkeyPatch, load: Load, server: type[FakeHttp], limit_s: float = 5.0
) -> ClientReport:
    """The report of a client whose server is `server`, in this process."""
    monkeypatch.setattr(client, "HttpLoadClient", server)
    facts = EndpointFacts(
        url="",
        model="m",
        context=99,
        alphabet=("of", "to"),
        template=3,
        ignore_eos=True,
        usage=True,
    )
    return client.offer(facts, client.ClientTask("", load, limit_s=limit_s))


def arrivals_load(rate: float, requests: int) -> PoissonLoad:
    return PoissonLoad(rate=rate, requests=requests, prompt=FEW, output=SHORT, seed=1)


def test_a_server_that_dies_early_does_not_score_like_one_that_serves_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its refusals take no time; the seconds in which they came count nevertheless."""

    class Dying(FakeHttp):
        @classmethod
        def serves(cls, request: int) -> bool:
            return request <= 5

    load = arrivals_load(rate=200.0, requests=40)
    last_arrival_s = poisson_arrivals(load)[-1].arrival_s
    report = offered(monkeypatch, load, Dying)
    assert [answer.error for answer in report.answers].count("503") == 35
    assert report.span_s >= last_arrival_s


def test_a_request_that_waits_for_room_in_the_client_counts_from_its_arrival(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "CONCURRENT_LIMIT", 1)
    load = arrivals_load(rate=1000.0, requests=5)
    report = offered(monkeypatch, load, FakeHttp)
    arrivals_s = [arrival.arrival_s for arrival in poisson_arrivals(load)]
    # The first one finds room; each of the others waits for all before it.
    assert {answer.sent_s for answer in report.answers} >= set(arrivals_s[1:])
    last = max(report.answers, key=lambda answer: answer.ttft_s)
    assert last.ttft_s >= 5 * FakeHttp.ANSWER_S - (arrivals_s[-1] - arrivals_s[0])
    assert last.e2e_s == last.ttft_s


def test_what_was_not_sent_until_the_limit_is_unfinished(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(FakeHttp):
        ANSWER_S = 60.0

    monkeypatch.setattr(client, "CONCURRENT_LIMIT", 2)
    report = offered(monkeypatch, arrivals_load(rate=1000.0, requests=9), Hanging, limit_s=0.05)
    assert [answer.error for answer in report.answers] == [client.UNFINISHED] * 9
    assert report.span_s >= 0.05


def test_turns_behind_one_that_failed_count_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(FakeHttp):
        @classmethod
        def serves(cls, request: int) -> bool:
            return request == 1

    load = ChatLoad(sessions=1, turns=4, prompt=FEW, message=FEW, output=SHORT, think_s=0.0, seed=9)
    monkeypatch.setattr(
        client, "chat_sessions", lambda load: [replace(chat_sessions(load)[0], start_s=0.0)]
    )
    report = offered(monkeypatch, load, Refusing)
    errors = sorted((answer.turn, answer.error) for answer in report.answers)
    assert errors == [(0, ""), (1, "503"), (2, client.NOT_SENT), (3, client.NOT_SENT)]


@pytest.mark.parametrize("hard_limit", [4096, 1 << 20])
@pytest.mark.parametrize("program", ["client", "proxy"])
def test_client_and_proxy_open_as_many_files_as_they_may(
    monkeypatch: pytest.MonkeyPatch, program: str, hard_limit: int
) -> None:
    """The usual 1,024 are fewer than the connections of an overload."""
    limits = [1024, hard_limit]

    def set_limit(_: int, new_limits: tuple[int, int]) -> None:
        limits[:] = new_limits

    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    if program == "proxy":
        proxy = pytest.importorskip("diptych.cluster.bench.live.proxy")
        monkeypatch.setattr(proxy.web, "run_app", lambda *_, **__: None)
        monkeypatch.setattr(sys, "argv", ["proxy", "--port", "1", "--backend", "http://x"])
        proxy.main()
    else:
        task = client.ClientTask("http://127.0.0.1:9", arrivals_load(rate=1.0, requests=1))
        stdin = io.TextIOWrapper(io.BytesIO(msgspec.json.encode(task)))
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(SystemExit):  # no endpoint is there
            client.main()
        assert client.concurrent_limit() == min(8192, hard_limit - client.OTHER_FILES)
    assert limits == [hard_limit, hard_limit]


def test_what_has_no_file_left_waits_in_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    files = client.OTHER_FILES + 1
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    load = arrivals_load(rate=1000.0, requests=3)
    report = offered(monkeypatch, load, FakeHttp)
    arrivals_s = [arrival.arrival_s for arrival in poisson_arrivals(load)]
    assert {answer.sent_s for answer in report.answers} >= set(arrivals_s[1:])


# ---- results that are there ----------------------------------------------------------------------

FACTS = {
    "machine": "a Xeon",
    "commit": "abc",
    "versions": "diptych 1",
    "model": "205M, config.json 12ab",
    "vLLM": "0.32.0, torch 2.13.0",
    "tokens": "1-2 in, 3-4 out",
}


def write_cells(options: LiveOptions, folder: Path, facts: dict[str, str] = FACTS) -> list[Path]:
    """Write a file for each cell, as a run with these facts would have; return the files."""
    results: dict[str, CellResult] = {}
    (folder / "cells").mkdir()
    for cell in table_cells(options):
        load = cell.resolved_load(results)
        report = ClientReport(digest="d", span_s=10.0, cpu_s=0.0, answers=[answer()] * 20)
        results[cell.key] = CellResult(
            key=cell.key,
            layout=cell.layout.name,
            setup=cell_setup(options, cell, load),
            started_s=0.0,
            wall_s=0.0,
            report=report,
            server={"facts": facts},
        )
    paths = {key: folder / "cells" / f"{key}.json" for key in results}
    for key, path in paths.items():
        path.write_bytes(msgspec.json.encode(results[key]))
    return list(paths.values())


def run_with_files(options: LiveOptions, folder: Path, facts: dict[str, str]) -> dict[str, Any]:
    """The document of a run that must not start a server."""

    def start(layout: Layout, logs: Path) -> AbstractContextManager[RunningServer]:
        raise AssertionError(f"{layout.name} was started")

    return run(LiveRun(options, folder, start, facts=facts), lambda line: None)


@pytest.mark.parametrize("name", ["machine", "commit", "versions", "model", "vLLM"])
def test_a_cell_of_another_run_is_refused(tmp_path: Path, name: str) -> None:
    options = make_options(tmp_path, "vllm-2x")
    (path,) = write_cells(options, tmp_path)
    assert len(run_with_files(options, tmp_path, FACTS | {"tokens": "other"})["rows"]) == 1
    with pytest.raises(LiveBenchError, match=f"{path}.*{name} was .*, and is other.*remove it"):
        run_with_files(options, tmp_path, FACTS | {name: "other"})


def test_a_cell_of_ours_does_not_depend_on_vllm(tmp_path: Path) -> None:
    options = make_options(tmp_path, layouts=(parse_diptych_layout("1M"),))
    write_cells(options, tmp_path)
    without_vllm = {name: fact for name, fact in FACTS.items() if name != "vLLM"}
    assert len(run_with_files(options, tmp_path, without_vllm)["rows"]) == 1


def test_overloads_of_another_capacity_are_refused(tmp_path: Path) -> None:
    options = make_options(tmp_path, "vllm-2x", table=LiveTable.OVERLOAD)
    capacity, single, *_ = write_cells(options, tmp_path)
    assert len(run_with_files(options, tmp_path, FACTS)["rows"]) == 4
    written = capacity.read_text()
    capacity.write_text(written.replace('"span_s":10.0', '"span_s":11.0'))
    with pytest.raises(LiveBenchError, match=f"{single} was measured with another set-up"):
        run_with_files(options, tmp_path, FACTS)
    capacity.unlink()
    with pytest.raises(LiveBenchError, match=f"remove {single} too"):
        run_with_files(options, tmp_path, FACTS)


def test_an_overload_tells_how_many_that_were_to_be_in_time_were(tmp_path: Path) -> None:
    options = make_options(
        tmp_path, layouts=(parse_diptych_layout("1M"),), table=LiveTable.OVERLOAD
    )
    for path in write_cells(options, tmp_path):
        cell = json.loads(path.read_text())
        cell["server"]["statistics"] = {"urgent": {"admitted": 10, "moved": 2, "in_time": 6}}
        path.write_text(json.dumps(cell))
    document = run_with_files(options, tmp_path, FACTS)
    names = ("urgent", "urgent_kept", "urgent_in_time")
    figures = {tuple(row[name] for name in names) for row in document["overload"]}
    assert figures == {(10, 0.8, 0.75)}
    assert "| 10 | 80.0% | 75.0% |" in (tmp_path / "overload.md").read_text()


def test_two_models_of_one_name_and_the_tokens_of_chats_are_told_apart(tmp_path: Path) -> None:
    models: list[str] = []
    for number in range(2):
        model = tmp_path / str(number) / "llama"
        model.mkdir(parents=True)
        (model / "config.json").write_text(f'{{"hidden_size": {number}}}')
        facts = machine_facts(make_options(model, table=LiveTable.CHATS), None)
        models.append(facts["model"])
        assert facts["tokens"] == "4-8 out", "chats have messages of fixed lengths"
    assert models[0] != models[1] and all(model.startswith("llama, ") for model in models)


# ---- whole runs ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_servers_get_the_same_requests_and_a_second_call_runs_none(tmp_path: Path) -> None:
    python = write_fake_python(tmp_path)
    options = make_options(tmp_path, "vllm")
    if len(options.cores) < 2:
        pytest.skip("two servers need two cores")
    document = live_run(options, tmp_path, python)
    assert not document["missing"] and not document["differing_requests"]
    rows = {row["layout"]: row for row in document["rows"]}
    assert set(rows) == {"vllm-chunk256", "vllm-chunk2048", "vllm-2x", "vllm-pd"}
    assert all(row["failed"] == 0 and row["requests"] == 5 for row in rows.values())
    assert "| vllm-2x | 20 | 5 | 0 |" in (tmp_path / "out" / "slo.md").read_text()

    before = len(calls(tmp_path))
    again = live_run(options, tmp_path, python)
    assert again["rows"] == document["rows"] and again["lines"] == []
    assert len(calls(tmp_path)) == before, "no server was started"

    changed = replace(options, requests=6)
    with pytest.raises(LiveBenchError, match="another set-up"):
        live_run(changed, tmp_path, python)


def test_round_robin_takes_turns_and_pd_prefills_first(tmp_path: Path) -> None:
    python = write_fake_python(tmp_path)
    options = make_options(tmp_path, "vllm-2x", "vllm-pd")
    if len(options.cores) < 2:
        pytest.skip("two servers need two cores")
    live_run(options, tmp_path, python)
    by_port: dict[int, list[dict[str, Any]]] = {}
    for call in calls(tmp_path):
        by_port.setdefault(call["port"], []).append(call["body"])
    assert len(by_port) == 4
    first, second, prefill, decode = by_port.values()
    assert abs(len(first) - len(second)) <= 1
    prefilled = [body for body in prefill if body["kv_transfer_params"]["do_remote_decode"]]
    assert len(prefilled) == len(prefill) == len(decode)
    assert {body["max_tokens"] for body in prefill} == {1}
    assert all("from" in body["kv_transfer_params"] for body in decode)


@pytest.mark.slow
def test_chats_grow_and_their_later_turns_are_counted(tmp_path: Path) -> None:
    options = make_options(tmp_path, "vllm-chunk256", table=LiveTable.CHATS)
    document = live_run(options, tmp_path, write_fake_python(tmp_path))
    (row,) = document["chats"]
    assert row["turns"] == options.sessions * (options.turns - 1) and row["ttft_p99_s"] > 0
    streamed = [call["body"]["messages"] for call in calls(tmp_path) if call["body"].get("stream")]
    longest = max(streamed, key=len)
    assert [message["role"] for message in longest] == ["user", "assistant"] * 2 + ["user"]
    assert longest[:3] in streamed, "a turn begins with all that was said before"


@pytest.mark.slow
def test_an_overload_is_offered_in_multiples_of_the_measured_capacity(tmp_path: Path) -> None:
    options = make_options(tmp_path, "vllm-chunk256", table=LiveTable.OVERLOAD)
    document = live_run(options, tmp_path, write_fake_python(tmp_path, token_ms=20))
    offered = {row["load"]: row["offered"] for row in document["overload"]}
    capacity = next(row for row in document["rows"] if row["load"] == "capacity")
    rate = capacity["done_per_s"]["value"]
    assert rate > 5 and offered["1x"] == pytest.approx(rate, abs=1)
    assert offered["5x"] == pytest.approx(5 * rate, abs=1)
    assert next(row for row in document["overload"] if row["load"] == "1x")["tokens_of_1x"] == 1.0


def test_a_server_that_does_not_start_is_named_and_tried_again(tmp_path: Path) -> None:
    options = make_options(tmp_path, "vllm-chunk256")
    document = live_run(options, tmp_path, write_fake_python(tmp_path, broken=True))
    assert document["missing"] == ["slo-vllm-chunk256-20-seed1"] and not document["rows"]
    assert any("ended with code 3: no such kernel" in line for line in document["lines"])
    document = live_run(options, tmp_path, write_fake_python(tmp_path))
    assert not document["missing"] and len(document["rows"]) == 1


@pytest.mark.parametrize("may_go_first", [True, False])
def test_clients_that_may_not_go_before_servers_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_go_first: bool
) -> None:
    asked = []

    def set_scheduler(pid: int, policy: int, priority: object) -> None:
        asked.append((pid, policy))
        if not may_go_first:
            raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", set_scheduler)
    options = make_options(tmp_path, "vllm-chunk256")
    document = live_run(options, tmp_path, write_fake_python(tmp_path))
    ((pid, policy),) = asked
    assert pid not in (0, os.getpid()) and policy == os.SCHED_RR, "only the client goes first"
    key = "slo-vllm-chunk256-20-seed1"
    assert document["ordinary_clients"] == ([] if may_go_first else [key])
    told = f"Clients had no priority over the servers and may have sent late: {key}."
    assert (told in (tmp_path / "out" / "slo.md").read_text()) == (not may_go_first)


def processes_of(folder: Path) -> list[str]:
    """Command lines of running processes that name the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_text().replace("\0", " ")
        except OSError:
            continue
        if str(folder) in text and str(os.getpid()) != path.parent.name:
            found.append(text)
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, *daily([signal.SIGTERM])])
def test_an_interrupt_ends_every_server(tmp_path: Path, number: signal.Signals) -> None:
    python = write_fake_python(tmp_path / "fake", token_ms=500)
    model = tmp_path / "model"
    model.mkdir()
    command = [str(BIN / "diptych"), "bench", "live", "--model", str(model), "--layouts", ""]
    command += ["--against", "vllm-chunk256", "--vllm-python", str(python), "--out"]
    with subprocess.Popen(
        [*command, str(tmp_path / "out")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as bench:
        deadline = time.monotonic() + 100
        while not calls(tmp_path / "fake"):
            assert bench.poll() is None and time.monotonic() < deadline, bench.communicate()
            time.sleep(0.1)
        assert any("fake_vllm" in line for line in processes_of(tmp_path / "fake"))
        bench.send_signal(number)
        _, errors = bench.communicate(timeout=60)
    assert bench.returncode == 130 and "interrupted" in errors, errors
    assert processes_of(tmp_path / "fake") == []


def test_the_command_refuses_what_it_cannot_run(tmp_path: Path) -> None:
    from diptych.cluster.cli import app
    from typer.testing import CliRunner

    model = ["--model", str(tmp_path), "--out", str(tmp_path / "out")]
    for arguments, reason in (
        (["--against", "vllm"], "--vllm-python"),
        (["--table", "fast"], "--table fast"),
        (["--rates", "0"], "--rates 0"),
        (["--seeds", "1.5"], "--seeds 1.5: expected whole numbers"),
        (["--seeds", "1,0"], "--seeds 1,0"),
        (["--seeds", ","], "--seeds ,"),
        (["--slo", "2s"], "--slo 2s"),
        (["--layouts", "3X"], "--layouts 3X"),
        (["--prompt-tokens", "9-3"], "--prompt-tokens 9-3"),
        (["--model", "nowhere"], "--model nowhere"),
    ):
        done = CliRunner().invoke(app, ["bench", "live", *model, *arguments])
        assert done.exit_code == 2 and reason in done.output, (arguments, done.output)


@pytest.mark.cluster
@pytest.mark.slow
def test_a_real_cluster_serves_a_cell(tmp_path: Path) -> None:
    command = [str(BIN / "diptych"), "bench", "live", "--model", "demo", "--layouts", "1M"]
    command += ["--rates", "2", "--seeds", "1", "--requests", "4", "--prompt-tokens", "32-64"]
    command += ["--output-tokens", "4-8", "--max-model-len", "512", "-o", "json"]
    command += ["--set", "pools.decode.engine.kv_mib=64", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    (row,) = document["rows"]
    assert (row["layout"], row["requests"], row["failed"]) == ("1M", 4, 0)
    (path,) = (tmp_path / "cells").iterdir()
    statistics = json.loads(path.read_text())["server"]["statistics"]
    assert statistics["requests"]["finished"] >= 4 and statistics["goodput"]["requests"] >= 4
