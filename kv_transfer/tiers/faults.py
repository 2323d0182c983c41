"""What all tiers share: their names, the reasons why an access fails, and block checksums."""

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
    #: the disk is full, a quota is used up, or a file may not become that large; or the configured
    #: size leaves no room for one block
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
    """Returns the checksum seed of the block whose content hash (16 bytes) is `content`.

    `compatibility` is `KVLayout.compatibility` (16 bytes): a hash of the model, the KV's numbers
    and the format. Bytes of another block, or of another model, fail the check with this seed.
    """
    return xxhash.xxh3_64_intdigest(compatibility + content)


def checksum(data: memoryview, seed: int) -> int:
    """Returns the 64-bit xxh3 of a block's bytes, with the seed of `checksum_seed`."""
    return xxhash.xxh3_64_intdigest(data, seed=seed)
