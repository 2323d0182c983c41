"""The disk store: whole blocks or misses, after every kind of damage, with real files."""

import errno
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from diptych.kv_transfer.tiers.disk import HEADER_STRIDE, NAME, PAGE, DiskStore
from diptych.kv_transfer.tiers.faults import DiskUnavailable, TierFault

from .tiers_support import BLOCK, ROOT, in_namespace, name, open_store, read, write

SLOTS = 4


@pytest.fixture
def store(tmp_path):
    """Three blocks in slots 0 to 2 of four."""
    made = open_store(tmp_path, SLOTS)
    for slot in range(3):
        assert write(made, slot, name(slot)) is None
    yield made
    made.close()


def reopened(store, **kwargs):
    store.close()
    return open_store(store.path.parent, SLOTS, **kwargs)


def flip(store, offset):
    with open(store.path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_a_restart_finds_every_block_oldest_first(store) -> None:
    assert write(store, 0, name(7)) is None  # block 0 is gone, 7 is the newest
    again = reopened(store)
    assert again.found_blocks == [(name(1), 1), (name(2), 2), (name(7), 0)]
    assert [read(again, slot, content) for content, slot in again.found_blocks] == [True] * 3
    again.close()


def test_the_file_keeps_within_its_bound_and_is_allocated_at_once(tmp_path) -> None:
    for capacity in (64 << 10, 100_000, 1 << 20):
        store = DiskStore(tmp_path / str(capacity), BLOCK, capacity, bytes(16))
        allocated = os.stat(store.path).st_blocks * 512
        assert store.slots > 0 and store.size <= capacity and allocated >= store.size
        store.close()


@pytest.mark.parametrize("bit", [0, BLOCK // 2, BLOCK - 1])
def test_a_flipped_bit_in_a_payload_is_a_miss(store, bit) -> None:
    flip(store, store._offset(1) + bit)
    assert read(store, 1, name(1)) is TierFault.CHECKSUM
    again = reopened(store)
    assert read(again, 1, name(1)) is TierFault.CHECKSUM and read(again, 2, name(2)) is True
    again.close()


@pytest.mark.parametrize("byte", range(0, 80, 7))
def test_a_flipped_bit_in_a_header_is_a_miss_after_a_restart(store, byte) -> None:
    flip(store, PAGE + HEADER_STRIDE + byte)
    again = reopened(store)
    assert [slot for _, slot in again.found_blocks] == [0, 2]
    assert again.header_faults == {TierFault.HEADER: 1}
    again.close()


def test_a_header_that_strayed_to_another_slot_is_not_believed(store) -> None:
    with open(store.path, "r+b") as file:
        file.seek(PAGE)
        header = file.read(HEADER_STRIDE)
        file.seek(PAGE + 3 * HEADER_STRIDE)
        file.write(header)
    again = reopened(store)
    assert again.header_faults == {TierFault.HEADER: 1} and len(again.found_blocks) == 3
    again.close()


def test_right_bytes_under_another_name_or_model_are_wrong_bytes(store) -> None:
    assert read(store, 1, name(2)) is TierFault.CHECKSUM
    store.compatibility = b"some other model"
    assert read(store, 1, name(1)) is TierFault.CHECKSUM


def test_a_truncated_file_is_a_miss_now_and_after_a_restart(store) -> None:
    os.truncate(store.path, store._offset(2) + 100)
    assert read(store, 2, name(2)) is TierFault.TRUNCATED and read(store, 1, name(1)) is True
    again = reopened(store)
    assert again.found_blocks == [(name(0), 0), (name(1), 1)]
    assert again.header_faults == {TierFault.TRUNCATED: 1}
    assert os.stat(again.path).st_size == again.size
    again.close()


@pytest.mark.parametrize("size", [0, 30, PAGE + 100])
def test_a_file_cut_before_its_payloads_is_used_again(store, size) -> None:
    os.truncate(store.path, size)
    again = reopened(store)
    assert again.found_blocks == [] and write(again, 0, name(5)) is None and read(again, 0, name(5))
    again.close()


def test_a_file_of_another_model_layout_or_size_is_emptied(store) -> None:
    again = reopened(store, model=b"some other model")
    assert again.was_emptied and again.found_blocks == []
    last = reopened(again)
    assert last.was_emptied and last.found_blocks == []
    last.close()
    larger = open_store(store.path.parent, SLOTS + 1)
    assert larger.was_emptied and larger.found_blocks == []
    larger.close()


def test_a_vanished_or_replaced_file_is_not_written_to(store) -> None:
    os.rename(store.path, store.path.with_name("elsewhere"))
    assert write(store, 3, name(3)) is TierFault.VANISHED
    store.path.touch()
    assert write(store, 3, name(3)) is TierFault.VANISHED


def test_a_second_store_on_the_folder_is_refused_and_changes_nothing(store) -> None:
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DiskUnavailable) as refusal:
        open_store(store.path.parent, SLOTS, model=b"some other model")
    assert refusal.value.fault is TierFault.LOCKED
    assert len(os.listdir("/proc/self/fd")) == files  # it is tried again and again
    assert read(store, 1, name(1)) is True
    reopened(store).close()  # and the refused one holds no lock


def test_another_process_is_refused(store) -> None:
    code = (
        "from pathlib import Path; import sys\n"
        "from diptych.kv_transfer.tiers.disk import DiskStore\n"
        f"DiskStore(Path(sys.argv[1]), {BLOCK}, 1 << 20, bytes(16))"
    )
    command = [sys.executable, "-c", code, str(store.path.parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "locked: another process has it" in done.stderr


@pytest.mark.parametrize(
    ("number", "fault"),
    [
        (errno.ENOSPC, TierFault.NO_SPACE),
        (errno.EDQUOT, TierFault.NO_SPACE),
        (errno.EROFS, TierFault.READ_ONLY),
        (errno.EIO, TierFault.IO),
    ],
)
def test_an_error_of_the_system_is_a_fault_and_leaves_no_block(
    store, monkeypatch, number, fault
) -> None:
    def fail(*_args):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        assert write(store, 3, name(3)) is fault
        store.erase(0)  # does not raise
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        assert read(store, 1, name(1)) is fault
    assert read(store, 1, name(1)) is True
    again = reopened(store)
    assert name(3) not in dict(again.found_blocks)
    again.close()


class Crash(BaseException):
    """The process ends here; nothing that follows runs."""


@pytest.mark.parametrize("bytes_until", [0, 1, 64, 127, 128, 129, 3000, 6127, 6128, 6129, 6200])
def test_a_crash_anywhere_in_an_overwrite_leaves_a_whole_block_or_a_miss(
    store, monkeypatch, bytes_until
) -> None:
    left, real = bytes_until, os.pwritev

    def torn(fd, views, offset):
        nonlocal left
        data = bytes(views[0])[:left]
        left -= real(fd, [data], offset) if data else 0
        if len(data) < len(views[0]):
            raise Crash
        return len(data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", torn)
        with pytest.raises(Crash):
            write(store, 1, name(9))
    again = reopened(store)
    found = dict(again.found_blocks)
    assert {name(0), name(2)} <= set(found)
    assert all(read(again, slot, content) is True for content, slot in found.items())
    assert name(9) not in found  # its header's checksum was not written yet
    assert (name(1) in found) == (bytes_until == 0)
    again.close()


WRITER = """
import random, sys
from pathlib import Path
from tests.kv_transfer.tiers_support import name, open_store, write
store, rng = open_store(Path(sys.argv[1]), 8), random.Random(int(sys.argv[2]))
for number in range(1 << 30):
    assert write(store, rng.randrange(8), name(rng.randrange(40))) is None
    if number == 50:
        print("writing", flush=True)
"""


def test_after_kill_9_while_writing_every_block_is_whole_or_missing(tmp_path) -> None:
    rng, found = random.Random(5), 0
    for turn in range(6):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(turn)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None and child.stdout.readline() == "writing\n"
            time.sleep(rng.random() * 0.05)  # another moment of a write each turn
            child.send_signal(signal.SIGKILL)
        store = open_store(tmp_path, 8)
        outcomes = [read(store, slot, content) for content, slot in store.found_blocks]
        assert all(outcome is True for outcome in outcomes), outcomes
        assert not store.was_emptied and len(outcomes) <= 8
        found += len(outcomes)
        store.close()
    assert found > 6  # most of them survive


def test_what_a_failed_preallocation_took_is_given_back(tmp_path, monkeypatch) -> None:
    real = os.posix_fallocate

    def half(fd, offset, size):
        real(fd, offset, size // 2)  # as ext4 leaves it
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", half)
        with pytest.raises(DiskUnavailable):
            open_store(tmp_path)
    assert os.stat(tmp_path / NAME).st_blocks == 0


def test_a_full_disk_is_refused_and_gets_back_what_the_attempt_took(tmp_path) -> None:
    code = f"""
import os
from pathlib import Path
from tests.kv_transfer.tiers_support import open_store
from diptych.kv_transfer.tiers.faults import DiskUnavailable
folder = Path({str(tmp_path)!r})
try:
    open_store(folder, 1000)
except DiskUnavailable as refusal:
    print(refusal.fault, os.stat(folder / {NAME!r}).st_blocks)
open_store(folder, 4).close()
"""
    mount = f"mount -t tmpfs -o size=1m tmpfs {tmp_path}"
    assert in_namespace(mount, tmp_path, code) == "no_space 0\n"


def test_a_read_only_folder_is_refused(tmp_path) -> None:
    code = f"""
from pathlib import Path
from tests.kv_transfer.tiers_support import open_store
from diptych.kv_transfer.tiers.faults import DiskUnavailable
try:
    open_store(Path({str(tmp_path)!r}))
except DiskUnavailable as refusal:
    print(refusal.fault)
"""
    mount = f"mount -t tmpfs -o ro tmpfs {tmp_path}"
    assert in_namespace(mount, tmp_path, code) == "read_only\n"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskUnavailable) as refusal:
        open_store(tmp_path / "file")
    assert refusal.value.fault is TierFault.IO


def test_a_short_write_is_continued(store, monkeypatch) -> None:
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, v, at: real(fd, [bytes(v[0])[:1000]], at))
    assert write(store, 3, name(3)) is None and read(store, 3, name(3)) is True


def test_a_short_read_is_continued(store, monkeypatch) -> None:
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, v, at: real(fd, [v[0][:1000]], at))
    assert read(store, 1, name(1)) is True
