"""The disk tier's bytes: one preallocated file of fixed slots that survives a crash.

    superblock | header of slot 0, 1, .. | payload of slot 0, 1, ..

The superblock says which model, layout and format the file is for, and how many slots it has; if it
differs from the one that this store would write, the file is emptied. A slot counts only if its
header is whole and its payload has the checksum that the header names. A write erases the header,
writes the payload, then the new header; whatever a crash leaves is either a whole block or a miss.
The headers lie together, so a restart reads them in a few calls.

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
from typing import NamedTuple

import xxhash

from .faults import DiskUnavailable, TierFault, checksum, fault_of

NAME = "blocks.kv"  #: of the file in the folder
MAGIC = b"DIPTYCHT"
FORMAT = 1  #: version of the superblock's and headers' layout; a file of another one is emptied
PAGE = 4096  #: bytes; headers begin behind the first page, payloads at a multiple of it
#: Magic, format, padding, compatibility, block bytes, slots. In the file, `TAIL` follows.
SUPERBLOCK = struct.Struct("<8sI4x16sQQ")
TAIL = struct.Struct("<Q")  #: the checksum of a superblock's or a header's fields, behind them
#: The fields of `SlotHeader`, with padding behind the format. In the file, `TAIL` follows.
HEADER = struct.Struct("<8sI4x16s16sQQQ")
HEADER_STRIDE = 128  #: bytes; a power of two: no header crosses a sector
EMPTY_HEADER = bytes(HEADER_STRIDE)
READ_BYTES = 1 << 26  #: at most, in one call that reads headers: the system caps calls at 2 GiB


class SlotHeader(NamedTuple):
    """What stands in the file about the block of a slot."""

    magic: bytes
    format: int
    compatibility: bytes
    content: bytes  #: the block's hash
    block_bytes: int
    sequence: int  #: counts the writes to the file; of two slots with one block the later counts
    checksum: int  #: of the payload


def align(size: int, unit: int = PAGE) -> int:
    """Rounds up to a multiple of `unit`."""
    return -(-size // unit) * unit


def with_checksum(data: bytes, seed: int) -> bytes:
    """Returns `data` and its checksum. The seed of a header is its slot, of the superblock 0."""
    return data + TAIL.pack(xxhash.xxh3_64_intdigest(data, seed=seed))


class DiskStore:
    """Owns the folder (a lock; a second process is refused) and the file in it.

    `capacity_bytes` bounds the file's size; `compatibility` is a 16-byte hash of model and layout,
    and a block's `content` the 16-byte hash of its tokens. The constructor raises DiskUnavailable
    when the folder cannot be used, when another process has it, or when `capacity_bytes` hold no
    block. Afterwards `write` and `read` return a `TierFault` instead of raising.
    """

    def __init__(
        self, folder: Path, block_bytes: int, capacity_bytes: int, compatibility: bytes
    ) -> None:
        assert len(compatibility) == 16, compatibility
        self.path = folder / NAME
        self.block_bytes = block_bytes
        self.compatibility = compatibility
        self._stride = align(block_bytes)  #: bytes from one payload to the next
        # Two pages are kept back: one for the superblock, and one to round the headers up to pages.
        self.slots = max(0, (capacity_bytes - 2 * PAGE) // (self._stride + HEADER_STRIDE))
        if not self.slots:
            raise DiskUnavailable(TierFault.NO_SPACE, f"{capacity_bytes} bytes hold no block")
        self._first_payload = align(PAGE + self.slots * HEADER_STRIDE)
        self.size = self._first_payload + self.slots * self._stride
        #: (content, slot) of the blocks that were there at the start, oldest first
        self.found_blocks: list[tuple[bytes, int]] = []
        #: Headers that were not believed at the start, by reason.
        self.header_faults: Counter[str] = Counter()
        self.was_emptied = False  #: True if the file had bytes, but another superblock.
        self._checksums = array("Q", bytes(8 * self.slots))  #: of the payloads, by slot
        #: By slot: 1 where the header's bytes may be other than zeros.
        self._may_have_header = bytearray(self.slots)
        self._sequence = 0  #: of the latest write
        self._lock_fd = -1
        self._fd = -1
        try:
            self._open(folder)
        except OSError as error:
            self.close()
            raise DiskUnavailable(fault_of(error), error) from None
        except DiskUnavailable:
            self.close()
            raise

    def _open(self, folder: Path) -> None:
        """Takes the lock before the file is touched: another process may be using it."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock_fd = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DiskUnavailable(TierFault.LOCKED, "another process has it") from None
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        self._prepare()

    def _prepare(self) -> None:
        """Makes the file fit: emptied if it is for something else, at its full size, and read."""
        fields = SUPERBLOCK.pack(MAGIC, FORMAT, self.compatibility, self.block_bytes, self.slots)
        superblock = with_checksum(fields, 0)
        previous_size = os.fstat(self._fd).st_size
        same_superblock = os.pread(self._fd, len(superblock), 0) == superblock
        if not same_superblock:
            self.was_emptied = previous_size > 0
            os.ftruncate(self._fd, 0)
            previous_size = 0
        self._allocate(previous_size)
        if same_superblock:
            self._scan(previous_size)
        else:
            self._write_all(superblock, 0)

    def _allocate(self, previous_size: int) -> None:
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._fd, 0, self.size)
            else:
                os.ftruncate(self._fd, self.size)
        except OSError:
            os.ftruncate(self._fd, previous_size)  # a full disk gets back what the attempt took
            raise

    def _scan(self, previous_size: int) -> None:
        """Reads every header of a file that had `previous_size` bytes before it was extended."""
        table = self._read_all(self.slots * HEADER_STRIDE, PAGE)
        latest: dict[bytes, tuple[int, int]] = {}  # content -> (sequence, slot)
        for slot in range(self.slots):
            raw = table[slot * HEADER_STRIDE : (slot + 1) * HEADER_STRIDE]
            if raw == EMPTY_HEADER:
                continue
            self._may_have_header[slot] = 1
            header = self._parse_header(raw, slot)
            if header is None:
                self.header_faults[TierFault.HEADER] += 1
            elif self._offset(slot) + self.block_bytes > previous_size:
                self.header_faults[TierFault.TRUNCATED] += 1
            else:
                self._checksums[slot] = header.checksum
                self._sequence = max(self._sequence, header.sequence)
                # A crash may leave one block in two slots, both of them whole: the later counts.
                previous = latest.get(header.content, (0, 0))
                latest[header.content] = max(previous, (header.sequence, slot))

        oldest_first = sorted(latest, key=lambda content: latest[content])
        self.found_blocks = [(content, latest[content][1]) for content in oldest_first]

    def _parse_header(self, raw: bytes, slot: int) -> SlotHeader | None:
        """Returns None when the header is damaged, or not of this slot and file."""
        fields = raw[: HEADER.size]
        if with_checksum(fields, slot) != raw[: HEADER.size + TAIL.size]:
            return None
        header = SlotHeader._make(HEADER.unpack(fields))
        if header != self._make_header(header.content, header.sequence, header.checksum):
            return None
        return header

    def _make_header(self, content: bytes, sequence: int, payload_checksum: int) -> SlotHeader:
        return SlotHeader(
            magic=MAGIC,
            format=FORMAT,
            compatibility=self.compatibility,
            content=content,
            block_bytes=self.block_bytes,
            sequence=sequence,
            checksum=payload_checksum,
        )

    def checksum_of(self, slot: int) -> int:
        """Returns the checksum of the payload that was written to the slot, or found there."""
        return self._checksums[slot]

    def write(
        self, slot: int, content: bytes, data: memoryview, payload_checksum: int
    ) -> TierFault | None:
        """Stores a block; `payload_checksum` is `faults.checksum` of it with the block's seed.

        After a fault, the caller must not `read` the slot before it was written again. A restart
        finds there the previous block, this one or none, but never a part of one.
        """
        try:
            if not self._is_still_in_place():
                return TierFault.VANISHED
            self._erase_header(slot)
            self._write_all(data, self._offset(slot))
            self._sequence += 1
            header = self._make_header(content, self._sequence, payload_checksum)
            self._may_have_header[slot] = 1
            self._write_all(with_checksum(HEADER.pack(*header), slot), PAGE + slot * HEADER_STRIDE)
        except FileNotFoundError:
            return TierFault.VANISHED
        except OSError as error:
            return fault_of(error)
        self._checksums[slot] = payload_checksum
        return None

    def _is_still_in_place(self) -> bool:
        """Returns whether the path still names the open file.

        Raises FileNotFoundError if the path names no file.
        """
        return os.path.samestat(os.stat(self.path), os.fstat(self._fd))

    def read(self, slot: int, target: memoryview, seed: int) -> TierFault | None:
        """Reads a block into `target` (uint8 [block_bytes]) and verifies it there.

        `seed` is `faults.checksum_seed` of the block, with which its checksum was made: another
        block's bytes do not pass.
        """
        offset = self._offset(slot)
        read_bytes = 0
        try:
            while read_bytes < self.block_bytes:
                count = os.preadv(self._fd, [target[read_bytes:]], offset + read_bytes)
                if not count:
                    return TierFault.TRUNCATED
                read_bytes += count
        except OSError as error:
            return fault_of(error)
        if checksum(target, seed) != self._checksums[slot]:
            return TierFault.CHECKSUM
        return None

    def erase(self, slot: int) -> None:
        """Keeps a restart from finding this slot's block. It is for blocks that could not be read.

        Best effort: if the header cannot be erased, a restart finds the block, and `read` decides
        again whether it is whole.
        """
        try:
            self._erase_header(slot)
        except OSError:
            return

    def close(self) -> None:
        """Gives file and lock back; the blocks stay in the file. A second call does nothing."""
        for fd in (self._fd, self._lock_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = -1
        self._lock_fd = -1

    def _erase_header(self, slot: int) -> None:
        if self._may_have_header[slot]:
            self._write_all(EMPTY_HEADER, PAGE + slot * HEADER_STRIDE)
            self._may_have_header[slot] = 0

    def _offset(self, slot: int) -> int:
        return self._first_payload + slot * self._stride

    def _write_all(self, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data)
        written_bytes = 0
        while written_bytes < len(view):
            written_bytes += os.pwritev(self._fd, [view[written_bytes:]], offset + written_bytes)

    def _read_all(self, size: int, offset: int) -> bytes:
        """Reads `size` bytes; zeros stand for what is behind the file's end."""
        data = bytearray()
        while len(data) < size:
            piece = os.pread(self._fd, min(size - len(data), READ_BYTES), offset + len(data))
            if not piece:
                break
            data += piece
        return bytes(data) + bytes(size - len(data))
