"""What the system says of this process."""

from __future__ import annotations

import os
from pathlib import Path

STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Return the memory of this process that is in RAM; 0 where /proc is not there."""
    if not STATM.exists():
        return 0
    pages = int(STATM.read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
