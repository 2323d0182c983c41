"""Cores that engines of one machine lend each other while they have nothing to compute.

An engine whose thread is bound to cores of its own (`EngineOptions.cores`) lends them while it sleeps,
and borrows those of other engines while it computes: a prompt is then computed by two cores, while
nobody decodes on the second one. All engines share a file with a byte for each core, its state. An
engine that computes again takes its core back by that byte. The borrower looks at it before each piece
of work, so the owner waits for a piece that was begun (`native/team.cpp`). Which core computes a
piece changes no bit of it.

What a step with help took says nothing about the next one, whose neighbour may compute. So costs are
learned from steps without help: the first `ALONE_FIRST` of a kind, and a share of the later ones.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from .kernels import NativeOps

log = logging.getLogger(__name__)

#: States of a core, as in `native/team.cpp`; the helpers there set and clear `BORROWED` (3).
UNCLAIMED: Final = 0
LENT: Final = 1
IN_USE: Final = 2

STATES_BYTES = 4_096  #: Of the file: one for each core that a machine may have.
#: So many steps of a kind (with prefill or without) are computed without help at the start.
ALONE_FIRST = 8
ALONE_SHARE = 1 / 8  #: Of later ones. Any of a prompt's chunks may be among them.
#: Its multiples, modulo 1, are spread evenly, and so is every nth of them.
GOLDEN_RATIO = (5**0.5 - 1) / 2


class CoreSharing:
    """One engine's part in the sharing. Its methods are for the thread that computes, but for one."""

    def __init__(self, states_file: Path, own: Sequence[int], ops: NativeOps) -> None:
        """`own` are the engine's cores. Raises OSError if the file cannot be shared."""
        self._own = tuple(own)
        self._library = ops.library
        self._states = _open_states(states_file)
        # Found before the thread is bound to its own ones.
        others = [
            core for core in sorted(os.sched_getaffinity(0) - set(own)) if core < STATES_BYTES
        ]
        # Helpers look at the states for as long as the process lives, whatever becomes of this object.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._states))
        states = (ctypes.c_uint8 * STATES_BYTES).from_buffer(self._states)
        cores = (ctypes.c_int * len(others))(*others)
        #: One for each core to borrow if it is lent. They have threads once they are called.
        self._helpers = self._library.make_helpers(ctypes.addressof(states), cores, len(others))
        self._step_numbers = {True: 0, False: 0}  #: By whether a step has prefill.
        self._pieces_before = 0
        self._is_closed = False

    def lend(self) -> None:
        """Lets others compute on this engine's cores, until `take_back`."""
        self._set(LENT)

    def take_back(self) -> None:
        """Tells borrowers to leave this engine's cores. Any thread."""
        self._set(IN_USE)

    def close(self) -> None:
        """Ends the lending. The helpers stay, without anything to do."""
        self._set(UNCLAIMED)
        self._is_closed = True

    def begin_step(self, *, prefills: bool) -> None:
        """Offers the kernels' work to helpers until `end_step`, but not in each step."""
        number = self._step_numbers[prefills]
        self._step_numbers[prefills] = number + 1
        may_borrow = number >= ALONE_FIRST and number * GOLDEN_RATIO % 1 >= ALONE_SHARE
        self._library.use_helpers(self._helpers if may_borrow else None)
        self._pieces_before = self._library.helped_pieces(self._helpers)

    def end_step(self) -> bool:
        """Ends the offer; returns whether anybody has helped."""
        self._library.use_helpers(None)
        return self._library.helped_pieces(self._helpers) != self._pieces_before

    def _set(self, state: int) -> None:
        if self._is_closed:  # by then another engine may have the cores
            return
        for core in self._own:
            self._states[core] = state


def open_core_sharing(
    states_file: Path | None, own: Sequence[int], ops: object
) -> CoreSharing | None:
    """Returns an engine's part in the sharing; None if it has no cores of its own, or other kernels.

    A file that cannot be opened is logged: the engine computes as well without help.
    """
    if states_file is None or not own or not isinstance(ops, NativeOps):
        return None
    if max(own) >= STATES_BYTES:
        return None
    try:
        return CoreSharing(states_file, own, ops)
    except (OSError, ValueError) as error:  # ValueError: somebody has cut the file
        log.warning("idle cores are not shared: %s", error)
        return None


def _open_states(file: Path) -> mmap.mmap:
    """Maps the file, and makes it if it is missing.

    Raises OSError, for a link and on a full disk too, and ValueError if somebody has cut the file.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        # not a hole: a write into one on a full disk would kill the process
        os.posix_fallocate(descriptor, 0, STATES_BYTES)
        return mmap.mmap(descriptor, STATES_BYTES)
    finally:
        os.close(descriptor)
