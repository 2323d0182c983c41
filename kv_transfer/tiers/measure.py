"""Prints what the tiers cost beside memcpy, as JSON: `python -m diptych.kv_transfer.tiers.measure`.

GiB/s are the best of several rounds, each of which runs every row once; `of_memcpy` is the ratio to
a plain copy of the same blocks. `checksum_share` is the time of one checksum pass as a part of the
row's. Disk figures are those of the page cache unless they say cold.

The tiers are the stores of KV blocks below a worker's pool: one in host memory, one on disk.
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
from typing import Any

import numpy as np

from .disk import DiskStore
from .faults import checksum, checksum_seed
from .service import TieredStore, TierLimits

ROUNDS = 5
COMPATIBILITY = bytes(16)  #: stands for the hash of a model and its layout
#: Rows in which each block's checksum is computed once: when it enters the memory store, and whenever
#: it is read. The disk gets the checksum of the memory store.
VERIFIED_ROWS = ("memory store", "memory load", "disk read, cached", "disk read, cold")


def measure_seconds(work: Callable[[], None]) -> float:
    """Runs `work` once; returns the seconds that it took."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class TierBench:
    """`count` blocks of `block_bytes` bytes, a second set to load into, and a folder.

    The folder is on the disk to measure.
    """

    def __init__(self, block_bytes: int, count: int, folder: Path) -> None:
        self.block_bytes = block_bytes
        self.count = count
        self.folder = folder
        shape = (count, block_bytes)
        self.source = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
        self.target = np.zeros(shape, np.uint8)
        self.contents = [index.to_bytes(16, "little") for index in range(count)]
        self.seeds = [checksum_seed(COMPATIBILITY, content) for content in self.contents]

    def measure_round(self) -> dict[str, float]:
        """Runs every row once; returns seconds by row."""
        rows = {
            "memcpy": measure_seconds(self.copy),
            "checksum": measure_seconds(self._compute_checksums),
        }
        return rows | self._measure_memory() | self._measure_disk()

    def copy(self) -> None:
        """Makes the plain copy that every row is compared with."""
        for index in range(self.count):
            np.copyto(self.target[index], self.source[index])

    def _compute_checksums(self) -> None:
        for index, seed in enumerate(self.seeds):
            checksum(self.source[index].data, seed)

    def _measure_memory(self) -> dict[str, float]:
        """Stores and loads through the tiers' thread."""
        size = self.count * self.block_bytes
        limits = TierLimits(size, request_limit=2 * self.count, in_flight_bytes_limit=2 * size)
        tiers = TieredStore(self.block_bytes, COMPATIBILITY, limits)
        self._store(tiers, salt=1)  # the slots' pages exist, as in a tier that has been full once
        rows = {
            "memory store": measure_seconds(lambda: self._store(tiers, salt=0)),
            "memory load": measure_seconds(lambda: self._load(tiers)),
        }
        tiers.close()
        return rows

    def _store(self, tiers: TieredStore, salt: int) -> None:
        """Stores all blocks; another `salt` stores them under other names."""
        done: queue.SimpleQueue[bool] = queue.SimpleQueue()
        for index, content in enumerate(self.contents):
            salted_content = content[:-1] + bytes([salt])
            assert tiers.store(salted_content, self.source[index].data, done.put)
        held = [done.get() for _ in self.contents]
        assert all(held)

    def _load(self, tiers: TieredStore) -> None:
        done: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
        views = [row.data for row in self.target]
        assert tiers.load(list(zip(self.contents, views, strict=True)), done.put)
        assert len(done.get()) == self.count

    def _measure_disk(self) -> dict[str, float]:
        """Uses `DiskStore` alone: writes, reads from the page cache, and after it was dropped."""
        # Room for `count` slots, with their headers and what rounding up to pages takes.
        capacity_bytes = self.count * (self.block_bytes + 8192) + 65536
        store = DiskStore(self.folder, self.block_bytes, capacity_bytes, COMPATIBILITY)
        blocks = [row.data for row in self.source]
        checksums = [checksum(b, seed) for b, seed in zip(blocks, self.seeds, strict=True)]

        def write() -> None:
            for slot, content in enumerate(self.contents):
                assert store.write(slot, content, blocks[slot], checksums[slot]) is None

        def read() -> None:
            for slot, seed in enumerate(self.seeds):
                assert store.read(slot, self.target[slot].data, seed) is None

        rows = {
            "disk write": measure_seconds(write),
            "disk read, cached": measure_seconds(read),
        }
        drop_from_page_cache(store.path)
        rows["disk read, cold"] = measure_seconds(read)
        store.close()
        return rows


def drop_from_page_cache(path: Path) -> None:
    """Makes the next read of the file come from the disk."""
    file = os.open(path, os.O_RDWR)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def measure(block_bytes: int, count: int, folder: Path) -> dict[str, Any]:
    """Returns one line of the output: the best of `ROUNDS` rounds for each row."""
    bench = TierBench(block_bytes, count, folder)
    bench.copy()  # so that every page is there before the first round
    rounds = [bench.measure_round() for _ in range(ROUNDS)]
    best_s = {row: min(seconds[row] for seconds in rounds) for row in rounds[0]}
    gib = block_bytes * count / 2**30
    return {
        "block_bytes": block_bytes,
        "gib_s": {row: round(gib / row_s, 2) for row, row_s in best_s.items()},
        "of_memcpy": {row: round(best_s["memcpy"] / row_s, 2) for row, row_s in best_s.items()},
        "checksum_share": {
            row: round(best_s["checksum"] / best_s[row], 2) for row in VERIFIED_ROWS
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
