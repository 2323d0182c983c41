"""The tiers' shared words: which tiers there are, why an access fails, and block checksums."""

from __future__ import annotations

import errno
from enum import StrEnum

import xxhash

from ..errors import TransferError


class Tier(StrEnum):
    """Where a block can lie below a worker's KV pool."""

    MEMORY = "memory"
    DISK = "disk"


class TierFault(StrEnum):
    """Why an access to a tier failed.

    Such failures are normal now and then. They are counted by these values.
    """

    CHECKSUM = "checksum"  #: the bytes are not those that were stored
    HEADER = "header"  #: the header of a slot is damaged, or of another slot or file
    TRUNCATED = "truncated"  #: the file ends before the block does
    VANISHED = "vanished"  #: the file was removed since it was opened, or replaced by another
    #: the disk is full, a quota is used up, the file may not be that large, or the size that was
    #: configured is less than one block
    NO_SPACE = "no_space"
    READ_ONLY = "read_only"  #: the file system is read-only, or this process has no permission
    LOCKED = "locked"  #: another process uses the folder
    IO = "io_error"  #: any other error of the operating system


class DiskUnavailable(TransferError):
    """The folder cannot hold a disk tier now; `fault` says why."""

    def __init__(self, fault: TierFault, detail: OSError | str) -> None:
        super().__init__(f"{fault}: {detail}")
        self.fault = fault


def fault_of(error: OSError) -> TierFault:
    """Returns what an error of the operating system means to a tier."""
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return TierFault.NO_SPACE
        case errno.EROFS | errno.EACCES | errno.EPERM:
            return TierFault.READ_ONLY
        case _:
            return TierFault.IO


def checksum_seed(compatibility: bytes, content: bytes) -> int:
    """Returns the checksum seed of the block whose 16-byte hash is `content`.

    `compatibility` is the 16-byte hash of model, layout and format.
    Thanks to the seed, the bytes of another block or of another model fail this block's check.
    """
    return xxhash.xxh3_64_intdigest(compatibility + content)


def checksum(data: memoryview, seed: int) -> int:
    """Returns the 64-bit xxh3 of a block's bytes, with the seed of `checksum_seed`."""
    return xxhash.xxh3_64_intdigest(data, seed=seed)
