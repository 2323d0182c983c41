"""The cluster that most live tests share: what `diptych serve` starts without a word."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..support.live import Live, running


@pytest.fixture(scope="package")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with running(tmp_path_factory.mktemp("live") / "serve.log") as cluster:
        yield cluster
