"""The shares of the slow tests."""

from __future__ import annotations

import pytest

from tests.support.share import files_of_share


def test_every_file_is_in_one_share_and_all_shares_are_alike_long() -> None:
    files = {f"tests/test_{number}.py" for number in range(20)}
    shares = [files_of_share(files, f"{number}/3") for number in (1, 2, 3)]
    assert sorted(len(share) for share in shares) == [6, 7, 7]
    assert set().union(*shares) == files


@pytest.mark.parametrize("share", ["0/3", "4/3", "1", "a/b", "1/3/5", "-1/3"])
def test_what_is_no_share_is_refused(share: str) -> None:
    with pytest.raises(pytest.UsageError, match="expected K/N"):
        files_of_share([], share)
