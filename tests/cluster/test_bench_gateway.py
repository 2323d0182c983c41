"""`diptych bench gateway`: the source's frames, the client's counts, what is printed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from diptych.cluster.bench.gateway import prompts, run
from diptych.cluster.bench.gateway.cluster import BenchError, countable_token_ids
from diptych.cluster.bench.gateway.measure import (
    ClientLoad,
    GatewayMeasurement,
    build,
    request,
    row,
)
from diptych.cluster.bench.gateway.source import TokenSource
from diptych.cluster.bench.gateway.whole_requests import (
    MeasuredServer,
    RequestLoad,
    measure_requests,
)
from diptych.cluster.cli import app
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
    for name, most in (("a", 3), ("b", 5)):
        sampling = f.Sampling(most, seed=200)
        peer.send(f.StartDecode((name, 0), 1, [1], sampling, "prefill/1"))
    got: dict[str, list[f.AnswerTokens]] = {"a": [], "b": []}
    together = 0
    async with asyncio.timeout(10):
        while not (got["b"] and got["b"][-1].finish_reason):
            frame = await peer.receive()
            if isinstance(frame, f.EngineStepTokens):
                together += len(frame.answers) == 2
                for tokens in frame.answers:
                    got[tokens.attempt_key[0]].append(tokens)
    assert [t.offset for t in got["a"]] == [1, 2] and got["a"][-1].finish_reason == "length"
    assert [t.offset for t in got["b"]] == [1, 2, 3, 4] and together == 2
    assert [t.tokens[0].id for t in got["b"]] == [8, 9, 7, 8]
    peer.abort()


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_the_client_counts_tokens_whatever_the_chunks(tmp_path: Path) -> None:
    client = build(tmp_path)
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
