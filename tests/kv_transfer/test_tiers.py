"""The tiers as a worker uses them: right bytes or a miss, at once or on their thread, whatever
happens to the memory and the disk below."""

import errno
import logging
import os
import queue
import random
import subprocess
import sys
import threading

import numpy as np
import pytest
from diptych.kv_transfer.tiers import TieredStore, TierLimits
from diptych.kv_transfer.tiers.disk import HEADER_STRIDE, PAGE
from diptych.kv_transfer.tiers.gate import RETRY_S

from .tiers_support import (
    BLOCK,
    DEADLINE_S,
    MODEL,
    ROOT,
    Client,
    block,
    client,
    eventually,
    in_namespace,
    name,
    open_store,
)

__all__ = ["client"]


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def broken(monkeypatch):
    """`broken(function, number)`: that function of `os` fails from now on; None mends it."""
    real = {function: getattr(os, function) for function in ("pwritev", "preadv", "open")}

    def set_to(function, number):
        def fail(*_args, **_kwargs):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, function, fail if number else real[function])

    return set_to


def test_what_was_stored_is_loaded_and_what_was_not_is_a_miss(client) -> None:
    tiers = client(memory=4)
    tiers.store(1, 2)
    assert tiers.held(1, 2, 3) == 2 and tiers.held(3, 1) == 0
    assert tiers.load(1, 2, 3) == [1, 2] and tiers.load(3, 1) == []
    assert tiers.memory["loaded"] == 2 and tiers.memory["hits"] == 2


def test_a_known_block_is_stored_once(client) -> None:
    tiers = client(memory=4)
    tiers.store(1, 1, 1)
    assert (tiers.memory["stored"], tiers.memory["entries"]) == (1, 1)


def test_the_caller_may_reuse_its_memory_after_done(client) -> None:
    tiers, done, mine = client(memory=4), queue.SimpleQueue(), block(name(1))
    assert tiers.tiers.store(name(1), memoryview(mine), done.put)
    assert done.get(timeout=DEADLINE_S)
    mine[:] = 0
    assert tiers.load(1) == [1]


def test_blocks_go_to_disk_and_come_back_from_it(client, tmp_path) -> None:
    tiers = client(memory=2, disk=8, folder=tmp_path)
    only_on_disk = tiers.fill_disk(6, memory=2)
    assert tiers.held(*range(6)) == 6
    assert tiers.load(*only_on_disk) == only_on_disk
    assert tiers.disk["loaded"] == 4
    eventually(lambda: tiers.memory["promoted"] >= 2, "used blocks came back to memory")
    assert tiers.load(*range(6)) == list(range(6)) and tiers.memory["loaded"] >= 2


def test_neither_tier_grows_beyond_its_bound(client, tmp_path) -> None:
    tiers = client(memory=3, disk=7, folder=tmp_path)
    for number in range(60):
        tiers.store(number)
        tiers.load(number // 2)
    tiers.settled()
    memory, disk = tiers.memory, tiers.disk
    assert memory["entries"] == 3 and disk["entries"] == 7
    assert memory["bytes"] <= memory["bytes_max"] == 3 * BLOCK
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 7 * (2 * PAGE + 128) + 8192


def test_after_a_restart_the_disk_is_warm(client, tmp_path) -> None:
    first = client(memory=2, disk=8, folder=tmp_path)
    first.fill_disk(5, memory=2)
    first.tiers.close()
    again = client(memory=2, disk=8, folder=tmp_path)
    assert again.disk["found"] == 5 and again.load(*range(5)) == list(range(5))


def test_blocks_of_another_model_are_emptied_and_it_is_said(client, tmp_path, caplog) -> None:
    first = client(memory=2, disk=8, folder=tmp_path)
    first.fill_disk(3, memory=2)
    first.tiers.close()
    other = client(memory=2, disk=8, folder=tmp_path, model=b"some other model")
    assert other.held(0) == 0 and "another model, layout or size: emptied" in caplog.text


def test_a_damaged_copy_in_memory_is_replaced_by_that_on_disk(client, tmp_path) -> None:
    tiers = client(memory=2, disk=8, folder=tmp_path)
    tiers.fill_disk(1, memory=2)
    tiers.tiers._memory.view(tiers.tiers._index.find_slots(name(0))[0])[17] ^= 1
    assert tiers.load(0) == [0]
    assert tiers.memory["failures"] == {"checksum": 1} and tiers.disk["loaded"] == 1


def test_a_damaged_copy_in_memory_alone_is_a_miss(client) -> None:
    tiers = client(memory=2)
    tiers.store(0)
    tiers.tiers._memory.view(0)[17] ^= 1
    assert tiers.load(0) == [] and tiers.held(0) == 0
    tiers.store(0)
    assert tiers.load(0) == [0]


def test_a_flipped_bit_on_disk_is_a_miss_that_is_counted_and_gone(client, tmp_path) -> None:
    tiers = client(memory=1, disk=8, folder=tmp_path)
    tiers.fill_disk(4, memory=1)
    store = tiers.tiers._disk
    with open(store.path, "r+b") as file:
        file.seek(store._offset(tiers.tiers._index.find_slots(name(1))[1]) + BLOCK - 1)
        file.write(bytes([block(name(1))[-1] ^ 128]))
    assert tiers.load(0, 1, 2) == [0]  # a prefix ends at its first miss
    assert tiers.disk["failures"] == {"checksum": 1} and tiers.held(1) == 0
    tiers.tiers.close()
    assert client(memory=1, disk=8, folder=tmp_path).disk["found"] == 3


def test_a_flipped_bit_in_a_header_costs_that_block_only(client, tmp_path) -> None:
    first = client(memory=1, disk=8, folder=tmp_path)
    first.fill_disk(4, memory=1)
    first.tiers.close()
    with open(tmp_path / "blocks.kv", "r+b") as file:
        file.seek(PAGE + 2 * HEADER_STRIDE + 30)
        file.write(b"\xaa")
    again = client(memory=1, disk=8, folder=tmp_path)
    assert again.disk["failures"] == {"header": 1} and again.disk["found"] == 3
    assert again.load(0, 1) == [0, 1] and again.load(2) == []


def test_a_truncated_file_costs_what_was_behind_the_cut(client, tmp_path) -> None:
    tiers = client(memory=2, disk=8, folder=tmp_path)
    tiers.fill_disk(5, memory=2)
    os.truncate(tmp_path / "blocks.kv", tiers.tiers._disk._offset(2))
    assert tiers.load(0, 1, 2) == [0, 1] and tiers.disk["failures"] == {"truncated": 1}
    tiers.store(2)  # and it is whole again
    tiers.settled()
    tiers.tiers.close()
    again = client(memory=2, disk=8, folder=tmp_path)
    assert again.load(0, 1, 2) == [0, 1, 2] and again.load(3) == []


@pytest.mark.parametrize("harm", ["unlink", "rename", "folder"])
def test_a_vanished_file_is_made_anew(client, tmp_path, harm) -> None:
    folder = tmp_path / "tier"
    tiers = client(memory=1, disk=8, folder=folder)
    tiers.fill_disk(3, memory=1)
    match harm:
        case "unlink":
            (folder / "blocks.kv").unlink()
        case "rename":
            (folder / "blocks.kv").rename(folder / "other")
        case "folder":
            folder.rename(tmp_path / "other")
    tiers.store(5)
    tiers.settled()
    assert tiers.disk["failures"] == {"vanished": 1} and tiers.disk["state"] == "on"
    assert tiers.load(0) == [] and tiers.load(5) == [5] and (folder / "blocks.kv").exists()


def test_a_read_error_is_a_miss(client, tmp_path, broken) -> None:
    tiers = client(memory=1, disk=8, folder=tmp_path)
    tiers.fill_disk(3, memory=1)
    broken("preadv", errno.EIO)
    assert tiers.load(0) == [] and tiers.disk["failures"]["io_error"] >= 1
    broken("preadv", None)
    assert tiers.load(1) == [1]


def test_a_copy_back_to_memory_that_reads_badly_is_no_copy(client, tmp_path, monkeypatch) -> None:
    tiers, reads, real = client(memory=2, disk=8, folder=tmp_path), [], os.preadv
    tiers.fill_disk(4, memory=2)

    def second_is_bad(fd, views, offset):
        reads.append(offset)
        count = real(fd, views, offset)
        views[0][5] ^= len(reads) == 2
        return count

    monkeypatch.setattr(os, "preadv", second_is_bad)
    assert tiers.load(0) == [0]
    eventually(lambda: tiers.disk["failures"] == {"checksum": 1}, "the bad read is counted")
    assert tiers.held(0) == 0 and tiers.memory["promoted"] == 0 and tiers.held(1, 3) == 2


@pytest.mark.parametrize(
    ("number", "reason"),
    [(errno.ENOSPC, "no_space"), (errno.EROFS, "read_only"), (errno.EIO, "io_error")],
)
def test_a_disk_that_cannot_be_written_is_switched_off_and_tried_again(
    client, tmp_path, broken, caplog, number, reason
) -> None:
    clock = Clock()
    tiers = client(memory=2, disk=8, folder=tmp_path, clock=clock)
    tiers.fill_disk(3, memory=2)
    broken("pwritev", number)
    tiers.store(5)
    eventually(lambda: tiers.disk["state"] == f"off: {reason}", "the disk is off")
    tiers.store(6, 7, 8)
    assert tiers.load(0) == [0] and tiers.load(8) == [8]  # reads go on
    assert tiers.disk["failures"] == {reason: 3}
    clock.now += RETRY_S
    tiers.store(9)
    eventually(lambda: tiers.disk["failures"] == {reason: 4}, "one try")
    broken("pwritev", None)
    tiers.store(10)
    assert tiers.disk["state"].startswith("off")  # the wait has doubled
    clock.now += 2 * RETRY_S
    tiers.store(11)
    tiers.settled()
    assert tiers.disk["state"] == "on" and tiers.load(11) == [11]
    assert tiers.tiers.statistics()["switched_off"] == 1
    assert caplog.text.count("switched off") == 1 and caplog.text.count("works again") == 1


def test_the_disk_is_tried_again_without_anybody_asking(client, tmp_path, broken, monkeypatch):
    monkeypatch.setattr("diptych.kv_transfer.tiers.gate.RETRY_S", 0.05)
    tiers = client(memory=2, disk=8, folder=tmp_path)
    broken("pwritev", errno.ENOSPC)
    tiers.store(1)
    eventually(lambda: tiers.disk["state"] == "off: no_space", "the disk is off")
    broken("pwritev", None)
    tiers.settled()


def test_a_folder_that_cannot_be_opened_leaves_memory_alone_until_it_can(
    client, tmp_path, broken
) -> None:
    clock = Clock()
    broken("open", errno.EROFS)
    tiers = client(memory=2, disk=8, folder=tmp_path, clock=clock)
    assert tiers.disk["state"] == "off: read_only"
    tiers.store(1)
    assert tiers.load(1) == [1]
    broken("open", None)
    clock.now += RETRY_S
    tiers.store(2)
    tiers.settled()
    assert tiers.disk["entries"] == 2


def test_a_second_process_runs_without_the_disk_and_says_so(client, tmp_path, caplog) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from tests.kv_transfer.tiers_support import open_store\n"
        "store = open_store(Path(sys.argv[1])); print('mine', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    pipe, clock = subprocess.PIPE, Clock()
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "mine\n"
        tiers = client(memory=2, disk=8, folder=tmp_path, clock=clock)
        assert tiers.disk["state"] == "off: locked"
        assert "switched off (locked: another process has it)" in caplog.text
        tiers.store(1)
        assert tiers.load(1) == [1]
        child.communicate()
    clock.now += RETRY_S
    tiers.store(2)
    tiers.settled()  # the first one ended: the folder is free


FULL = """
import os, resource
from pathlib import Path
from tests.kv_transfer.tiers_support import Client, disk_bytes
{before}
tiers = Client(memory=2, disk={slots}, folder=Path({folder!r}))
tiers.store(*range(6))
print(tiers.disk["state"], tiers.load(5, 4), tiers.disk["entries"])
tiers.tiers.close()
"""


def test_a_really_full_disk_costs_the_disk_tier_only(tmp_path) -> None:
    code = FULL.format(before="", slots=1000, folder=str(tmp_path))
    out = in_namespace(f"mount -t tmpfs -o size=1m tmpfs {tmp_path}", tmp_path, code)
    assert out == "off: no_space [5, 4] 0\n"


def test_a_really_read_only_folder_costs_the_disk_tier_only(tmp_path) -> None:
    code = FULL.format(before="", slots=4, folder=str(tmp_path))
    out = in_namespace(f"mount -t tmpfs -o ro tmpfs {tmp_path}", tmp_path, code)
    assert out == "off: read_only [5, 4] 0\n"


def test_a_limit_on_file_sizes_is_a_full_disk(tmp_path) -> None:
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))"
    code = FULL.format(before=limit, slots=8, folder=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "off: no_space [5, 4] 0\n", done.stderr


# ---- requests ------------------------------------------------------------------------------------


class Held:
    """Keeps the tiers' thread inside a callback until `go`."""

    def __init__(self, tiers):
        self.inside, self.gate = threading.Event(), threading.Event()
        assert tiers.load([], self._done)
        assert self.inside.wait(DEADLINE_S)

    def _done(self, _outcome):
        self.inside.set()
        assert self.gate.wait(DEADLINE_S)

    def go(self):
        self.gate.set()


def view(number):
    return memoryview(block(name(number)))


def target():
    return memoryview(np.zeros(BLOCK, np.uint8))


def test_a_store_that_does_not_fit_in_the_queue_is_refused_at_once(client) -> None:
    tiers, done = client(memory=8, request_limit=3), queue.SimpleQueue()
    held = Held(tiers.tiers)
    answers = [tiers.tiers.store(name(n), view(n), done.put) for n in range(6)]
    # the load in whose callback the thread is counts no more
    assert answers == [True] * 3 + [False] * 3 and tiers.tiers.load([], done.put) is False
    assert tiers.tiers.statistics()["refused"] == {"store": 3, "load": 1}
    held.go()
    assert [done.get(timeout=DEADLINE_S) for _ in range(3)] == [True] * 3
    tiers.store(4)


def test_bytes_in_flight_are_bounded_but_one_request_always_fits(client) -> None:
    tiers, done = client(memory=8, in_flight_bytes_limit=2 * BLOCK), queue.SimpleQueue()
    tiers.store(0, 1, 2, 3)
    assert tiers.load(0, 1, 2, 3) == [0, 1, 2, 3]
    held = Held(tiers.tiers)
    answers = [tiers.tiers.store(name(n), view(n), done.put) for n in range(4, 8)]
    assert answers == [True, True, False, False]
    assert tiers.tiers.statistics()["in_flight_bytes"] == 2 * BLOCK
    held.go()


def test_slots_that_are_all_in_flight_refuse_a_store(client) -> None:
    tiers, done = client(memory=2), queue.SimpleQueue()
    held = Held(tiers.tiers)
    answers = [tiers.tiers.store(name(n), view(n), done.put) for n in range(3)]
    assert answers == [True, True, False]
    held.go()
    assert [done.get(timeout=DEADLINE_S) for _ in range(2)] == [True, True]


def test_a_load_goes_before_stores_and_its_blocks_stay_until_it_is_served(client) -> None:
    tiers, order = client(memory=2), queue.SimpleQueue()
    tiers.store(0, 1)
    held = Held(tiers.tiers)
    pair = (name(0), target())
    assert tiers.tiers.load([pair], lambda arrived: order.put(("load", arrived)))
    assert tiers.tiers.store(name(2), view(2), lambda ok: order.put(("store", ok)))
    assert not tiers.tiers.store(name(3), view(3), order.put)  # 0 waits, 2 is under way
    assert tiers.held(0) == 1 and tiers.held(1) == 0
    held.go()
    assert order.get(timeout=DEADLINE_S) == ("load", [name(0)])
    assert order.get(timeout=DEADLINE_S) == ("store", True)


def test_a_load_that_arrives_while_stores_wait_is_served_first(client) -> None:
    tiers, order = client(memory=8), queue.SimpleQueue()
    tiers.store(0)
    held = Held(tiers.tiers)
    for number in range(1, 4):
        assert tiers.tiers.store(name(number), view(number), order.put)
    assert tiers.tiers.load([(name(0), target())], order.put)
    held.go()
    assert order.get(timeout=DEADLINE_S) == [name(0)]


def test_close_answers_everything_that_waits_and_ends_the_thread(client) -> None:
    tiers, answers = client(memory=8), queue.SimpleQueue()
    tiers.store(0)
    held = Held(tiers.tiers)
    assert tiers.tiers.store(name(1), view(1), answers.put)
    assert tiers.tiers.load([(name(0), target())], answers.put)
    closing = threading.Thread(target=tiers.tiers.close)
    closing.start()
    eventually(lambda: not tiers.tiers._open, "closing")
    held.go()
    closing.join(DEADLINE_S)
    assert sorted([answers.get(), answers.get()], key=str) == [False, []]
    assert not tiers.tiers._thread.is_alive() and tiers.held(0) == 0
    assert tiers.tiers.store(name(2), view(2), answers.put) is False
    assert tiers.tiers.load([(name(0), target())], answers.put) is False
    assert tiers.tiers.statistics()["in_flight_bytes"] == 0


def test_a_callback_that_fails_ends_nothing(client, caplog) -> None:
    tiers = client(memory=2)
    with caplog.at_level(logging.CRITICAL):
        assert tiers.tiers.load([], lambda _: 1 // 0)
        tiers.store(1)
    assert tiers.load(1) == [1]


def test_when_the_thread_fails_every_request_is_still_answered(client, monkeypatch) -> None:
    tiers, answers = client(memory=4), queue.SimpleQueue()
    tiers.store(0)
    held = Held(tiers.tiers)
    monkeypatch.setattr(tiers.tiers, "_load_block", lambda *_: 1 // 0)
    assert tiers.tiers.load([(name(0), target())], answers.put)
    assert tiers.tiers.store(name(1), view(1), answers.put)
    held.go()
    assert [answers.get(timeout=DEADLINE_S) for _ in range(2)] == [[], False]
    assert tiers.held(0) == 0 and tiers.tiers.store(name(2), view(2), answers.put) is False
    monkeypatch.setattr(tiers.tiers._index, "validate", lambda: None)  # it ended in the middle


def test_several_threads_get_right_bytes_or_misses(client, tmp_path) -> None:
    tiers, failed, loaded = client(memory=4, disk=10, folder=tmp_path), [], []

    def user(seed):
        rng, answers = random.Random(seed), queue.SimpleQueue()
        try:
            for _ in range(150):
                number = rng.randrange(16)
                if rng.random() < 0.5:
                    if tiers.tiers.store(name(number), view(number), answers.put):
                        answers.get(timeout=DEADLINE_S)
                else:
                    loaded.extend(tiers.load(*rng.sample(range(16), 3)))
        except BaseException as error:
            failed.append(error)

    users = [threading.Thread(target=user, args=(seed,)) for seed in range(3)]
    for each in users:
        each.start()
    for each in users:
        each.join()
    assert failed == [] and len(loaded) > 50
    assert tiers.tiers.statistics()["requests"] == 0


class Faults:
    """Reads and writes that fail, flip a bit or stop short, at random."""

    def __init__(self, rng, rate):
        self.rng, self.rate = rng, rate
        self.preadv, self.pwritev = os.preadv, os.pwritev

    def _trouble(self):
        if self.rng.random() < self.rate / 2:
            number = self.rng.choice([errno.EIO, errno.ENOSPC, errno.EROFS])
            raise OSError(number, "made up")
        return self.rng.random() < self.rate

    def read(self, fd, views, offset):
        flip, count = self._trouble(), self.preadv(fd, views, offset)
        if flip and count:
            views[0][self.rng.randrange(count)] ^= 1 << self.rng.randrange(8)
        return count

    def write(self, fd, views, offset):
        data = bytearray(views[0])
        if self._trouble():
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        return self.pwritev(fd, [data[: self.rng.randint(1, len(data))]], offset)


@pytest.mark.parametrize("seed", range(4))
def test_a_faulty_disk_never_gives_wrong_bytes(tmp_path, monkeypatch, seed) -> None:
    rng = random.Random(seed)
    faults = Faults(random.Random(seed), rate=0.1)
    monkeypatch.setattr(os, "preadv", faults.read)
    monkeypatch.setattr(os, "pwritev", faults.write)
    monkeypatch.setattr("diptych.kv_transfer.tiers.gate.RETRY_S", 0.001)
    monkeypatch.setattr("diptych.kv_transfer.tiers.gate.RETRY_LIMIT_S", 0.004)
    loaded, answers = 0, queue.SimpleQueue()
    for _ in range(3):  # restarts
        tiers = Client(memory=3, disk=10, folder=tmp_path)
        for _ in range(300):
            if rng.random() < 0.5:
                number = rng.randrange(16)
                if tiers.tiers.store(name(number), view(number), answers.put):
                    answers.get(timeout=DEADLINE_S)
            else:
                loaded += len(tiers.load(*rng.sample(range(16), 3)))  # compares the bytes
            with tiers.tiers._wake:
                tiers.tiers._index.validate()
        statistics = tiers.tiers.statistics()
        tiers.tiers.close()
        assert statistics["requests"] == statistics["in_flight_bytes"] == 0
    assert loaded > 100 and open_store(tmp_path, 10).slots == 10


# ---- what has left -------------------------------------------------------------------------------


class Told:
    """What a client of tiers believes that they hold, by what it is told in order."""

    def __init__(self, memory: int) -> None:
        self.believed: set[bytes] = set()
        self.tiers = TieredStore(
            BLOCK, MODEL, TierLimits(memory * BLOCK, request_limit=10_000), tell_left=self.forget
        )

    def forget(self, contents: list[bytes]) -> None:
        self.believed -= set(contents)

    def store(self, number: int) -> None:
        def done(held: bool) -> None:
            if held:
                self.believed.add(name(number))

        self.tiers.store(name(number), memoryview(block(name(number))), done)


def test_a_block_that_is_evicted_right_behind_its_copy_is_believed_by_nobody(monkeypatch) -> None:
    told = Told(memory=1)
    call_done = told.tiers._end_store

    def store_another_first(store, held) -> None:
        if store.content == name(1):
            told.store(2)  # as another thread might, between the copy and its answer
        call_done(store, held)

    monkeypatch.setattr(told.tiers, "_end_store", store_another_first)
    told.store(1)
    eventually(lambda: told.believed == {name(2)}, "only the second is held")
    told.tiers.close()
    assert told.believed == set()


def test_when_the_thread_fails_all_that_left_is_told(monkeypatch) -> None:
    told = Told(memory=2)
    for number in (1, 2):
        told.store(number)
    eventually(lambda: len(told.believed) == 2, "both are stored")

    def fail(_: object) -> None:
        told.tiers._index.begin_store(name(4))  # evicts the second, right before the end
        raise RuntimeError("broken")

    monkeypatch.setattr(told.tiers, "_serve", fail)
    told.store(3)  # which evicts the first
    eventually(lambda: not told.tiers.is_open, "the thread has ended")
    eventually(lambda: not told.believed, "nothing is believed")


def test_loads_are_counted_without_their_wait() -> None:
    told = Told(memory=4)
    for number in range(2):
        told.store(number)
    eventually(lambda: len(told.believed) == 2, "both are stored")
    done: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
    view = memoryview(np.zeros(BLOCK, np.uint8))
    assert told.tiers.load([(name(0), view), (name(1), view), (name(9), view)], done.put)
    assert done.get(timeout=10) == [name(0), name(1)]
    assert told.tiers.loads_done.blocks == 2 and told.tiers.loads_done.seconds > 0
    told.tiers.close()
