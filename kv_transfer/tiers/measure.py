"""Prints what the tiers cost beside memcpy, as JSON: `python -m diptych.kv_transfer.tiers.measure`.

GiB/s are the best of several rounds, each of which runs every row once; `of_memcpy` is the ratio to
a plain copy of the same blocks. `checksum_share` is the time of one checksum pass as a part of the
row's. Disk figures are those of the page cache unless they say cold.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from .disk import DiskStore
from .faults import checksum, seed_of
from .service import Limits, Tiers

ROUNDS, COMPATIBILITY = 5, bytes(16)


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class Bench:
    """`count` blocks of `block_bytes` bytes, a second set to load into, and a folder."""

    def __init__(self, block_bytes: int, count: int, folder: Path) -> None:
        self.block_bytes, self.count, self.folder = block_bytes, count, folder
        shape = (count, block_bytes)
        self.source = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
        self.target = np.zeros(shape, np.uint8)
        self.contents = [index.to_bytes(16, "little") for index in range(count)]
        self.seeds = [seed_of(COMPATIBILITY, content) for content in self.contents]

    def copy(self) -> None:
        for index in range(self.count):
            np.copyto(self.target[index], self.source[index])

    def check(self) -> None:
        for index, seed in enumerate(self.seeds):
            checksum(self.source[index].data, seed)

    def memory(self) -> tuple[float, float]:
        """Seconds of (store, load) through the thread."""
        size = self.count * self.block_bytes
        limits = Limits(size, requests_max=2 * self.count, in_flight_bytes_max=2 * size)
        tiers = Tiers(self.block_bytes, COMPATIBILITY, limits)
        self.store(tiers, 1)  # the slots' pages exist, as in a tier that has been full once
        store_s = seconds(lambda: self.store(tiers, 0))
        load_s = seconds(lambda: self.load(tiers))
        tiers.close()
        return store_s, load_s

    def store(self, tiers: Tiers, salt: int) -> None:
        done: queue.SimpleQueue[bool] = queue.SimpleQueue()
        for index, content in enumerate(self.contents):
            name = content[:-1] + bytes([salt])
            assert tiers.store(name, self.source[index].data, done.put)
        held = [done.get() for _ in self.contents]
        assert all(held)

    def load(self, tiers: Tiers) -> None:
        done: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
        views = [row.data for row in self.target]
        assert tiers.load(list(zip(self.contents, views, strict=True)), done.put)
        assert len(done.get()) == self.count

    def disk(self) -> tuple[float, float, float]:
        """Seconds of (write, read from the page cache, read after it was dropped)."""
        room = self.count * (self.block_bytes + 8192) + 65536
        store = DiskStore(self.folder, self.block_bytes, room, COMPATIBILITY)
        blocks = [row.data for row in self.source]
        sums = [checksum(b, s) for b, s in zip(blocks, self.seeds, strict=True)]

        def write() -> None:
            for slot, content in enumerate(self.contents):
                assert store.write(slot, content, blocks[slot], sums[slot]) is None

        def read() -> None:
            for slot, seed in enumerate(self.seeds):
                assert store.read(slot, self.target[slot].data, seed) is None

        write_s, read_s = seconds(write), seconds(read)
        file = os.open(store.path, os.O_RDWR)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
        cold_s = seconds(read)
        store.close()
        return write_s, read_s, cold_s


def measure(block_bytes: int, count: int, folder: Path) -> dict:
    bench = Bench(block_bytes, count, folder)
    bench.copy()
    rounds = [
        (seconds(bench.copy), seconds(bench.check), *bench.memory(), *bench.disk())
        for _ in range(ROUNDS)
    ]
    names = ("memcpy", "checksum", "memory store", "memory load")
    disk = ("disk write", "disk read, cached", "disk read, cold")
    best = [min(times) for times in zip(*rounds, strict=True)]
    rows = dict(zip(names + disk, best, strict=True))
    copy_s, check_s = rows["memcpy"], rows["checksum"]
    gib = block_bytes * count / 2**30
    return {
        "block_bytes": block_bytes,
        "gib_s": {name: round(gib / took, 2) for name, took in rows.items()},
        "of_memcpy": {name: round(copy_s / took, 2) for name, took in rows.items()},
        "checksum_share": {
            name: round(check_s / took, 2)
            for name, took in rows.items()
            if name in ("memory store", "memory load", "disk read, cached", "disk read, cold")
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--total-mib", type=int, default=512)
    parser.add_argument("--folder", type=Path, help="where the disk to measure is mounted")
    options = parser.parse_args()
    for block_bytes in (64 << 10, 1 << 20, 8 << 20):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            count = max(1, (options.total_mib << 20) // block_bytes)
            print(json.dumps(measure(block_bytes, count, Path(folder))))


if __name__ == "__main__":
    main()
