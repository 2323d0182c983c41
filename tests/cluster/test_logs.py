"""What a line of the log looks like."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from contextvars import copy_context

import pytest
from diptych.cluster.telemetry import logs


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    logger = logging.getLogger(logs.LOGGER_NAME)
    before = logger.handlers, logger.propagate, logger.level
    yield
    logger.handlers, logger.propagate = before[:2]
    logger.setLevel(before[2])


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_json_lines_name_the_request_of_their_task(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("json", "gateway")
    log = logging.getLogger("diptych.cluster.gateway.attempt.request")

    async def work(name: str) -> None:
        logs.set_request_id(name)
        await asyncio.sleep(0)
        log.warning("attempt %d failed", 1)

    async def both() -> None:
        await asyncio.gather(work("a"), work("b"))
        log.info("nobody's")

    asyncio.run(both())
    told = [json.loads(line) for line in lines(capsys)]
    assert [one.get("request_id") for one in told] == ["a", "b", None]
    assert told[0]["message"] == "attempt 1 failed" and told[0]["level"] == "warning"
    assert told[0]["part"] == "gateway" and told[0]["time"].endswith("Z")


def test_an_exception_stays_within_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("json", "worker")
    try:
        raise ValueError("no\nway")
    except ValueError:
        logging.getLogger("diptych.engine").exception("it failed")
    (line,) = lines(capsys)
    assert "ValueError: no" in json.loads(line)["exception"]


def test_text_lines_are_warnings_with_time_and_request(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("text", "router")
    log = logging.getLogger("diptych.cluster.wire.router_link")

    def work() -> None:
        logs.set_request_id("req-1")
        log.info("not said")
        log.warning("said")

    copy_context().run(work)
    (line,) = lines(capsys)
    assert line.split(" ", 1)[1] == "WARNING router [req-1] said"
