"""Framed connections: secret, version, garbage, silence, slow readers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
import tracemalloc
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import msgspec
import pytest
from diptych.cluster.wire import connection as wire
from diptych.cluster.wire import handshake as asyncio_handshake
from diptych.protos import frames as f
from diptych.protos import handshake
from diptych.protos.handshake import PeerIdentity, with_length


async def answer_of(peer: Any) -> Any:
    """The next frame that is no heartbeat, of which a loaded machine lets some come first."""
    while isinstance(frame := await peer.receive(), f.Heartbeat):
        pass
    return frame


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):  # a bound only: the slowest takes 4 s alone
            await test()

    asyncio.run(bounded())


class Server:
    """Collects what arrives, per connection."""

    def __init__(self) -> None:
        self.frames: list = []
        self.names: list[str] = []
        self.ended = asyncio.Event()
        self.listener = wire.FrameListener("secret", f.FramesToWorker, self._serve)

    async def _serve(self, peer: wire.FrameConnection, hello: f.Hello) -> None:
        self.names.append(hello.name)
        async for frame in peer.frames(1.0):
            self.frames.append(frame)
            peer.send(f.AttemptFailed(("r", 0), "w", "seen"))
        self.ended.set()


def encoded(frame: msgspec.Struct) -> bytes:
    return with_length(msgspec.msgpack.encode(frame))


def caller_of(address: str) -> PeerIdentity:
    """Return what `dial` says of itself at a listener's address."""
    secret = handshake.secret_of_listener("secret", wire.LISTENER_KIND, address)
    return PeerIdentity("g", "gateway", secret)


async def dialled(address: str, **changes: Any) -> wire.FrameConnection:
    caller = PeerIdentity(**{"name": "g", "kind": "gateway", "secret": "secret", **changes})
    return await wire.dial(address, caller, f.FramesFromWorker, "w")


@pytest.mark.parametrize("frame", [f.CancelAttempt(("r", 0)), f.Heartbeat()])
def test_a_peer_that_never_ceases_to_speak_leaves_the_loop_to_others(frame: Any) -> None:
    async def test() -> None:
        turns, seen, done = 0, [], asyncio.Event()

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        def handle() -> None:
            seen.append(turns)
            time.sleep(0.002)
            if len(seen) == 60:
                done.set()

        async def serve(peer: wire.FrameConnection, _: f.Hello) -> None:
            await asyncio.sleep(0.1)  # all of them are there
            decode = peer._decode

            def slow_decode(data: bytes) -> Any:
                handle()
                return decode(data)

            peer._decode = slow_decode  # which heartbeats pass, too
            async for _frame in peer.frames(5.0):
                pass

        listener = wire.FrameListener("secret", f.FramesToWorker, serve)
        peer = await dialled(await listener.start("127.0.0.1"))
        for _ in range(60):
            peer.send(frame)
        task = asyncio.create_task(others())
        await done.wait()
        task.cancel()
        longest = max(sum(turn == one for turn in seen) for one in set(seen))
        assert longest <= 1 + wire.TURN_S / 0.002, f"{longest} frames in one turn"
        peer.abort()

    run(test)


def test_frames_go_both_ways_in_order() -> None:
    async def test() -> None:
        server = Server()
        peer = await dialled(await server.listener.start("127.0.0.1"))
        for attempt in range(50):
            peer.send(f.CancelAttempt(("r", attempt)))
        answers = [await answer_of(peer) for _ in range(50)]
        assert [frame.attempt_key[1] for frame in server.frames] == list(range(50))
        assert all(isinstance(answer, f.AttemptFailed) for answer in answers)
        peer.abort()
        await server.ended.wait()

    run(test)


def test_frames_of_one_turn_leave_together_and_those_before_an_abort_leave_too() -> None:
    async def test() -> None:
        server = Server()
        peer = await dialled(await server.listener.start("127.0.0.1"))
        writes: list[bytes] = []
        write = peer._writer.write
        peer._writer.write = lambda data: (writes.append(data), write(data))[1]  # type: ignore[method-assign]
        for attempt in range(3):
            peer.send(f.CancelAttempt(("r", attempt)))
        peer.abort()
        await server.ended.wait()
        assert len(writes) <= 2, "one, or two where the machine is slow"
        assert [frame.attempt_key[1] for frame in server.frames] == [0, 1, 2]

    run(test)


def test_a_peer_without_the_secret_is_refused() -> None:
    async def test() -> None:
        server = Server()
        address = await server.listener.start("127.0.0.1")
        with pytest.raises(ConnectionError):
            await dialled(address, secret="guess")
        assert server.names == []

    run(test)


def test_a_peer_of_another_version_is_refused() -> None:
    async def test() -> None:
        server = Server()
        address = await server.listener.start("127.0.0.1")
        reader, writer = await asyncio.open_connection(*address.split(":"))
        challenge = await asyncio_handshake._receive(reader, "Challenge")
        nonce = msgspec.msgpack.decode(challenge, type=f.Challenge).nonce
        unproved = f.Hello("g", "gateway", b"n", b"", 99)
        proof = handshake.dialler_proof(caller_of(address).secret, nonce, unproved)
        writer.write(encoded(f.Hello("g", "gateway", b"n", proof, 99)))
        with pytest.raises(ConnectionError):
            await asyncio_handshake._receive(reader, "Welcome")
        assert server.names == []

    run(test)


def test_who_listens_must_know_the_secret_too_and_never_sees_it() -> None:
    async def test() -> None:
        seen = bytearray()

        async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(encoded(f.Challenge(b"a" * 16)))
            seen.extend(await reader.read(4096))
            writer.write(encoded(f.Welcome(b"b" * 32)))

        listener = await asyncio.start_server(impostor, "127.0.0.1", 0)
        host, port = listener.sockets[0].getsockname()
        with pytest.raises(ConnectionError, match="who answers"):
            await dialled(f"{host}:{port}")
        assert seen and b"secret" not in seen

    run(test)


def test_a_proof_that_was_overheard_opens_no_other_connection() -> None:
    async def test() -> None:
        server = Server()
        address = await server.listener.start("127.0.0.1")
        said = bytearray()

        class Recorder:
            def __init__(self, writer: asyncio.StreamWriter) -> None:
                self._writer = writer

            def write(self, data: bytes) -> None:
                said.extend(data)
                self._writer.write(data)

        reader, writer = await asyncio.open_connection(*address.split(":"))
        recorder: Any = Recorder(writer)
        await asyncio_handshake.greet(reader, recorder, caller_of(address))
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(bytes(said))
        await asyncio_handshake._receive(reader, "Challenge")
        with pytest.raises(ConnectionError):
            await asyncio_handshake._receive(reader, "Welcome")

    run(test)


def test_a_proof_that_is_passed_on_opens_no_connection() -> None:
    """An impostor at a dead peer's address lets the dialler prove itself to somebody else."""

    async def test() -> None:
        victim = Server()
        address = await victim.listener.start("127.0.0.1")
        said_by_victim: list[bytes] = []

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            host, port = address.rsplit(":", 1)
            victim_reader, victim_writer = await asyncio.open_connection(host, int(port))
            writer.write(await victim_reader.read(4096))  # the Challenge
            victim_writer.write(await reader.read(4096))  # the Hello
            said_by_victim.append(await victim_reader.read(4096))
            victim_writer.close()
            writer.close()

        impostor = await asyncio.start_server(relay, "127.0.0.1", 0)
        port = impostor.sockets[0].getsockname()[1]
        with pytest.raises(ConnectionError):
            await dialled(f"127.0.0.1:{port}")
        assert said_by_victim == [b""] and victim.names == [], "hung up on"
        impostor.close()
        victim.listener.close()

    run(test)


def test_a_proof_for_a_kv_agent_opens_no_connection_for_frames() -> None:
    async def test() -> None:
        server = Server()
        address = await server.listener.start("127.0.0.1")
        of_agent = handshake.secret_of_listener("secret", "kv", "decode/a:0")
        with pytest.raises(ConnectionError):
            await dialled(address, secret=of_agent)
        assert server.names == []

    run(test)


def test_strangers_are_bounded_and_keep_no_peer_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold as many connections as they like: the oldest go, and a peer still comes in."""
    monkeypatch.setattr(wire, "UNPROVED_CALLERS_MAX", 8)
    monkeypatch.setattr(wire, "HANDSHAKE_TIMEOUT_S", 3600.0)

    async def test() -> None:
        server = Server()
        address = await server.listener.start("127.0.0.1")
        early = await dialled(address)
        strangers = []
        for _ in range(50):
            reader, writer = await asyncio.open_connection(*address.split(":"))
            await asyncio_handshake._receive(reader, "Challenge")
            strangers.append((reader, writer))
        for reader, _ in strangers[:42]:  # the oldest ones: others hang on
            with contextlib.suppress(ConnectionError):
                assert await reader.read(1) == b""
        peer = await dialled(address)
        for member in (early, peer):
            member.send(f.CancelAttempt(("r", 0)))
            assert isinstance(await answer_of(member), f.AttemptFailed)
            member.abort()
        assert not any(reader.at_eof() for reader, _ in strangers[43:])
        for _, writer in strangers:
            writer.transport.abort()

    run(test)


def test_peers_that_dial_at_once_all_come_in() -> None:
    """As many as a large cluster has."""

    async def test() -> None:
        server = Server()
        address = await server.listener.start("127.0.0.1")
        peers = await asyncio.gather(*(dialled(address) for _ in range(150)))
        assert len(server.names) == len(peers)
        for peer in peers:
            peer.abort()

    run(test)


def test_a_refusal_without_words_is_logged_by_its_class(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_TIMEOUT_S", 0.01)

    async def test() -> None:
        address = await Server().listener.start("127.0.0.1")
        reader, writer = await asyncio.open_connection(*address.split(":"))
        with contextlib.suppress(ConnectionError):
            while await reader.read(4096):  # the Challenge, which is not answered; then the end
                pass
        writer.transport.abort()

    run(test)
    assert "refused a connection: TimeoutError" in caplog.messages


def test_strangers_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def call(address: str) -> None:
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while await reader.read(4096):  # the Challenge; then the end
                pass
        writer.transport.abort()

    async def test() -> None:
        listener = Server().listener
        address = await listener.start("127.0.0.1")
        for _ in range(3):
            await call(address)
        listener._next_refusal_log_s = 0.0  # a minute later
        await call(address)

    run(test)
    first, second = [text for text in caplog.messages if text.startswith("refused a connection")]
    assert "others" not in first and second.endswith("(and 2 others since the last such line)")


#: More arrays in each other than a decoder goes into: it raises RecursionError.
DEEP = b"\x91" * 3500 + b"\xc0"


def rubbish(number: int) -> bytes:
    """Before the handshake: noise, a cut frame, a huge length, another protocol."""
    random = Random(number)
    noise = random.randbytes(random.randrange(1, 400))
    hello = msgspec.msgpack.encode(f.Hello("g", "gateway", b"x" * 16, b"y" * 32))
    shapes = [
        noise,
        len(noise).to_bytes(4, "big") + noise,
        random.randrange(1 << 12, 1 << 32).to_bytes(4, "big") + noise,
        len(hello).to_bytes(4, "big") + hello[: random.randrange(len(hello))],
        len(hello).to_bytes(4, "big") + hello,
        b"GET / HTTP/1.1\r\n\r\n",
        b"",
        with_length(b"\x81\xa1x" + DEEP),
    ]
    return shapes[number % len(shapes)]


def spoiled(number: int) -> bytes:
    """Behind the handshake: a frame with flipped bytes, a wrong one, a length above the limit."""
    random = Random(number)
    frame = f.StartPrefill(("r", 0), 1, list(range(50)), f.Sampling(4), "d")
    data = bytearray(msgspec.msgpack.encode(frame))
    for _ in range(random.randrange(1, 6)):
        data[random.randrange(len(data))] = random.randrange(256)
    alien = msgspec.msgpack.encode(f.AttemptPlaced(("r", 0), 1, None, "d", 0, 0.0))
    deep_field = b"\x82\xa4type\xa5abort\xa1x" + DEEP  # which no frame has: it is skipped
    shapes = [bytes(data), random.randbytes(random.randrange(400)), alien, DEEP, deep_field]
    body = shapes[number % len(shapes)]
    if number % 7 == 6:
        return (wire.FRAME_BYTES_MAX + 1 + number).to_bytes(4, "big") + body
    return len(body).to_bytes(4, "big") + body


def test_a_frame_that_is_too_long_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_TIMEOUT_S", 3600.0)

    async def test() -> None:
        server = Server()
        address = await server.listener.start("127.0.0.1")
        for known, size in (
            (False, handshake.HANDSHAKE_BYTES_MAX + 1),
            (True, wire.FRAME_BYTES_MAX + 1),
        ):
            reader, writer = await asyncio.open_connection(*address.split(":"))
            if known:
                await asyncio_handshake.greet(reader, writer, caller_of(address))
            writer.write(size.to_bytes(4, "big"))
            with contextlib.suppress(ConnectionError):
                while await reader.read(4096):
                    pass
            writer.transport.abort()

    run(test)


async def fuzz(count: int, caplog: pytest.LogCaptureFixture) -> None:
    """What a test captures of the log is memory too, so no warnings."""
    caplog.set_level("ERROR")
    server = Server()
    address = await server.listener.start("127.0.0.1")
    gc.collect()
    for number in range(count):
        if number == count // 10:
            gc.collect()
            tracemalloc.start()
        reader, writer = await asyncio.open_connection(*address.split(":"))
        if number % 2:
            await asyncio_handshake.greet(reader, writer, caller_of(address))
            writer.write(spoiled(number // 2))
        else:
            writer.write(rubbish(number // 2))
        if writer.can_write_eof():
            writer.write_eof()
        with contextlib.suppress(ConnectionError):
            while await reader.read(4096):  # the end, without being asked
                pass
        writer.transport.abort()
        assert not caplog.records, caplog.text
    gc.collect()
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 2 << 20, f"{grown} bytes after {count} connections"
    peer = await dialled(address)
    peer.send(f.CancelAttempt(("r", 0)))
    assert isinstance(await answer_of(peer), f.AttemptFailed)


def test_garbage_ends_its_connection_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    run(lambda: fuzz(400, caplog))


@pytest.mark.long
def test_much_garbage_ends_its_connections_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asyncio.run(fuzz(20_000, caplog))


def test_heartbeats_keep_an_idle_connection_and_silence_ends_it() -> None:
    async def test() -> None:
        server = Server()
        address = await server.listener.start("127.0.0.1")
        peer = await dialled(address)
        beating = asyncio.ensure_future(anext(peer.frames(1.0), None))
        mute = await dialled(address)  # says hello, then nothing: no task sends its beats
        await server.ended.wait()  # the server gave up on the mute one only
        assert not beating.done() and not peer.closed
        peer.send(f.CancelAttempt(("r", 0)))
        assert isinstance(await beating, f.AttemptFailed)
        mute.abort()

    run(test)


def test_the_longest_frame_does_not_cut_its_own_connection_off() -> None:
    async def test() -> None:
        server = Server()
        peer = await dialled(await server.listener.start("127.0.0.1"))
        request_id = "r" * (wire.FRAME_BYTES_MAX - 100)
        peer.send(f.CancelAttempt((request_id, 0)))  # not a byte is taken meanwhile, at worst
        assert isinstance(await answer_of(peer), f.AttemptFailed)
        assert server.frames == [f.CancelAttempt((request_id, 0))]
        peer.abort()

    run(test)


def test_a_peer_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        server = Server()
        peer = await dialled(await server.listener.start("127.0.0.1"))
        monkeypatch.setattr(wire, "BUFFER_BYTES_MAX", 1 << 20)
        step = f.StartPrefill(("r", 0), 1, list(range(100_000)), f.Sampling(1), "d")
        sent = 0
        while not peer.closed:
            peer.send(step)  # never yields: the other side cannot read meanwhile
            sent += 1
            assert sent < 1000
        peer.send(step)  # harmless afterwards

    run(test)
