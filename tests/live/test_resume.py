"""Clients whose connection breaks come back for the rest of their answer; and ^C under streams."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.support.live import Live, eventually, running

pytestmark = pytest.mark.cluster

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "What is prefill?"}]}
#: long answers that differ from each other: nothing ends them
LONG = {**ASK, "temperature": 0.8, "seed": 5, "ignore_eos": True, "max_tokens": 300, "n": 2}


class Event(NamedTuple):
    id: str | None  #: None: it has none, the next one has
    data: str


def events(
    live: Live,
    body: dict,
    most: int = 10**6,
    on_event: Callable[[], object] = lambda: None,
    **headers: str,
) -> list[Event]:
    """The first `most` events of a stream; then the client leaves."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    url, found, number = f"{live.url}/v1/chat/completions", list[Event](), None
    with httpx.stream("POST", url, json={**body, "stream": True}, headers=names, timeout=60) as got:
        assert got.status_code == 200, got.read()
        data = ""
        for line in got.iter_lines():
            if line.startswith("data: "):
                data = line[6:]
            elif line.startswith("id: "):
                number = line[4:]
            elif not line:
                found.append(Event(number, data))
                number = None
                on_event()
                if len(found) == most:
                    break
    return found


def texts(told: list[Event]) -> dict[int, str]:
    """Text of each answer."""
    found: dict[int, str] = {}
    for event in told:
        for choice in json.loads(event.data)["choices"] if event.data != "[DONE]" else []:
            text = choice["delta"].get("content") or ""
            found[choice["index"]] = found.get(choice["index"], "") + text
    return found


def joined(*parts: list[Event]) -> dict[int, str]:
    whole = [texts(part) for part in parts]
    return {index: "".join(one.get(index, "") for one in whole) for index in (0, 1)}


def cut(told: list[Event]) -> tuple[list[Event], str]:
    """What a client that keeps to the contract has: up to its last id."""
    last = max(at for at, event in enumerate(told) if event.id)
    return told[: last + 1], told[last].id or ""


@pytest.fixture(scope="module")
def whole(live: Live) -> dict[int, str]:
    told = events(live, LONG, x_request_id="undisturbed")
    assert told[-1].data == "[DONE]" and not any(event.id for event in told)
    return texts(told)


@pytest.mark.parametrize("way", ["ids", "keep"])
def test_an_answer_goes_on_behind_the_last_event(live: Live, whole: dict, way: str) -> None:
    name = f"back-{way}"
    first, last = cut(events(live, LONG, 12, x_request_id=name, x_resume=way))
    second, again = cut(events(live, LONG, 9, x_request_id=name, last_event_id=last))
    rest = events(live, LONG, x_request_id=name, x_resume_from=again)
    assert joined(first, second, rest) == whole
    assert rest[-1].data == "[DONE]"
    assert all(0 < len(text) < len(whole[0]) for text in texts(first).values())


def test_it_does_not_matter_which_gateway_had_the_answer(live: Live, whole: dict) -> None:
    """One that has never heard of it generates it again, and tells what is missing."""
    first, last = cut(events(live, LONG, 20, x_request_id="here", x_resume="ids"))
    rest = events(live, LONG, x_request_id="elsewhere", x_resume_from=last)
    assert joined(first, rest) == whole


def test_a_request_id_alone_is_enough_for_the_same_answer(live: Live) -> None:
    body = {key: value for key, value in LONG.items() if key != "seed"}
    first = events(live, body, 12, x_request_id="seedless")
    again = events(live, body, x_request_id="seedless")
    other = events(live, body, x_request_id="seedless-2")
    assert texts(again)[0].startswith(texts(first)[0]) and texts(again) != texts(other)


def test_an_answer_that_is_kept_goes_on_while_its_client_is_away(live: Live, whole: dict) -> None:
    finished = live.status()["requests"]["finished"]
    events(live, LONG, 3, x_request_id="away", x_resume="keep")
    eventually(lambda: live.status()["requests"]["finished"] > finished)
    steps = live.worker("decode")["engine"]["steps"]
    assert texts(events(live, LONG, x_request_id="away")) == whole
    plain = httpx.post(
        f"{live.url}/v1/chat/completions", json=LONG, headers={"x-request-id": "away"}, timeout=60
    ).json()
    assert {one["index"]: one["message"]["content"] for one in plain["choices"]} == whole
    assert live.worker("decode")["engine"]["steps"] == steps, "nothing was generated for these"


def test_a_client_that_just_leaves_frees_the_workers(live: Live) -> None:
    events(live, {**LONG, "max_tokens": 900}, 3, x_request_id="gone")
    eventually(live.idle)


@pytest.mark.parametrize("from_", ["12", "0.4e"])
def test_only_a_stream_is_resumed_half_way(live: Live, from_: str) -> None:
    headers = {"x-resume-from": from_, "x-request-id": "whole"}
    url = f"{live.url}/v1/chat/completions"
    refused = httpx.post(url, json=ASK, headers=headers, timeout=60)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "x-resume-from"


@pytest.mark.slow
def test_at_the_end_streams_are_told_and_not_cut_off(tmp_path: Path) -> None:
    with running(tmp_path / "serve.log") as live:
        _end_under_streams(live)


def _end_under_streams(live: Live) -> None:
    told: list[list[Event]] = []
    begun = set[int]()  #: streams whose client has an event: from there on an error is an event too

    def read(number: int) -> None:
        body = {**LONG, "max_tokens": 900, "seed": number}
        began = partial(begun.add, number)
        told.append(events(live, body, on_event=began, x_request_id=f"end-{number}"))

    readers = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for reader in readers:
        reader.start()
    eventually(lambda: len(begun) == 4 and live.worker("decode")["engine"]["running"] >= 8)
    os.kill(live.process.pid, signal.SIGINT)
    for reader in readers:
        reader.join(60)
    assert len(told) == 4, "a connection broke"
    for one in told:
        error = json.loads(one[-1].data)["error"]
        assert error["code"] == "draining" and "same x-request-id" in error["message"]
    assert live.process.wait(60) is not None
