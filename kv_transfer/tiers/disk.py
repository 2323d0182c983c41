"""The disk tier's bytes: one preallocated file of fixed slots that survives a crash.

    superblock | header of slot 0, 1, .. | payload of slot 0, 1, ..

The superblock says which model, layout and format the file is for; another one empties the file. A
slot counts only if its header is whole and its payload has the checksum that the header names. A
write takes the header away, writes the payload, then the header; whatever a crash leaves is either
a whole block or a miss. The headers lie together, so a restart reads them in one go.

Nothing is synced: bytes that were written survive the process, and what a power failure tears does
not pass its checksum. A cache that is lost costs a recompute; an fsync per block costs a seek each.
"""

from __future__ import annotations

import fcntl
import os
import struct
from array import array
from collections import Counter
from pathlib import Path

import xxhash

from .faults import DiskUnavailable, Fault, checksum, fault_of

NAME = "blocks.kv"
MAGIC, FORMAT = b"DIPTYCHT", 1
PAGE = 4096
#: magic, format, padding, compatibility, block bytes, slots; then the checksum of these
SUPERBLOCK, TAIL = struct.Struct("<8sI4x16sQQ"), struct.Struct("<Q")
#: magic, format, padding, compatibility, content, block bytes, sequence, payload's checksum
HEADER = struct.Struct("<8sI4x16s16sQQQ")
HEADER_STRIDE = 128  #: bytes; a power of two: no header crosses a sector
EMPTY = bytes(HEADER_STRIDE)


def align(size: int, unit: int = PAGE) -> int:
    return -(-size // unit) * unit


def sealed(data: bytes, seed: int) -> bytes:
    return data + TAIL.pack(xxhash.xxh3_64_intdigest(data, seed=seed))


class DiskStore:
    """Owns the folder (a lock; a second process is refused) and the file in it.

    `capacity_bytes` bounds the file's size. Raises DiskUnavailable when the folder cannot be used;
    afterwards every access returns a Fault instead of raising.
    """

    def __init__(
        self, folder: Path, block_bytes: int, capacity_bytes: int, compatibility: bytes
    ) -> None:
        assert len(compatibility) == 16, compatibility
        self.path, self.block_bytes, self.compatibility = folder / NAME, block_bytes, compatibility
        stride = align(block_bytes)
        self.slots = max(0, (capacity_bytes - 2 * PAGE) // (stride + HEADER_STRIDE))
        if not self.slots:
            raise DiskUnavailable(Fault.NO_SPACE, f"{capacity_bytes} bytes hold no block")
        self._stride, self._start = stride, align(PAGE + self.slots * HEADER_STRIDE)
        self.size = self._start + self.slots * stride
        self.found: list[tuple[bytes, int]] = []  #: (content, slot) at the start, oldest first
        self.faults: Counter[str] = Counter()  #: headers that a start did not believe, by reason
        self.emptied = False  #: the file was there, and for something else
        self._sums = array("Q", bytes(8 * self.slots))
        self._stamped = bytearray(self.slots)  #: 1: there may be a whole header
        self._sequence = 0
        self._lock = self._fd = -1
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder, os.O_RDONLY)
            self._take_lock()
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            self._prepare()
        except OSError as error:
            self.close()
            raise DiskUnavailable(fault_of(error), error) from None
        except DiskUnavailable:
            self.close()
            raise

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DiskUnavailable(Fault.LOCKED, "another process has it") from None

    def _prepare(self) -> None:
        superblock = sealed(
            SUPERBLOCK.pack(MAGIC, FORMAT, self.compatibility, self.block_bytes, self.slots), 0
        )
        there = os.fstat(self._fd).st_size
        known = os.pread(self._fd, len(superblock), 0) == superblock
        if not known:
            self.emptied = there > 0
            os.ftruncate(self._fd, 0)
            there = 0
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._fd, 0, self.size)
            else:
                os.ftruncate(self._fd, self.size)
        except OSError:
            os.ftruncate(self._fd, there)  # a full disk gets back what the attempt took
            raise
        if known:
            self._scan(there)
        else:
            self._put(superblock, 0)

    def _scan(self, there: int) -> None:
        """Reads every header; `there` is the file's size before it was extended."""
        table = self._get(self.slots * HEADER_STRIDE, PAGE)
        found: dict[bytes, tuple[int, int]] = {}
        for slot in range(self.slots):
            raw = table[slot * HEADER_STRIDE : (slot + 1) * HEADER_STRIDE]
            if raw == EMPTY:
                continue
            self._stamped[slot] = 1
            head, tail = raw[: HEADER.size], raw[: HEADER.size + TAIL.size]
            magic, version, salt, content, length, sequence, total = HEADER.unpack(head)
            mine = (MAGIC, FORMAT, self.compatibility, self.block_bytes)
            if sealed(head, slot) != tail or (magic, version, salt, length) != mine:
                self.faults[Fault.HEADER] += 1
            elif self._offset(slot) + self.block_bytes > there:
                self.faults[Fault.TRUNCATED] += 1
            else:
                self._sums[slot] = total
                self._sequence = max(self._sequence, sequence)
                found[content] = max(found.get(content, (0, 0)), (sequence, slot))
        order = sorted((*where, content) for content, where in found.items())
        self.found = [(content, slot) for _, slot, content in order]

    def sum(self, slot: int) -> int:
        return self._sums[slot]

    def write(self, slot: int, content: bytes, data: memoryview, total: int) -> Fault | None:
        """Stores a block whose checksum is `total`. After a fault the slot holds no block."""
        try:
            now, mine = os.stat(self.path), os.fstat(self._fd)
            if (now.st_dev, now.st_ino) != (mine.st_dev, mine.st_ino):
                return Fault.VANISHED
            self._erase(slot)
            self._put(data, self._offset(slot))
            self._sequence += 1
            head = HEADER.pack(
                *(MAGIC, FORMAT, self.compatibility, content),
                *(self.block_bytes, self._sequence, total),
            )
            self._stamped[slot] = 1
            self._put(sealed(head, slot), PAGE + slot * HEADER_STRIDE)
        except FileNotFoundError:
            return Fault.VANISHED
        except OSError as error:
            return fault_of(error)
        self._sums[slot] = total
        return None

    def read(self, slot: int, target: memoryview, seed: int) -> Fault | None:
        """Reads a block into `target` (uint8 [block_bytes]) and verifies it there."""
        try:
            done, offset = 0, self._offset(slot)
            while done < self.block_bytes:
                count = os.preadv(self._fd, [target[done:]], offset + done)
                if not count:
                    return Fault.TRUNCATED
                done += count
        except OSError as error:
            return fault_of(error)
        return None if checksum(target, seed) == self._sums[slot] else Fault.CHECKSUM

    def erase(self, slot: int) -> None:
        """A restart shall not find this slot's block. Best effort: it would fail its checksum."""
        try:
            self._erase(slot)
        except OSError:
            return

    def close(self) -> None:
        for fd in (self._fd, self._lock):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock = -1

    def _erase(self, slot: int) -> None:
        if self._stamped[slot]:
            self._put(EMPTY, PAGE + slot * HEADER_STRIDE)
            self._stamped[slot] = 0

    def _offset(self, slot: int) -> int:
        return self._start + slot * self._stride

    def _put(self, data: bytes | memoryview, offset: int) -> None:
        view, done = memoryview(data), 0
        while done < len(view):
            done += os.pwritev(self._fd, [view[done:]], offset + done)

    def _get(self, size: int, offset: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = os.pread(self._fd, min(size - len(data), 1 << 26), offset + len(data))
            if not piece:
                break
            data += piece
        return bytes(data) + bytes(size - len(data))
