"""The cluster that most live tests share: what `diptych serve` starts without a word."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from ..support.live import Live, running, stop


@pytest.fixture(scope="package")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with running(tmp_path_factory.mktemp("live") / "serve.log") as cluster:
        yield cluster
        # A service manager stops it so, and Ray's own handler would abort it on the way.
        assert stop(cluster.process, signal.SIGTERM) == 0, cluster.log.read_text()
