"""What the tests of the tiers share: blocks whose bytes follow from their name, and a client."""

import queue
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from diptych.kv_transfer.tiers import TieredStore, TierLimits
from diptych.kv_transfer.tiers.disk import DiskStore
from diptych.kv_transfer.tiers.faults import checksum, checksum_seed

BLOCK, MODEL = 6000, b"model and layout"  # a block that is no multiple of a page
DEADLINE_S = 10.0
ROOT = Path(__file__).parents[2]


def name(number):
    return number.to_bytes(16, "big")


def block(content):
    """The bytes of a block: another name has other bytes."""
    return np.random.default_rng(list(content)).integers(0, 256, BLOCK, np.uint8)


def disk_bytes(slots):
    return slots * (2 * 4096 + 128) + 2 * 4096


def open_store(folder, slots=4, model=MODEL):
    return DiskStore(folder, BLOCK, disk_bytes(slots), model)


def write(store, slot, content):
    data = memoryview(block(content))
    return store.write(
        slot, content, data, checksum(data, checksum_seed(store.compatibility, content))
    )


def read(store, slot, content):
    """What a read of `content` gives: a fault, or True when the bytes are right."""
    target = np.zeros(BLOCK, np.uint8)
    fault = store.read(slot, memoryview(target), checksum_seed(store.compatibility, content))
    return fault or bool((target == block(content)).all())


def eventually(condition, what):
    """Waits for another thread; the deadline only bounds a failure."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.002)


class Client:
    """Tiers, asked one thing at a time; what it loads is compared with what it should be."""

    def __init__(self, memory=4, disk=0, folder=None, model=MODEL, clock=time.monotonic, **limits):
        bounds = TierLimits(memory * BLOCK, disk_bytes(disk) if disk else 0, **limits)
        self.tiers = TieredStore(BLOCK, model, bounds, folder, clock)
        if disk:
            eventually(lambda: self.disk["state"] != "opens", "the disk was tried")

    @property
    def memory(self):
        return self.tiers.statistics()["memory"]

    @property
    def disk(self):
        return self.tiers.statistics()["disk"]

    def store(self, *numbers):
        done = queue.SimpleQueue()
        for number in numbers:
            assert self.tiers.store(name(number), memoryview(block(name(number))), done.put)
            assert done.get(timeout=DEADLINE_S) is True

    def load(self, *numbers):
        """The numbers that arrived, each with the right bytes."""
        done, targets = queue.SimpleQueue(), [np.zeros(BLOCK, np.uint8) for _ in numbers]
        pairs = [(name(n), memoryview(t)) for n, t in zip(numbers, targets, strict=True)]
        assert self.tiers.load(pairs, done.put)
        arrived = done.get(timeout=DEADLINE_S)
        assert arrived == [name(n) for n in numbers[: len(arrived)]]
        for content, target in zip(arrived, targets, strict=False):
            assert (target == block(content)).all(), f"wrong bytes for {content!r}"
        return list(numbers[: len(arrived)])

    def held(self, *numbers):
        return self.tiers.count_held_blocks([name(n) for n in numbers])

    def settled(self):
        """Everything that is in memory is on disk too."""
        eventually(lambda: self.memory["dirty"] == 0, "memory was copied to disk")

    def fill_disk(self, count, memory):
        """Blocks 0 .. count-1; those that are only on disk are what is returned."""
        for number in range(count):
            self.store(number)
            self.settled()
        return list(range(count - memory))


@pytest.fixture
def client():
    """Makes clients and ends them."""
    made = []

    def make(*args, **kwargs):
        made.append(Client(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.tiers.close()
        each.tiers._index.validate()


def in_namespace(mount, folder, code):
    """Runs Python `code` with `folder` mounted by the shell command `mount`, seen by it alone."""
    script = f'{mount} || exit 77; exec {sys.executable} -c "$1"'
    command = ["unshare", "-rm", "sh", "-c", script, "sh", code]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("no mounts of one's own here")
    assert done.returncode == 0, done.stderr
    return done.stdout
