"""Fences between real processes: when does a transport say that a peer writes no more?"""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from diptych.kv_transfer.transport import (
    NotificationReceived,
    PeerDisconnected,
    PostedWriteEnded,
    card_of,
)
from diptych.kv_transfer.transports import nixl, open_transport, process

from ..kit.conformance import DEADLINE_S, MemoryPool, spans
from .support import SECRET, eventually, needs_nixl

KINDS = ["tcp", "shm", pytest.param("nixl", marks=needs_nixl)]


def open_end(kind, agent, seed):
    pool = MemoryPool(seed=seed)
    return pool, open_transport(kind, agent, pool, lambda *_: True, "127.0.0.1", secret=SECRET)


def writer(kind, pipe):
    """The other process: copies its pool into the peer's, over and over."""
    pool, transport = open_end(kind, "writer#0", 1)
    pipe.send(card_of("writer#0", transport, pool))
    peer = pipe.recv()
    transport.add_peer(peer)
    blocks = range(pool.blocks)
    while True:
        transport.write(peer.agent, spans(pool.block_bytes, blocks, blocks), b"wrote")
        transport.poll()
        time.sleep(0.0005)


class Reader:
    """This process's end, and the writer's process."""

    def __init__(self, kind):
        near, far = multiprocessing.get_context("spawn").Pipe()
        self.child = multiprocessing.get_context("spawn").Process(
            target=writer, args=(kind, far), daemon=True
        )
        self.child.start()
        far.close()
        self.pool, self.transport = open_end(kind, "reader#0", 2)
        assert near.poll(DEADLINE_S), "the writer did not start"
        self.transport.add_peer(near.recv())
        near.send(card_of("reader#0", self.transport, self.pool))
        self.notes = 0
        eventually(self.written, "the first write")

    def written(self):
        self.notes += sum(
            isinstance(event, NotificationReceived) for event in self.transport.poll()
        )
        return self.notes > 0

    def fenced(self):
        self.transport.poll()
        return self.transport.fenced("writer#0")

    def quiet(self):
        """Nothing of the writer's lands any more: what we write here stays."""
        self.pool.view[:] = bytes(self.pool.size)
        for _ in range(200):
            self.transport.poll()
            time.sleep(0.0005)
        return not any(self.pool.view)

    def close(self):
        os.kill(self.child.pid, signal.SIGKILL)
        self.child.join(timeout=DEADLINE_S)
        self.transport.close()


@pytest.fixture
def reader(request):
    end = Reader(request.param)
    yield end
    end.close()


@pytest.mark.parametrize("reader", KINDS, indirect=True)
def test_a_killed_writer_is_fenced_and_writes_no_more(reader):
    os.kill(reader.child.pid, signal.SIGKILL)
    eventually(reader.fenced, "the fence of a killed writer")
    assert reader.quiet()


@pytest.mark.parametrize("reader", ["tcp", "shm"], indirect=True)
def test_a_frozen_writer_is_fenced_and_writes_nothing_when_it_wakes_up(reader):
    """Shared memory: unless it is frozen in a copy; then it is fenced once that has ended."""
    os.kill(reader.child.pid, signal.SIGSTOP)
    if not reader.fenced():
        os.kill(reader.child.pid, signal.SIGCONT)
        eventually(reader.fenced, "the end of a copy")
    os.kill(reader.child.pid, signal.SIGCONT)
    assert reader.quiet()


class BusyAgent:
    """Stands for NIXL: writes to the peer `slow` do not end, those to others do when asked."""

    def __init__(self):
        self.ended = []

    def make_prepped_xfer(self, operation, own_units, source, peer_units, target, note):
        return peer_units, note

    def transfer(self, transfer):
        return "PROC"

    def check_xfer_state(self, transfer):
        return "PROC" if transfer[0] == "slow" else "DONE"

    def release_xfer_handle(self, transfer):
        self.ended.append(transfer)


@needs_nixl
def test_a_slow_write_of_nixl_holds_back_no_other_peers_notes(monkeypatch):
    pool, transport = open_end("nixl", "busy#0", 1)
    agent = BusyAgent()
    with monkeypatch.context() as patch:
        patch.setattr(transport, "_agent", agent)
        for name in ("slow", "quick"):
            region = SimpleNamespace(units=lambda unit_bytes, name=name: name)
            transport._peers[name] = SimpleNamespace(region=region, is_lost=False)
        for peer, note in (("slow", b"1"), ("quick", b"2"), ("slow", b"3")):
            transport.write(peer, spans(pool.block_bytes, [0], [0]), note)
        assert agent.ended == [("quick", b"2")], "the next write has had it sent"
        transport._peers.clear()
        transport._writes.clear()
    transport.close()


@needs_nixl
def test_a_write_that_nixl_does_not_release_ends_when_it_does(monkeypatch):
    """Until then the peer's blocks may still be written; and nothing may end the transfer thread."""
    pool, transport = open_end("nixl", "stuck#0", 1)

    class FailedAgent(BusyAgent):
        is_stuck = True

        def check_xfer_state(self, transfer):
            raise RuntimeError("REMOTE_DISCONNECT")

        def release_xfer_handle(self, transfer):
            if self.is_stuck:
                raise RuntimeError("it is still under way")

        def get_new_notifs(self):
            return {}

    agent = FailedAgent()
    with monkeypatch.context() as patch:
        patch.setattr(transport, "_agent", agent)
        region = SimpleNamespace(units=lambda unit_bytes: "peer")
        transport._peers["peer"] = SimpleNamespace(region=region, is_lost=False)
        handle = transport.write("peer", spans(pool.block_bytes, [0], [0]), b"1")
        assert transport.poll() == [PeerDisconnected("peer")]
        assert transport.poll() == [] and transport.moving
        agent.is_stuck = False
        assert transport.poll() == [PostedWriteEnded(handle, ok=False, reason="RuntimeError")]
        assert not transport.moving
        transport._peers.clear()
    transport.close()


@needs_nixl
@pytest.mark.parametrize("reader", ["nixl"], indirect=True)
def test_nixl_does_not_fence_a_frozen_writer_of_this_host_until_it_is_gone(reader, monkeypatch):
    monkeypatch.setattr(nixl, "GRACE_S", 0.0)
    os.kill(reader.child.pid, signal.SIGSTOP)
    assert not any(reader.fenced() for _ in range(20))
    os.kill(reader.child.pid, signal.SIGKILL)
    eventually(reader.fenced, "the fence of a killed writer")
    assert reader.quiet()


class Mortal:
    """A process that lives until it is told to die."""

    alive = True

    def has_ended(self):
        return not self.alive

    def close(self):
        pass


@needs_nixl
def test_nixl_grants_the_grace_after_a_process_is_gone_not_before(monkeypatch):
    now, other = [50.0], Mortal()
    pool, transport = open_end("nixl", "near#0", 1)
    far_pool, far = open_end("nixl", "far#0", 2)
    monkeypatch.setattr(nixl.time, "monotonic", lambda: now[0])
    transport.add_peer(card_of("far#0", far, far_pool))
    transport._peers["far#0"].process = other
    assert not transport.fenced("far#0")
    now[0] += 100.0
    assert not transport.fenced("far#0")
    other.alive = False
    now[0] += 100.0
    assert not transport.fenced("far#0"), "it may have died just now"
    now[0] += nixl.GRACE_S * 0.9
    assert not transport.fenced("far#0")
    now[0] += nixl.GRACE_S * 0.2
    assert transport.fenced("far#0")
    transport.close()
    far.close()
    assert pool.size == far_pool.size


class Elsewhere(Mortal):
    """A process of another host, of which nothing can be known here."""

    is_own_process = False

    def has_ended(self):
        return None


@needs_nixl
def test_nixl_fences_a_process_elsewhere_only_when_the_cluster_knows_that_it_is_gone(monkeypatch):
    now = [50.0]
    _, transport = open_end("nixl", "near#1", 1)
    far_pool, far = open_end("nixl", "far#1", 2)
    monkeypatch.setattr(nixl.time, "monotonic", lambda: now[0])
    transport.add_peer(card_of("far#1", far, far_pool))
    transport._peers["far#1"].process = Elsewhere()
    for _ in range(3):
        now[0] += 1000.0
        assert not transport.fenced("far#1"), "it may be frozen, and wake up"
    transport.mark_process_dead("far#1")
    assert not transport.fenced("far#1"), "its bytes may wait in our buffers"
    now[0] += nixl.GRACE_S * 1.1
    assert transport.fenced("far#1")
    transport.close()
    far.close()


# ---- what is known of a process ------------------------------------------------------------------


@pytest.fixture
def sleeper():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield child
    child.kill()
    child.communicate()


def identity_of(pid):
    space, _, _ = process.own_process_identity().rsplit(" ", 2)
    return f"{space} {pid} {process._start_time(pid)}"


@pytest.mark.skipif(not process.own_process_identity(), reason="there is no /proc here")
def test_a_process_is_gone_once_it_has_ended_and_not_when_it_is_frozen(sleeper):
    watch = process.ProcessWatch(identity_of(sleeper.pid))
    assert watch.has_ended() is False
    os.kill(sleeper.pid, signal.SIGSTOP)
    assert watch.has_ended() is False
    os.kill(sleeper.pid, signal.SIGKILL)
    eventually(lambda: watch.has_ended() is True, "a killed process is gone, reaped or not")
    assert sleeper.poll() is not None or sleeper.wait() == -signal.SIGKILL
    assert watch.has_ended() is True
    watch.close()


def test_of_this_very_process_nothing_is_concluded():
    """Two agents of one process: one may close while the process lives on."""
    assert process.ProcessWatch(process.own_process_identity()).has_ended() is None


@pytest.mark.skipif(not process.own_process_identity(), reason="there is no /proc here")
def test_a_process_number_that_was_given_out_again_is_another_process(sleeper):
    space, pid, started = identity_of(sleeper.pid).rsplit(" ", 2)
    again = process.ProcessWatch(f"{space} {pid} {int(started) - 1}")
    assert again.has_ended() is True
    again.close()


@pytest.mark.parametrize("identity", ["", "elsewhere pid:[1] 1 1", "what", "a b c d"])
def test_of_a_process_elsewhere_nothing_is_known(identity):
    assert process.ProcessWatch(identity).has_ended() is None
