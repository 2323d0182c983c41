"""How much a gateway does at a time: requests that run, and work in threads, of all its models."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TypeVar

from .errors import ApiError

Result = TypeVar("Result")

#: Conversations that are rendered and tokenized at a time; others wait for a thread.
TOKENIZER_THREADS = 2
GRAMMAR_THREADS = 2  #: of which one compiles; who waits in the other one makes it hurry
THREAD_WAIT_S = 10.0  #: for work to wait for a thread; behind that it is not done any more


class GatewayCapacity:
    """Counts what runs, and refuses what is beyond `max_requests`."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self.running = 0  #: Requests that run now.
        self.answer_memory_full = False  #: Answers hold more than they may (`answer_memory.py`).
        self.in_threads = 0  #: What is tokenized or compiled now, or waits for that.
        #: Wait for the process that compiles a grammar, so that the event loop need not.
        self._grammar_threads = ThreadPoolExecutor(GRAMMAR_THREADS, "grammars")
        self._tokenizer_threads = ThreadPoolExecutor(TOKENIZER_THREADS, "tokenizer")

    def check_room(self, requests: int = 1) -> None:
        """Raises ApiError if so many more requests may not run, as a call with several prompts has.

        The requests count once they run. So several calls may find the same room while they are
        prepared, and `running_request` refuses what comes too late.
        """
        if requests > self._max_requests:
            message = f"{requests} prompts, of which {self._max_requests} may run at a time"
            raise ApiError("invalid_request", message, "prompt")
        if self.answer_memory_full:
            raise ApiError("queue_full", "answers take all memory that they may have")
        earlier_requests = self.running + self.in_threads
        if earlier_requests + requests > self._max_requests:
            raise self._full_error(earlier_requests)

    def _full_error(self, requests: int) -> ApiError:
        message = f"{requests} requests are running already, of at most {self._max_requests}"
        return ApiError("queue_full", message)

    @contextlib.contextmanager
    def running_request(self) -> Iterator[None]:
        """Counts a request as running. Raises ApiError if no more requests may run."""
        if self.running >= self._max_requests:
            raise self._full_error(self.running)
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    async def tokenize(self, work: Callable[[], Result]) -> Result:
        """Runs `work` in a tokenizer's thread, as a long text takes seconds. Raises ApiError."""
        return await self._run_in_thread(self._tokenizer_threads, work)

    async def compile(self, work: Callable[[], Result]) -> Result:
        """Runs `work`, which compiles a grammar, in a thread. Raises ApiError."""
        return await self._run_in_thread(self._grammar_threads, work)

    async def _run_in_thread(self, threads: Executor, work: Callable[[], Result]) -> Result:
        """Runs `work` in one of the threads; what waits for one counts as a running request.

        Raises ApiError if there are too many of these, and if no thread begins the work in time.
        """
        self.check_room()
        start_by_s = time.monotonic() + THREAD_WAIT_S

        def work_in_time() -> Result:
            if time.monotonic() > start_by_s:
                message = f"no thread was free for this request within {THREAD_WAIT_S:g} s"
                raise ApiError("no_capacity", message)
            return work()

        self.in_threads += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, work_in_time)
        finally:
            self.in_threads -= 1

    def close(self) -> None:
        """Ends the threads; work that waits for one is not done."""
        self._tokenizer_threads.shutdown(wait=False, cancel_futures=True)
        self._grammar_threads.shutdown(wait=False, cancel_futures=True)
