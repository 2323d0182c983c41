"""Shares of a long suite, of which a run takes one: whole files, as their tests may share a cluster."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def files_of_share(files: Iterable[str], share: str) -> set[str]:
    """Return the files of share `K/N`: in order of their names the Kth, and every Nth behind it.

    Raises UsageError if the text says no share.
    """
    number, _, count = share.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"--share {share}: expected K/N, as in 1/3")
    return set(sorted(files)[int(number) - 1 :: int(count)])
