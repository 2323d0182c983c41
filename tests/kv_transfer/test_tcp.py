"""What TCP promises besides the conformance kit: late bytes, strangers, dials, bounds."""

import contextlib
import socket
from collections import deque

import msgspec
import pytest
from diptych.kv_transfer.errors import PeerLost
from diptych.kv_transfer.transport import PeerDisconnected, PostedWriteEnded, card_of
from diptych.kv_transfer.transports import stream, tcp
from diptych.kv_transfer.transports.tcp import TcpTransport
from diptych.protos import handshake
from diptych.protos.frames import Hello
from diptych.protos.handshake import DiallerHandshake, PeerIdentity, with_length

from ..kit.conformance import DEADLINE_S, MemoryPool, TransportPair, spans, write
from .support import SECRET, eventually


def open_tcp(agent, pool, admit):
    return TcpTransport(agent, pool, admit, secret=SECRET)


@pytest.fixture
def both():
    pair = TransportPair(open_tcp)
    yield pair.connect()
    pair.close()


def test_a_write_that_is_refused_half_way_stops_there(both, monkeypatch):
    """One look at the socket takes some of it; then the ticket is closed."""
    monkeypatch.setattr(stream, "SYSTEM_CALL_LIMIT", 3)
    monkeypatch.setattr(tcp, "READ_BUFFER_LIMIT", 2)
    left, right = both.left, both.right
    before, blocks = bytes(right.pool.view), list(range(0, right.pool.blocks, 2))
    write(left, right, blocks, blocks, b"big")
    landed = lambda: sum(right.pool.block(b) == left.pool.block(b) for b in blocks)  # noqa: E731
    both.until(lambda: landed() > 0, "the first blocks")
    both.refused.add(b"big")
    seen, whole = bytes(right.pool.view), landed()
    assert 0 < whole < len(blocks), "the write was there at once: nothing to refuse"
    both.until(lambda: bool(right.notes() and left.wrote()), "the rest of the write")
    assert bytes(right.pool.view) == seen != before
    both.refused.clear()
    write(left, right, blocks, blocks, b"again")
    both.until(lambda: b"again" in right.notes(), "a write after it")
    assert landed() == len(blocks)


@pytest.mark.parametrize("unit", [-1, 32, 1 << 20])
def test_units_outside_of_the_pool_are_dropped(both, unit):
    before = bytes(both.right.pool.view)
    outside = spans(both.left.pool.block_bytes, [1], [unit])
    both.left.transport.write(both.right.agent, outside, b"outside")
    both.until(lambda: bool(both.right.notes()), "the note")
    assert bytes(both.right.pool.view) == before


def frame(kind, note=b"", note_bytes=None, unit=0, runs=0, rest=b""):
    size = len(note) if note_bytes is None else note_bytes
    return stream.HEADER.pack(kind, size, unit, runs) + note + rest


def hello(name="left#0", nonce=b"n" * 16, proof=b"p" * 32):
    return with_length(msgspec.msgpack.encode(Hello(name, stream.KIND, nonce, proof)))


#: More arrays in each other than a decoder goes into: it raises RecursionError.
DEEP = b"\x91" * 3500 + b"\xc0"
#: What strangers say, who know no secret.
GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: example\r\n\r\n",
    "a write of nobody": frame(stream.FrameKind.WRITE, b"x", unit=64, runs=1, rest=b"x" * 100),
    "a message that is too long": (1 << 31).to_bytes(4, "big") + b"x" * 100,
    "zeros": bytes(4096),
    "half a header": b"\0",
    "half a Hello": hello()[:-5],
    "a Hello without a proof": hello(proof=b""),
    "a Hello with a wrong proof": hello(),
    "a wrong proof, then a note": hello() + frame(stream.FrameKind.NOTIFICATION, b"?"),
    "a name that is no text": hello().replace(b"left#0", b"\xff\xfe\xfd\xfc\xfb\xfa"),
    "a Hello with a deep value": with_length(b"\x81\xa1x" + DEEP),
    "nothing": b"",
}
#: What members say, behind the handshake.
MALFORMED = {
    "an unknown kind": frame(9, b"?"),
    "a note that is too long": frame(stream.FrameKind.NOTIFICATION, note_bytes=1 << 31),
    "too many runs": frame(stream.FrameKind.WRITE, b"?", unit=64, runs=1 << 31),
    "a run of nothing": frame(stream.FrameKind.WRITE, b"?", unit=64, runs=1, rest=bytes(8)),
    "units of nothing": frame(stream.FrameKind.WRITE, b"?", runs=1, rest=b"\1\0\0\0" * 2),
    "a note with runs": frame(stream.FrameKind.NOTIFICATION, b"?", runs=1),
}


def call(end):
    """Connects to an agent's port."""
    host, port = end.transport.address().decode().rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=DEADLINE_S)


def receive_message(both, sock):
    """Reads one message of the handshake while both ends poll; empty at the connection's end."""
    data = bytearray()

    def complete():
        with contextlib.suppress(BlockingIOError):
            part = sock.recv(4096)
            data.extend(part)
            if not part:
                return True
        return len(data) > 4 and len(data) >= 4 + int.from_bytes(data[:4], "big")

    sock.setblocking(False)
    both.until(complete, "a message of the handshake")
    sock.settimeout(DEADLINE_S)
    return bytes(data[4:])


def hung_up(sock):
    sock.setblocking(False)
    try:
        while sock.recv(4096):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


def still_healthy(both):
    """Both ends have lost nobody, and a write goes through."""
    write(both.left, both.right, [1], [2], b"still here")
    both.until(lambda: b"still here" in both.right.notes(), "a write after the stranger")
    assert both.right.pool.block(2) == both.left.pool.block(1)
    assert both.left.downs() == both.right.downs() == 0


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=list(GARBAGE))
def test_a_stranger_that_talks_garbage_changes_nothing(both, garbage):
    before = bytes(both.right.pool.view)
    with call(both.right) as stranger:
        stranger.sendall(garbage)
        for _ in range(20):
            both.poll()
    for _ in range(20):
        both.poll()
    assert bytes(both.right.pool.view) == before
    assert both.right.notes() == []
    assert not both.right.transport._unproved
    still_healthy(both)


def prove(both, sock, name, listener, secret=SECRET):
    """Does a dialler's handshake with `right`; returns the Welcome."""
    listener_secret = handshake.secret_of_listener(secret, stream.KIND, listener)
    dialler = DiallerHandshake(PeerIdentity(name, stream.KIND, listener_secret))
    said = dialler.answer(receive_message(both, sock))
    sock.sendall(with_length(said))
    welcome = receive_message(both, sock)
    if welcome:
        dialler.conclude(welcome)
    return welcome, said


@pytest.mark.parametrize("malformed", MALFORMED.values(), ids=list(MALFORMED))
def test_a_member_that_talks_garbage_is_hung_up_on(both, malformed):
    before = bytes(both.right.pool.view)
    with call(both.right) as member:
        welcome, _ = prove(both, member, "member#0", both.right.agent)
        assert welcome
        member.sendall(malformed)
        both.until(lambda: hung_up(member), "the end of the connection")
    assert bytes(both.right.pool.view) == before
    assert both.right.notes() == []
    write(both.left, both.right, [1], [2], b"still here")
    both.until(lambda: b"still here" in both.right.notes(), "a write after the garbage")


def test_a_stranger_with_a_peers_name_brings_nobody_down(both):
    """The attack that worked when a name was enough: say a peer's, then hang up."""
    for secret in ("", "a guess", handshake.secret_of_listener("", stream.KIND, both.right.agent)):
        with call(both.right) as stranger:
            welcome, _ = prove(both, stranger, both.left.agent, both.right.agent, secret)
            assert not welcome
    with call(both.right) as stranger:  # as it was said before there was a handshake
        name = both.left.agent.encode()
        stranger.sendall(stream.HEADER.pack(0, len(name), 0, 0) + name)
        for _ in range(20):
            both.poll()
    for _ in range(20):
        both.poll()
    still_healthy(both)


def test_an_overheard_handshake_opens_no_other_connection(both):
    with call(both.right) as member:
        welcome, said = prove(both, member, "member#0", both.right.agent)
        assert welcome
        with call(both.right) as stranger:
            receive_message(both, stranger)
            stranger.sendall(with_length(said))
            assert receive_message(both, stranger) == b""
        still_healthy(both)


def test_a_proof_for_one_agent_opens_no_other(both):
    with call(both.right) as member:
        welcome, _ = prove(both, member, "member#0", both.left.agent)
        assert not welcome
    still_healthy(both)


def test_who_listens_at_a_peers_address_must_be_that_peer(both):
    """A port that somebody else has by now, also another agent of this cluster, gets no data."""
    card = msgspec.structs.replace(both.right.card(), agent="gone#0")
    both.left.transport.add_peer(card)
    both.left.transport.write("gone#0", spans(64, [0], [0]), b"for another")
    both.until(lambda: both.left.downs() == 1, "the writer notices")
    assert both.right.notes() == []
    with pytest.raises(PeerLost):
        both.left.transport.notify("gone#0", b"x")


def test_a_stranger_that_listens_learns_nothing_and_gets_nothing():
    pair = TransportPair(open_tcp)
    listener = socket.create_server(("127.0.0.1", 0))
    address = "{}:{}".format(*listener.getsockname()).encode()
    pair.left.transport.add_peer(msgspec.structs.replace(pair.right.card(), address=address))
    pair.left.transport.notify(pair.right.agent, b"for a peer only")
    stranger, _ = listener.accept()
    stranger.sendall(with_length(msgspec.msgpack.encode({"type": "challenge", "nonce": b"n" * 16})))
    said = receive_message(pair, stranger)
    assert pair.left.agent.encode() in said and SECRET.encode() not in said
    stranger.sendall(with_length(msgspec.msgpack.encode({"type": "welcome", "proof": b"p" * 32})))
    pair.until(lambda: pair.left.downs() == 1, "the dialler notices")
    assert hung_up(stranger)
    for sock in (stranger, listener):
        sock.close()
    pair.close()


def test_a_stranger_that_listens_and_says_a_deep_message_is_hung_up_on():
    pair = TransportPair(open_tcp)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = "{}:{}".format(*listener.getsockname()).encode()
        pair.left.transport.add_peer(msgspec.structs.replace(pair.right.card(), address=address))
        pair.left.transport.notify(pair.right.agent, b"for a peer only")
        stranger, _ = listener.accept()
        with stranger:
            stranger.sendall(with_length(b"\x81\xa1x" + DEEP))
            pair.until(lambda: pair.left.downs() == 1, "the dialler notices")
            assert hung_up(stranger)
    pair.close()


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(stream.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("said", [b"", hello()[:-5]], ids=["nothing", "half a Hello"])
def test_a_stranger_that_waits_is_dropped_in_time(both, clock, said):
    with call(both.right) as stranger:
        stranger.sendall(said)
        assert receive_message(both, stranger)
        clock[0] += handshake.HANDSHAKE_TIMEOUT_S * 0.99
        both.right.poll()
        assert not hung_up(stranger)
        clock[0] += handshake.HANDSHAKE_TIMEOUT_S * 0.02
        both.right.poll()
        assert hung_up(stranger)
    assert both.right.downs() == 0


def test_a_peer_that_hangs_up_before_its_proof_was_not_reached():
    pool = MemoryPool()
    transport = open_tcp("near#0", pool, lambda *_: True)
    with socket.create_server(("127.0.0.1", 0)) as hasty:
        address = "{}:{}".format(*hasty.getsockname()).encode()
        card = card_of("far#0", transport, pool)
        transport.add_peer(msgspec.structs.replace(card, address=address))
        transport.notify("far#0", b"hello")
        hasty.accept()[0].close()
        events: list = []
        eventually(lambda: events.extend(transport.poll()) or events, "the end is seen")
    (lost,) = events
    assert lost == PeerDisconnected("far#0") and lost.error == stream.HUNG_UP
    transport.close()


def test_a_peer_that_was_reached_and_ends_is_not_called_out_of_reach():
    near, far = (open_tcp(f"{name}#0", MemoryPool(), lambda *_: True) for name in ("near", "far"))
    near.add_peer(card_of("far#0", far, far.pool))
    near.notify("far#0", b"hello")

    def is_reached() -> bool:
        far.poll()
        near.poll()
        return near.reached("far#0")

    eventually(is_reached, "it is reached")
    far.close()
    events: list = []
    eventually(lambda: events.extend(near.poll()) or events, "the end is seen")
    (lost,) = events
    assert lost == PeerDisconnected("far#0") and lost.error == ""
    near.close()


def test_a_peer_that_never_proves_itself_is_given_up_in_time(clock):
    pool = MemoryPool()
    transport = open_tcp("near#0", pool, lambda *_: True)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = "{}:{}".format(*mute.getsockname()).encode()
        card = card_of("far#0", transport, pool)
        transport.add_peer(msgspec.structs.replace(card, address=address))
        handle = transport.write("far#0", spans(64, [0], [0]), b"data")
        sock, _ = mute.accept()
        assert transport.poll() == []
        clock[0] += handshake.HANDSHAKE_TIMEOUT_S * 0.99
        assert transport.poll() == []
        clock[0] += handshake.HANDSHAKE_TIMEOUT_S * 0.02
        ended, lost = transport.poll()
        assert ended == PostedWriteEnded(handle, False, "unreachable")
        assert lost == PeerDisconnected("far#0") and lost.error == stream.NO_ANSWER
        sock.close()
    transport.close()


def test_strangers_are_bounded_and_keep_no_peer_out(monkeypatch):
    """They hold as many connections as they like: the oldest go, and a peer still comes in."""
    monkeypatch.setattr(stream, "UNPROVED_CALLERS_MAX", 8)
    pair = TransportPair(open_tcp)
    strangers = []
    for _ in range(50):
        strangers.append(call(pair.right))
        pair.right.poll()
        assert len(pair.right.transport._unproved) <= 8
    pair.until(lambda: sum(map(hung_up, strangers)) == 42, "the oldest strangers' end")
    still_healthy(pair.connect())
    assert not any(map(hung_up, strangers[43:])), "one stranger at most has made way for the peer"
    for stranger in strangers:
        stranger.close()
    pair.close()


def test_peers_that_dial_at_once_all_come_in():
    """As many as a large cluster has, and the listener looks only when all have dialled."""
    pair = TransportPair(open_tcp)
    pool = MemoryPool()
    peers = [open_tcp(f"peer#{number}", pool, lambda *_: True) for number in range(150)]
    for peer in peers:
        peer.add_peer(pair.right.card())
        peer.notify(pair.right.agent, b"hello")
    events = []

    def all_came_in():
        for peer in peers:
            events.extend(peer.poll())
        return len(pair.right.notes()) == len(peers)

    pair.until(lambda: events or all_came_in(), "the peers' notes")
    assert not events, "a peer was thrown out"
    for peer in peers:
        peer.close()
    pair.close()


def test_a_proof_that_has_come_counts_before_a_new_caller_does(monkeypatch):
    """Both wait at one look: the caller that has proved itself keeps its place."""
    monkeypatch.setattr(stream, "UNPROVED_CALLERS_MAX", 1)
    pair = TransportPair(open_tcp)
    listener_secret = handshake.secret_of_listener(SECRET, stream.KIND, pair.right.agent)
    dialler = DiallerHandshake(PeerIdentity("member#0", stream.KIND, listener_secret))
    with call(pair.right) as member:
        said = dialler.answer(receive_message(pair, member))
        with call(pair.right):
            member.sendall(with_length(said))
            dialler.conclude(receive_message(pair, member))
    pair.close()


def test_refusals_are_logged_and_do_not_fill_the_log(both, clock, caplog):
    def refuse(count):
        for _ in range(count):
            with call(both.right) as stranger:
                stranger.sendall(hello("a guest"))
                while not hung_up(stranger):
                    both.right.poll()

    refuse(5)
    assert len(caplog.messages) == 1
    assert "'a guest' does not know the cluster's secret" in caplog.messages[0]
    clock[0] += stream.REFUSAL_LOG_S
    refuse(1)
    assert len(caplog.messages) == 2 and "4 others" in caplog.messages[1]


@pytest.fixture
def deaf():
    """A host that does not take calls: its backlog is full, what dials in gets no answer."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    callers = []
    for _ in range(4):
        callers.append(socket.socket())
        callers[-1].setblocking(False)
        callers[-1].connect_ex(listener.getsockname())
    yield listener
    for each in (listener, *callers):
        each.close()


def test_a_dial_without_an_answer_waits_for_its_deadline_and_ends_its_writes(deaf, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(stream.time, "monotonic", lambda: now[0])
    pool = MemoryPool()
    transport = open_tcp("near#0", pool, lambda *_: True)
    host, port = deaf.getsockname()
    card = card_of("far#0", transport, pool)
    transport.add_peer(msgspec.structs.replace(card, address=f"{host}:{port}".encode()))
    transport.notify("far#0", b"hello")
    handle = transport.write("far#0", spans(64, [0], [0]), b"data")
    now[0] += stream.DIAL_TIMEOUT_S * 0.99
    assert transport.poll() == []
    now[0] += stream.DIAL_TIMEOUT_S * 0.02
    assert transport.poll() == [
        PostedWriteEnded(handle, False, "unreachable"),
        PeerDisconnected("far#0"),
    ]
    with pytest.raises(PeerLost):
        transport.notify("far#0", b"hello?")
    transport.close()


@pytest.mark.parametrize("address", [b"127.0.0.1:1", b"no port", b"", b"999.1.1.1:70000"])
def test_a_peer_that_cannot_be_dialled_is_lost(both, address):
    left = both.left
    card = msgspec.structs.replace(both.right.card(), agent="nowhere#0", address=address)
    left.transport.add_peer(card)

    def knock():
        left.poll()
        with contextlib.suppress(PeerLost):
            left.transport.notify("nowhere#0", b"x")

    eventually(lambda: knock() or left.downs() == 1, "the dial fails")
    with pytest.raises(PeerLost):
        left.transport.notify("nowhere#0", b"x")


def test_what_waits_for_a_peer_is_bounded(both, monkeypatch):
    """The peer never polls: once the socket is full, notes wait here up to the bound."""
    monkeypatch.setattr(stream, "WAITING_BYTES_LIMIT", 1 << 20)
    left, note = both.left, bytes(64 << 10)
    handle = write(left, both.right, [0], [0], b"before")
    sends = (left.transport.notify(both.right.agent, note) for _ in range(2000))
    with pytest.raises(PeerLost, match="does not read"):
        deque(sends, maxlen=0)
    left.poll()
    assert left.downs() == 1
    assert left.wrote()[handle] in ([True], [False])


def test_what_has_been_sent_waits_no_longer(both, monkeypatch):
    """A peer that reads may be sent any amount, bit by bit."""
    monkeypatch.setattr(stream, "WAITING_BYTES_LIMIT", 1 << 20)
    left, note = both.left, bytes(512 << 10)
    for count in range(1, 9):
        left.transport.notify(both.right.agent, note)
        both.until(lambda c=count: len(both.right.notes()) == c, "a note")
