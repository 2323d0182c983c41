"""`diptych bench gateway`: the source's frames, the client's counts, what is printed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from diptych.cluster.bench.gateway import cluster, measure, prompts, run, stages
from diptych.cluster.bench.gateway.child import _crowd_row, server_pids
from diptych.cluster.bench.gateway.cluster import (
    BenchError,
    MeasuredCluster,
    countable_token_ids,
)
from diptych.cluster.bench.gateway.measure import (
    ClientLoad,
    GatewayMeasurement,
    build,
    request,
    row,
)
from diptych.cluster.bench.gateway.source import TokenSource
from diptych.cluster.bench.gateway.usage import thread_cpu_s_of
from diptych.cluster.bench.gateway.whole_requests import (
    MeasuredServer,
    RequestLoad,
    check_answer,
    measure_requests,
)
from diptych.cluster.cli import app
from diptych.cluster.cli.bench import interrupt_at_end
from diptych.cluster.cli.bench_gateway import table
from diptych.cluster.config import ClusterConfig
from diptych.cluster.gateway.edge.browsers import BrowserPolicy
from diptych.cluster.gateway.text.tokenizer import ChatTokenizer
from diptych.cluster.wire.connection import FrameConnection, FrameListener, dial
from diptych.engine.demo import CHECKPOINT
from diptych.protos import frames as f
from diptych.protos.handshake import PeerIdentity
from typer.testing import CliRunner

IDS = [7, 8, 9]


@contextlib.contextmanager
def a_server(answer: Callable[..., Awaitable[None]]) -> Iterator[int]:
    """A server on a thread of its own; gives its port."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    starting = asyncio.run_coroutine_threadsafe(asyncio.start_server(answer, "127.0.0.1", 0), loop)
    server = starting.result(10)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def joined(home: str) -> tuple[TokenSource, f.WorkerCard]:
    """A source, and the card by which it has joined a router."""
    cards: asyncio.Queue[f.WorkerCard] = asyncio.Queue()

    async def serve(peer: FrameConnection, _: f.Hello) -> None:
        peer.send(f.WorkerDirectory(1, []))
        async for frame in peer.frames(5.0):
            if isinstance(frame, f.JoinRouter):
                cards.put_nowait(frame.card)

    listener = FrameListener("s", f.FramesToRouter, serve)
    address = await listener.start("127.0.0.1")

    async def find() -> str:
        return address

    source = TokenSource(home, f"{home}/1", "s", IDS, find)
    await source.start("127.0.0.1")
    async with asyncio.timeout(10):
        return source, await cards.get()


async def test_a_source_steps_all_streams_of_a_pace_together_and_ends_each() -> None:
    _, card = await joined("decode")
    hello = PeerIdentity("g", "gateway", "s")
    peer = await dial(card.address, hello, f.FramesFromWorker, "w")
    for name, most in (("a", 6), ("b", 8)):
        sampling = f.Sampling(most, seed=200)
        peer.send(f.StartDecode((name, 0), 1, [1], sampling, "prefill/1"))
    got: dict[str, list[f.AnswerTokens]] = {"a": [], "b": []}
    stepped: list[str] = []  #: Whose tokens each step brought.
    async with asyncio.timeout(10):
        while not (got["b"] and got["b"][-1].finish_reason):
            frame = await peer.receive()
            if isinstance(frame, f.EngineStepTokens):
                stepped.append("".join(sorted(one.attempt_key[0] for one in frame.answers)))
                for tokens in frame.answers:
                    got[tokens.attempt_key[0]].append(tokens)
    assert [t.offset for t in got["a"]] == [1, 2, 3, 4, 5]
    assert [t.offset for t in got["b"]] == [1, 2, 3, 4, 5, 6, 7]
    assert all(tokens[-1].finish_reason == "length" for tokens in got.values())
    # On a loaded machine the second one may begin some steps later; then no step has one alone.
    both = stepped[stepped.index("ab") :]
    assert both == ["ab"] * both.count("ab") + ["b"] * both.count("b")
    assert [t.tokens[0].id for t in got["b"]][:4] == [8, 9, 7, 8]
    peer.abort()


@pytest.fixture(scope="module")
def load_client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The load generator, compiled once."""
    if shutil.which("gcc") is None:
        pytest.skip("the load generator is C, and there is no gcc here to compile it")
    return build(tmp_path_factory.mktemp("client"))


def test_the_client_counts_tokens_whatever_the_chunks(load_client: Path, tmp_path: Path) -> None:
    client = load_client
    body = tmp_path / "body"
    body.write_bytes(request(ClientLoad(2, 4)))
    event = b'data: {"choices":[{"delta":{"content":" a b"}}]}\n\n'
    stream = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (event, event))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"seed")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for at in range(0, len(stream), 7):
            writer.write(stream[at : at + 7])
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def run() -> Any:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        numbers = ("2", "0", "0", "0", "10")
        process = await asyncio.create_subprocess_exec(
            str(client), "127.0.0.1", str(port), str(body), *numbers, stdout=-1
        )
        output, _ = await process.communicate()
        return json.loads(output.splitlines()[-1])

    told = asyncio.run(run())
    assert (told["tokens"], told["events"], told["failed"]) == (8, 4, 0)


CHUNK = b'data: {"choices":[{"delta":{"content":" a"}}]}\n\n'
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def in_chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


def test_the_wait_of_flat_streams_for_each_other_is_not_measured(
    load_client: Path, tmp_path: Path
) -> None:
    """First tokens come from the prefill source at once, all others after a silent second."""
    load = ClientLoad(2, 3, ramp_s=0.0)
    body = tmp_path / "body"
    body.write_bytes(request(load))
    first_tokens = 0
    all_have_one = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal first_tokens
        await reader.readuntil(b"seed")
        writer.write(HEAD + in_chunk(CHUNK))
        first_tokens += 1
        if first_tokens == load.streams:
            await asyncio.sleep(0.1)  # the client has read these tokens, and no others
            all_have_one.set()
        await all_have_one.wait()
        writer.write(in_chunk(CHUNK))
        await asyncio.sleep(0.1)  # both streams have their second token before one of them ends
        writer.write(in_chunk(CHUNK) + b"0\r\n\r\n")

    with a_server(answer) as port:
        command = measure._command(load_client, port, str(body), load)
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    name, _, tokens = output.splitlines()[0].split()
    assert name == "begun" and int(tokens) == 4


def test_failed_streams_are_no_measurement(load_client: Path) -> None:
    """The second stream is cut off in its midst; without slow clients nothing may fail."""
    answered = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal answered
        await reader.readuntil(b"seed")
        answered += 1
        is_cut = answered == 2
        writer.write(HEAD + in_chunk(CHUNK) * 2)
        await asyncio.sleep(0.1)
        writer.write(in_chunk(CHUNK) + (b"" if is_cut else b"0\r\n\r\n"))
        writer.close()

    with a_server(answer) as port, pytest.raises(BenchError, match="1 of 2 streams failed"):
        measure.measure(MeasuredCluster(port), ClientLoad(2, 3, ramp_s=0.0), load_client)


def test_slow_clients_that_are_refused_are_counted(load_client: Path) -> None:
    """The healthy one comes first, and is served until the slow one has read its refusal."""
    answered = 0
    slow_has_gone = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal answered
        await reader.readuntil(b"\r\n\r\n")
        answered += 1
        if answered == 2:
            # As many bytes as a slow client reads at a time.
            writer.write(b"HTTP/1.1 503 B\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                await reader.read()
            slow_has_gone.set()
            return
        writer.write(HEAD + in_chunk(CHUNK) * 2)
        await slow_has_gone.wait()
        writer.write(in_chunk(CHUNK) + b"0\r\n\r\n")

    load = ClientLoad(1, 3, slow=1, ramp_s=0.0)
    with a_server(answer) as port:
        measured = measure.measure(MeasuredCluster(port), load, load_client)
    crowd = _crowd_row(measured)
    assert (crowd["failed"], crowd["slow_refused"], crowd["dropped"]) == (0, 1, 0)
    assert crowd["connected"] == 2
    figures = {"itl_ms_p99": 100.0}
    slow = {"healthy": 1, "slow": 1, "leavers": 1, "alone": figures, "crowd": crowd | figures}
    text = table({"rows": [], "missing": {}, "prompts": [], "slow": {"none": slow}})
    assert "none: 1 slow ones were refused" in text and "none: 1 clients did not connect" in text


def test_tokens_can_be_counted_by_their_spaces() -> None:
    tokenizer = ChatTokenizer(CHECKPOINT)
    token_ids = countable_token_ids(tokenizer)
    assert len(token_ids) > 100
    assert tokenizer.decode(token_ids).count(" ") == len(token_ids)


def test_the_table_names_what_was_not_measured() -> None:
    cpu = {"gateway": 20.0, "worker": 5.0, "proxy": 10.0, "router": 0.1, "rest": 3.0}
    client = {"gap_p99_ms": 35.0, "gap_p50_ms": 33.3, "cpu_us": 600.0, "tokens": 100}
    client |= {"events": 100, "failed": 0}
    made = row(ClientLoad(128, 300, 30), "haproxy", GatewayMeasurement(3840.2, cpu, client, 99.0))
    assert made["mode"] == "paced" and made["added_itl_ms_p99"] == 1.67
    told = [{"tokens": 2048, "kind": "fresh", "requests_s": 900}]
    said = table({"rows": [made], "missing": {"none": "no port"}, "prompts": told})
    assert "35.0 us" in said and "+1.7 ms" in said and "none: not measured (no port)" in said
    assert "900 prompts/s of 2048 tokens, fresh" in said


@pytest.mark.parametrize(
    "wrong",
    [
        ["--proxy", "nginx"],
        ["--streams", "0"],
        ["-o", "xml"],
        ["--against", "dynamo"],
        ["--requests", "--against", "sglang"],
        ["--requests", "--against", "dynamo", "--dynamo-python", "/no/python"],
    ],
)
def test_wrong_options_are_refused(wrong: list[str]) -> None:
    assert CliRunner().invoke(app, ["bench", "gateway", *wrong]).exit_code == 2


@pytest.mark.slow
def test_prompts_have_about_the_tokens_that_they_claim() -> None:
    rows = prompts.measure(CHECKPOINT)
    assert [one["kind"] for one in rows] == ["fresh", "history"]
    assert all(abs(one["mean_tokens"] - prompts.PROMPT_TOKENS) < 200 for one in rows)
    assert ChatTokenizer(CHECKPOINT).encode("a", add_special_tokens=False)


def test_a_tokenizer_without_words_costs_the_prompts_and_no_other_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some tokenizers decode no id alone to a space and letters."""
    monkeypatch.setattr(ChatTokenizer, "token_text", lambda self, token_id: "word")
    with pytest.raises(BenchError, match="no words that begin with a space"):
        prompts.measure(CHECKPOINT)

    progress: list[str] = []
    monkeypatch.setattr(run, "_measure_in_child", lambda *_: {"rows": [{"tokens_s": 1}]})
    options = run.GatewayBenchOptions(CHECKPOINT, proxies=("none",))
    result = run.run(options, progress.append)
    assert result["rows"] == [{"tokens_s": 1}] and result["prompts"] == []
    said = table(result | {"rows": []})
    assert said == (
        "prompts: not measured (this tokenizer has no words that begin with a space among its first "
        "4096 ids)"
    )


def test_a_gateway_without_keys_answers_the_clients() -> None:
    """It answers to loopback names only."""
    head = request(ClientLoad(2, 4)).partition(b"\r\n\r\n")[0].decode()
    host = next(line[6:] for line in head.split("\r\n") if line.startswith("Host: "))
    BrowserPolicy(ClusterConfig().gateway).check(host, None)


async def test_a_prefill_source_ends_an_answer_of_one_token() -> None:
    _, card = await joined("prefill")
    peer = await dial(card.address, PeerIdentity("g", "gateway", "s"), f.FramesFromWorker, "w")
    reasons = {}
    for name, max_tokens in (("only", 1), ("first", 2)):
        peer.send(f.StartPrefill((name, 0), 1, [1], f.Sampling(max_tokens), "decode/1"))
    async with asyncio.timeout(10):
        while len(reasons) < 2:
            frame = await peer.receive()
            if isinstance(frame, f.EngineStepTokens):
                for tokens in frame.answers:
                    reasons[tokens.attempt_key[0]] = tokens.finish_reason
    assert reasons == {"only": "length", "first": None}
    peer.abort()


def test_whole_requests_are_counted_whole_and_a_refusal_is_an_error() -> None:
    """A server that answers in pieces; the second load is refused."""
    tokenizer = ChatTokenizer(CHECKPOINT)
    load = RequestLoad("short", clients=3, requests=7, prompt_tokens=128, max_tokens=1)
    bodies: list[dict[str, Any]] = []
    refuses = False

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
                bodies.append(json.loads(await reader.readexactly(length)))
                if refuses:
                    writer.write(b"HTTP/1.1 503 Busy\r\ncontent-length: 3\r\n\r\nno!")
                    return
                event = b'data: {"choices":[{"text":" a"}]}\n\n'
                reply = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
                reply += b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event)
                for at in range(0, len(reply), 11):
                    writer.write(reply[at : at + 11])
                    await writer.drain()

    with a_server(answer) as port:
        server = MeasuredServer("s", port, "m", lambda: {"all": [os.getpid()]})
        measured = measure_requests(server, load, tokenizer, seed=1)
        assert len(bodies) == 7
        assert {body["model"] for body in bodies} == {"m"}
        assert len({body["prompt"] for body in bodies}) == 7
        assert len(tokenizer.encode(bodies[0]["prompt"], add_special_tokens=False)) == 128
        assert measured["load"] == "short" and measured["requests_s"] > 0
        refuses = True
        with pytest.raises(BenchError, match=r"HTTP/1\.1 503 Busy: no!"):
            measure_requests(server, load, tokenizer, seed=2)


def test_the_table_of_requests_has_medians_and_the_ratio_of_rounds() -> None:
    common = {"proxy": "none", "load": "short", "prompt_tokens": 128, "max_tokens": 1}
    common |= {"requests_s": 500, "ttft_ms_p50": 20.0, "ttft_ms_p99": 30.0}
    rows = [
        {**common, "server": server, "cpu_us": cpu_us}
        for server, cpu_us in (
            ("diptych", 300.0),
            ("dynamo", 100.0),
            ("diptych", 500.0),
            ("dynamo", 250.0),
        )
    ]
    text = table({"rows": [], "missing": {}, "prompts": [], "requests": rows})
    assert "400 us" in text and "175 us" in text and "2.50 (2.00 to 3.00)" in text


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        (
            b'data: {"choices":[{"text":" a"}]}\n\nevent: error\ndata: {"error":{"code":"x"}}\n\n',
            "x",
        ),
        (b'data: {"error":{"message":"lost"}}\n\n', "lost"),
        (b'data: {"choices":[{"text":""}]}\n\ndata: [DONE]\n\n', "no answer"),
        (b"data: nonsense\n\n", "no event"),
    ],
)
def test_an_answer_that_ends_in_an_error_is_no_served_request(events: bytes, reason: str) -> None:
    body = b"".join(in_chunk(part) for part in (events[:9], events[9:])) + b"0\r\n\r\n"
    with pytest.raises(BenchError, match=reason):
        check_answer(body)


def test_an_answer_in_chunks_is_a_served_request() -> None:
    for event in (b'{"choices":[{"text":" a"}]}', b'{"choices":[{"finish_reason":"length"}]}'):
        content = b"data: %s\n\ndata: [DONE]\n\n" % event
        body = b"".join(in_chunk(content[at : at + 7]) for at in range(0, len(content), 7))
        check_answer(body + b"0\r\n\r\n")


def test_the_proxy_is_a_part_of_the_server_if_there_is_one() -> None:
    class Fixed:
        def pids(self, part: str) -> list[int]:
            return [len(part)]

    assert list(server_pids(Fixed(), "none")) == ["gateway", "router"]  # type: ignore[arg-type]
    pids = server_pids(Fixed(), "haproxy")  # type: ignore[arg-type]
    assert pids == {"gateway": [7], "router": [6], "proxy": [5]}


def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setattr(cluster, "READY_LIMIT_S", 0.3)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        text = b"diptych_inflight_requests 0\n"
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(text), text))
        writer.close()

    with a_server(answer) as port:
        cluster._wait_until_ready(port)
        assert MeasuredCluster(port).left_behind() == 0


# ---- the process of a cluster --------------------------------------------------------------------


@pytest.fixture
def child_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file whose Python is run in place of `child.py`, and gets its options."""
    script = tmp_path / "child.py"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S {script} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(run.sys, "executable", str(python))
    return script


def test_an_interrupt_ends_the_child_and_what_it_has_started(child_script: Path) -> None:
    """Only the parent is interrupted; the child gets the time to end its cluster."""
    folder = child_script.parent
    child_script.write_text(
        "import pathlib, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"folder = pathlib.Path({str(folder)!r})\n"
        "other = subprocess.Popen(['sleep', '600'])\n"
        "(folder / 'pids').write_text(str(other.pid))\n"
        "try:\n"
        "    print('{}', file=sys.stderr, flush=True)\n"
        "    time.sleep(600)\n"
        "finally:\n"
        "    (folder / 'ended').touch()\n"
    )

    def interrupt(line: str) -> None:
        if line == "{}":
            raise KeyboardInterrupt

    options = run.GatewayBenchOptions(CHECKPOINT, proxies=("none",))
    with pytest.raises(KeyboardInterrupt):
        run.run(options, interrupt)
    assert (folder / "ended").exists()
    stat = Path("/proc", (folder / "pids").read_text(), "stat")
    deadline = time.monotonic() + 10
    while stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_many_rounds_do_not_fill_the_childs_pipe(child_script: Path) -> None:
    child_script.write_text(
        "import json\nprint(json.dumps({'rows': [], 'requests': ['x' * 100] * 1000}))\n"
    )
    options = run.GatewayBenchOptions(CHECKPOINT, proxies=("none",), rounds=64)
    result = run.run(options, lambda line: None)
    assert not result["missing"] and len(result["requests"]) == 1000


def test_every_signal_that_ends_a_bench_interrupts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        interrupt_at_end()
        assert {signal.getsignal(number) for number in numbers} == {signal.default_int_handler}
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
        interrupt_at_end()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


# ---- stages --------------------------------------------------------------------------------------


def test_the_stages_count_the_process_that_renders_templates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One slow pass does not count, nor does one fast pass: it is the median."""
    others_s = iter([0.0, 9.0, 9.0, 9.5, 9.5, 9.6])
    own_s = iter([0.0, 0.1, 0.2, 0.5, 0.7, 0.9])
    monkeypatch.setattr(stages, "_others_cpu_s", lambda: next(others_s))
    monkeypatch.setattr(time, "thread_time", lambda: next(own_s))
    monkeypatch.setattr(stages, "PASSES", 3)
    monkeypatch.setattr(stages, "CONVERSATIONS", 1)
    monkeypatch.setattr(stages, "tokenizer_words", lambda text: [" a"])
    monkeypatch.setattr(
        stages, "_prepare", lambda timer, text, body, request_id: timer.run("read", int)
    )
    row = stages.measure_stages(None, 1)  # type: ignore[arg-type]
    assert row == {
        "read": pytest.approx(0.2e6),
        stages.OTHER_PROCESS: pytest.approx(0.5e6),
    }


def test_the_cpu_time_of_threads_is_finer_than_a_tick() -> None:
    """The count of a thread is brought up to date when the thread goes to sleep."""
    time.sleep(0.001)
    before_s = thread_cpu_s_of(os.getpid())
    sum(range(10_000))
    time.sleep(0.001)
    spent_s = thread_cpu_s_of(os.getpid()) - before_s
    assert 0 < spent_s < 1 and spent_s * 100 % 1, "no whole ticks of 10 ms"
