"""Who renders slowly holds up nobody: limits of waiting, and of who is waited for."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from diptych.cluster.gateway import capacity
from diptych.cluster.gateway.errors import ApiError
from diptych.cluster.gateway.text import limited, templates
from diptych.cluster.gateway.text.limited import (
    BusyError,
    LimitedProcesses,
    OverLimitError,
    ProcessLimits,
    RefusedError,
    SetupError,
)
from diptych.cluster.gateway.text.templates import ChatTemplates, NotAtOnceError
from diptych.cluster.gateway.text.tokenizer import FAST_SHORT_PROMPT_CHARS, ChatTokenizer

from tests.support.live import eventually
from tests.support.standin import QUESTION, checkpoint, standing_in

#: Takes all time where a request says `slow`, in loops that only a kill can end.
SLOW_LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
#: Takes longer than an event loop may wait, and ends by itself.
BRIEF_LOOP = "{% for i in range(300) %}{% for j in range(20000) %}{% endfor %}{% endfor %}"
TEMPLATE = "{% if slow %}" + SLOW_LOOPS + "{% endif %}{{ messages }}"
QUICK: dict[str, Any] = {"messages": "hello"}
SLOW: dict[str, Any] = {**QUICK, "slow": True}
FOR_EVER_S = 600.0


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets limits of the templates that are made behind it; the others never come."""

    def set_limits(**values: float) -> None:
        defaults = {"LIMIT_S": FOR_EVER_S, "CONTESTED_S": FOR_EVER_S, "WAIT_S": FOR_EVER_S}
        for name, value in {**defaults, **values}.items():
            monkeypatch.setattr(templates, name, value)

    return set_limits


class Rendering:
    """A rendering in a thread of its own."""

    def __init__(self, texts: ChatTemplates, variables: dict[str, Any]) -> None:
        self.error: Exception | None = None
        self.text = ""
        self._thread = threading.Thread(target=self._render, args=(texts, variables))
        self._thread.start()

    def _render(self, texts: ChatTemplates, variables: dict[str, Any]) -> None:
        try:
            self.text = texts.render(variables, tools=False)
        except RefusedError as error:
            self.error = error

    @property
    def runs(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> None:
        self._thread.join(60)
        assert not self.runs


@pytest.fixture
def nothing_leaks() -> Iterator[None]:
    """Neither a process nor an open file is left behind.

    Garbage of earlier tests may close its files meanwhile.
    """
    this = psutil.Process()
    children = set(this.children())
    files = len(os.listdir("/proc/self/fd"))
    yield
    assert set(this.children()) <= children
    assert len(os.listdir("/proc/self/fd")) <= files


def waiting(texts: ChatTemplates) -> int:
    return texts._processes._waiting_requests


def begin_slowly(texts: ChatTemplates) -> Rendering:
    """Begin a rendering that does not end, and return when it has the only process."""
    assert texts.render(QUICK, tools=False) == "hello"
    slow = Rendering(texts, SLOW)
    eventually(lambda: not texts._processes._idle)
    return slow


@pytest.mark.usefixtures("nothing_leaks")
def test_a_slow_rendering_makes_way_for_those_that_wait(limits: Callable[..., None]) -> None:
    limits(CONTESTED_S=0.2)
    texts = ChatTemplates(TEMPLATE, "")
    slow = begin_slowly(texts)
    quick = [Rendering(texts, QUICK) for _ in range(5)]
    for rendering in (slow, *quick):
        rendering.end()
    assert [rendering.text for rendering in quick] == ["hello"] * 5
    assert isinstance(slow.error, BusyError) and "others wait" in str(slow.error)
    texts.close()


@pytest.mark.usefixtures("nothing_leaks")
def test_a_slow_rendering_that_nobody_waits_for_has_its_whole_time(
    limits: Callable[..., None],
) -> None:
    limits(CONTESTED_S=0.05, LIMIT_S=0.5)
    texts = ChatTemplates(TEMPLATE, "")
    with pytest.raises(OverLimitError, match=r"more than 1\.5 s"):  # with KILL_MARGIN_S
        texts.render(SLOW, tools=False)
    texts.close()


@pytest.mark.usefixtures("nothing_leaks")
def test_who_finds_no_process_in_time_is_told_so(limits: Callable[..., None]) -> None:
    limits(WAIT_S=0.1, LIMIT_S=2.0)
    texts = ChatTemplates(TEMPLATE, "")
    slow = begin_slowly(texts)
    with pytest.raises(BusyError, match=r"within 0\.1 s"):
        texts.render(QUICK, tools=False)
    slow.end()
    assert isinstance(slow.error, OverLimitError)
    assert texts.render(QUICK, tools=False) == "hello", "another process took its place"
    texts.close()


@pytest.mark.usefixtures("nothing_leaks")
def test_no_more_wait_than_may(limits: Callable[..., None]) -> None:
    limits(WAITING_CONVERSATIONS=2, LIMIT_S=3.0)
    texts = ChatTemplates(TEMPLATE, "")
    slow = begin_slowly(texts)
    patient = [Rendering(texts, QUICK) for _ in range(2)]
    eventually(lambda: waiting(texts) == 2)
    with pytest.raises(BusyError, match="2 others wait"):
        texts.render(QUICK, tools=False)
    for rendering in (slow, *patient):
        rendering.end()
    assert [rendering.text for rendering in patient] == ["hello"] * 2
    texts.close()


@pytest.mark.usefixtures("nothing_leaks")
def test_a_process_that_somebody_kills_in_the_middle_is_replaced(
    limits: Callable[..., None],
) -> None:
    limits()
    before = set(psutil.Process().children())
    texts = ChatTemplates("{% if brief %}" + BRIEF_LOOP + "{% endif %}{{ messages }}", "")
    assert texts.render(QUICK, tools=False) == "hello"
    (process,) = set(psutil.Process().children()) - before
    rendering = Rendering(texts, {**QUICK, "brief": True})
    eventually(lambda: not texts._processes._idle)
    process.kill()
    rendering.end()
    assert (rendering.text, rendering.error) == ("hello", None)
    texts.close()


@pytest.mark.usefixtures("nothing_leaks")
def test_closing_ends_those_that_wait(limits: Callable[..., None]) -> None:
    limits(LIMIT_S=2.0)
    texts = ChatTemplates(TEMPLATE, "")
    slow = begin_slowly(texts)
    patient = Rendering(texts, QUICK)
    eventually(lambda: waiting(texts) == 1)
    texts.close()
    patient.end()
    assert isinstance(patient.error, BusyError)
    with pytest.raises(BusyError, match="the gateway ends"):
        texts.render(QUICK, tools=False)
    slow.end()


@pytest.mark.usefixtures("nothing_leaks")
def test_a_process_that_cannot_be_started_is_no_error_of_the_gateway(
    limits: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits()
    texts = ChatTemplates(TEMPLATE, "")

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(limited.subprocess, "Popen", refuse)
    with pytest.raises(BusyError, match="temporarily unavailable"):
        texts.render(QUICK, tools=False)
    monkeypatch.undo()
    assert texts.render(QUICK, tools=False) == "hello"
    texts.close()


def test_what_renders_long_may_run_on_every_core(limits: Callable[..., None]) -> None:
    """A short rendering stays on its caller's core, which is cheaper."""
    limits(LIMIT_S=3.0)
    texts = ChatTemplates(TEMPLATE, "")
    texts.start()
    child = texts._processes._idle[0]
    assert child is not None
    pid = child._process.pid
    slow = begin_slowly(texts)
    eventually(lambda: os.sched_getaffinity(pid) == os.sched_getaffinity(0))
    slow.end()
    texts.close()


#: A program whose setup is a line of Python, and which runs requests in a thread.
PROGRAM = """
import os, threading, time
from diptych.cluster.gateway.text.limited import serve

def make_handler(setup):
    exec(setup)

    def handle(request):
        thread = threading.Thread(target=exec, args=(request, globals()))
        thread.start()
        thread.join()
        return b"done"

    return handle

serve(make_handler)
"""


@pytest.fixture
def program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], LimitedProcesses]]:
    """Makes processes that run `PROGRAM` with this setup."""
    (tmp_path / "program_of_a_test.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    limits = ProcessLimits(
        request_s=30.0,
        contested_s=30.0,
        wait_s=30.0,
        waiting_requests=1,
        memory_mib=512,
        reply_bytes=1024,
    )
    made: list[LimitedProcesses] = []

    def make(setup: str) -> LimitedProcesses:
        made.append(LimitedProcesses("program_of_a_test", setup.encode(), limits, 1))
        return made[-1]

    yield make
    for processes in made:
        processes.close()


@pytest.mark.usefixtures("nothing_leaks")
def test_threads_that_began_on_one_core_are_let_go_too(
    program: Callable[[str], LimitedProcesses],
) -> None:
    processes = program("pass")
    assert processes.ask(b"pass") == b"done"
    child = processes._idle[0]
    assert child is not None
    tasks = f"/proc/{child._process.pid}/task"
    asking = threading.Thread(target=processes.ask, args=(b"time.sleep(3.0)",))
    asking.start()
    try:
        eventually(lambda: len(os.listdir(tasks)) > 1)
        everywhere = os.sched_getaffinity(0)
        eventually(
            lambda: all(
                os.sched_getaffinity(int(thread)) == everywhere for thread in os.listdir(tasks)
            )
        )
        assert len(os.listdir(tasks)) > 1, "the thread had not ended before"
    finally:
        asking.join(30)


@pytest.mark.usefixtures("nothing_leaks")
def test_who_asks_is_not_to_blame_for_a_setup_that_fails(
    program: Callable[[str], LimitedProcesses], tmp_path: Path
) -> None:
    file = tmp_path / "setup"
    processes = program(f"open({str(file)!r})")
    with pytest.raises(SetupError, match="No such file"):
        processes.ask(b"pass")
    file.touch()
    assert processes.ask(b"pass") == b"done"


@pytest.mark.usefixtures("nothing_leaks")
def test_a_process_that_is_killed_while_it_starts_is_replaced_once(
    program: Callable[[str], LimitedProcesses], tmp_path: Path
) -> None:
    file = tmp_path / "starts"
    file.touch()
    note_start = f"open({str(file)!r}, 'a').write('x')"
    end_once = f"{note_start} and os.path.getsize({str(file)!r}) == 1 and os._exit(1)"
    assert program(end_once).ask(b"pass") == b"done"
    assert file.read_text() == "xx"
    file.write_text("")
    with pytest.raises(SetupError):
        program(f"{note_start} and os._exit(1)").ask(b"pass")
    assert file.read_text() == "xx"


@pytest.mark.usefixtures("nothing_leaks")
def test_a_process_that_does_not_get_ready_in_time_is_no_fault_of_the_request(
    program: Callable[[str], LimitedProcesses], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limited, "START_TIMEOUT_S", 0.1)
    with pytest.raises(SetupError, match=r"more than 0\.1 s"):
        program("time.sleep(30)").ask(b"pass")


def test_a_chat_that_no_process_gets_ready_for_may_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = ChatTokenizer(checkpoint(tmp_path / "demo"))
    messages = [{"role": "user", "content": QUESTION}]
    monkeypatch.setattr(limited, "START_TIMEOUT_S", 0.0)
    with pytest.raises(ApiError, match="no process got ready") as error:
        tokenizer.tokenize_chat(messages)
    assert error.value.reason == "no_capacity"
    assert "more than 0 s" in caplog.text
    monkeypatch.undo()
    assert tokenizer.tokenize_chat(messages).token_ids
    tokenizer.close()


async def briefly(texts: ChatTemplates, variables: dict[str, Any]) -> str:
    """Render on an event loop's thread."""
    return texts.render(variables, tools=False)


def at_once(texts: ChatTemplates, variables: dict[str, Any]) -> str:
    """Render on an event loop's thread, again while the machine gives the process no core."""
    for _ in range(1000):
        try:
            return asyncio.run(briefly(texts, variables))
        except NotAtOnceError:
            assert texts.render(variables, tools=False)  # another thread's part
    raise AssertionError("never at once")


@pytest.mark.usefixtures("nothing_leaks")
def test_an_event_loop_never_waits_for_a_rendering(limits: Callable[..., None]) -> None:
    limits(LIMIT_S=3.0)
    texts = ChatTemplates("{% if slow %}" + BRIEF_LOOP + "{% endif %}{{ messages }}", "")
    texts.start()
    with pytest.raises(NotAtOnceError):  # the process is not ready
        asyncio.run(briefly(texts, QUICK))
    assert texts.render(QUICK, tools=False) == "hello"
    assert at_once(texts, QUICK) == "hello"

    child = texts._processes._idle[0]
    assert child is not None
    for variables in (SLOW, QUICK):  # the second one finds the process busy
        with pytest.raises(NotAtOnceError):
            asyncio.run(briefly(texts, variables))
    assert texts.render(SLOW, tools=False) == "hello", "the reply to what was asked before"
    assert at_once(texts, QUICK) == "hello"
    with pytest.raises(NotAtOnceError):
        asyncio.run(briefly(texts, SLOW))
    other = {**QUICK, "messages": "other"}
    assert texts.render(other, tools=False) == "other", "not the reply to the one before"
    assert child is texts._processes._idle[0], "the process lives on"
    with pytest.raises(NotAtOnceError):
        asyncio.run(briefly(texts, {"messages": "x" * (templates.BRIEF_TEXT_BYTES + 1)}))
    texts.close()


@pytest.mark.usefixtures("nothing_leaks")
def test_who_comes_behind_what_an_event_loop_left_waits_no_longer_than_others(
    limits: Callable[..., None],
) -> None:
    limits(CONTESTED_S=0.2)
    texts = ChatTemplates(TEMPLATE, "")
    assert texts.render(QUICK, tools=False) == "hello"
    with pytest.raises(NotAtOnceError):
        asyncio.run(briefly(texts, SLOW))
    assert texts.render(QUICK, tools=False) == "hello"
    texts.close()


def test_chats_that_render_slowly_hold_up_neither_chats_nor_completions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "CONTESTED_S", 0.5)
    folder = checkpoint(tmp_path / "demo")
    file = folder / "chat_template.jinja"
    is_slow = "{% if slow or 'slowly' in messages[0].content %}"
    file.write_text(is_slow + SLOW_LOOPS + "{% endif %}" + file.read_text())
    with standing_in(folder) as gateway:
        chat = {"messages": [{"role": "user", "content": QUESTION}]}
        statuses: list[int] = []

        def ask_slowly(slow: dict[str, Any]) -> None:
            answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=slow, timeout=60)
            statuses.append(answer.status_code)
            if answer.status_code == 503:
                assert "others wait" in answer.text and answer.headers["retry-after"]

        in_a_thread = chat | {"chat_template_kwargs": {"slow": True}}
        on_the_loop = {"messages": [{"role": "user", "content": "slowly"}]}
        asking = [
            threading.Thread(target=ask_slowly, args=(slow,))
            for slow in (in_a_thread, on_the_loop) * 3
        ]
        for thread in asking:
            thread.start()
        completions = 0
        while any(thread.is_alive() for thread in asking):
            body = {"prompt": QUESTION}
            answer = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=30)
            assert answer.status_code == 200, answer.text
            completions += any(thread.is_alive() for thread in asking)
            answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=chat, timeout=30)
            assert answer.status_code == 200, answer.text
        assert len(statuses) == 6 and set(statuses) <= {400, 503} and 503 in statuses
        assert completions, "what needs no template is answered in between"


def test_work_that_no_thread_begins_in_time_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "THREAD_WAIT_S", 0.0)
    with standing_in(checkpoint(tmp_path / "demo")) as gateway:
        long = QUESTION * (FAST_SHORT_PROMPT_CHARS // len(QUESTION) + 1)
        answer = httpx.post(f"{gateway.url}/v1/completions", json={"prompt": long})
        assert answer.status_code == 503 and "within 0 s" in answer.text
        answer = httpx.post(f"{gateway.url}/v1/completions", json={"prompt": QUESTION})
        assert answer.status_code == 200, "what is short needs no thread"
        assert gateway.gateway.capacity.in_threads == 0


def test_the_prompts_of_a_call_are_requests_and_bounded_as_such(tmp_path: Path) -> None:
    with standing_in(checkpoint(tmp_path / "demo"), gateway={"max_streams": 2}) as gateway:

        def status(prompts: int) -> int:
            body = {"prompt": ["a"] * prompts, "max_tokens": 1}
            return httpx.post(f"{gateway.url}/v1/completions", json=body).status_code

        assert [status(1), status(2), status(3)] == [200, 200, 400]  # three never run at a time
        gateway.gateway.capacity.running = 1
        assert [status(1), status(2)] == [200, 429]
        gateway.gateway.capacity.running = 0


def test_a_call_that_comes_back_needs_no_room_for_what_it_has(tmp_path: Path) -> None:
    with standing_in(checkpoint(tmp_path / "demo"), gateway={"max_streams": 2}) as gateway:

        def answer(request_id: str) -> httpx.Response:
            return httpx.post(
                f"{gateway.url}/v1/completions",
                json={"prompt": ["a", "b"], "max_tokens": 3},
                headers={"x-request-id": request_id},
            )

        first = answer("mine").json()["choices"]
        gateway.gateway.capacity.running = 1
        assert answer("mine").json()["choices"] == first
        assert answer("another").status_code == 429
        gateway.gateway.capacity.running = 0


def test_calls_that_are_prepared_at_a_time_exceed_the_bound_no_more_than_others(
    tmp_path: Path,
) -> None:
    """Each finds room while it is prepared, and the last one none when it is to run."""
    with standing_in(checkpoint(tmp_path / "demo"), gateway={"max_streams": 2}) as gateway:
        shared = gateway.gateway.capacity
        shared.check_room(2)
        with shared.running_request():
            shared.check_room(1)
            with (
                shared.running_request(),
                pytest.raises(ApiError) as refused,
                shared.running_request(),
            ):
                pass
        assert (refused.value.reason, shared.running) == ("queue_full", 0)


def test_no_more_work_waits_for_threads_than_requests_may_run(tmp_path: Path) -> None:
    settings = {"max_streams": 1}
    with standing_in(checkpoint(tmp_path / "demo"), gateway=settings) as gateway:
        gateway.gateway.capacity.in_threads = 1
        answer = httpx.post(f"{gateway.url}/tokenize", json={"prompt": QUESTION})
        assert answer.status_code == 429
        gateway.gateway.capacity.in_threads = 0
        assert httpx.post(f"{gateway.url}/tokenize", json={"prompt": QUESTION}).is_success
