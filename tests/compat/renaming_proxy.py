"""A proxy between vLLM's tests and the server: it renames models, and records each refused request.

The tests ask for the models that vLLM's developers use; the proxy puts the served model's name into the request and
the asked name back into the answer. Names that a test expects to be refused pass as they are.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp import web

RUNNING_TEST_PATH = "/compat/running-test"  #: a POST here says which test asks from now on
REFUSED_NAMES = ("nonexist", "wrong", "invalid", "does-not-exist", "non-exist")
#: names of models in the tests that have no organization before a slash
PLAIN_NAMES = frozenset(
    ["zephyr-lora", "qwen3-lora", "gpt-3.5-turbo", "tinyllama-2", "test-model", "llama2"]
)
HOP_HEADERS = frozenset(
    ["host", "content-length", "transfer-encoding", "connection", "accept-encoding", "expect"]
)
#: headers of the answer that describe its bytes on the way, which the proxy changes
RECODED_HEADERS = frozenset(["content-length", "transfer-encoding", "connection"])


def stands_for_served_model(name: object) -> bool:
    """Return whether `name` is a model of vLLM's tests that the served model takes the place of."""
    if not isinstance(name, str) or any(part in name for part in REFUSED_NAMES):
        return False
    return "/" in name or name.startswith("claude") or name in PLAIN_NAMES


@dataclass
class RenamingProxy:
    """Forwards requests to `upstream` as the model `served_name`; appends refusals to `log`."""

    upstream: str
    served_name: str
    log: Path
    running_test: str = ""
    session: aiohttp.ClientSession | None = None

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Send the request on, and stream its answer back."""
        body = await request.read()
        if request.path == RUNNING_TEST_PATH:
            self.running_test = body.decode()
            return web.Response()

        body, asked_name = self._rename(body)
        headers = {
            name: value
            for name, value in request.headers.items()
            if name.lower() not in HOP_HEADERS
        }
        assert self.session is not None
        async with self.session.request(
            request.method, self.upstream + request.path_qs, data=body or None, headers=headers
        ) as answer:
            return await self._send_back(request, answer, body=body, asked_name=asked_name)

    def _rename(self, body: bytes) -> tuple[bytes, str | None]:
        """Return the body for the server, and the model's name that the client used if it was replaced."""
        try:
            fields = json.loads(body)
        except ValueError:
            return body, None
        if not isinstance(fields, dict) or not stands_for_served_model(fields.get("model")):
            return body, None
        asked_name = fields["model"]
        fields["model"] = self.served_name
        return json.dumps(fields).encode(), asked_name

    async def _send_back(
        self,
        request: web.Request,
        answer: aiohttp.ClientResponse,
        *,
        body: bytes,
        asked_name: str | None,
    ) -> web.StreamResponse:
        headers = [
            (name, value)
            for name, value in answer.headers.items()
            if name.lower() not in RECODED_HEADERS
        ]
        response = web.StreamResponse(status=answer.status, headers=headers)
        await response.prepare(request)
        refusal = b""
        async for chunk in answer.content.iter_any():
            if answer.status >= 400:
                refusal += chunk
            if asked_name is not None:
                served = f'"model":"{self.served_name}"'.encode()
                chunk = chunk.replace(served, f'"model":"{asked_name}"'.encode())
            await response.write(chunk)
        if answer.status >= 400:
            self._record(request, answer.status, body=body, refusal=refusal)
        await response.write_eof()
        return response

    def _record(self, request: web.Request, status: int, *, body: bytes, refusal: bytes) -> None:
        record = {
            "test": self.running_test,
            "status": status,
            "request": f"{request.method} {request.path}",
            "body": body[:2000].decode(errors="replace"),
            "answer": refusal[:800].decode(errors="replace"),
        }
        with self.log.open("a") as log:
            log.write(json.dumps(record) + "\n")


@contextmanager
def renaming_proxy(proxy: RenamingProxy, port: int) -> Iterator[str]:
    """Run the proxy on `port` of 127.0.0.1 in a thread, and yield its URL."""
    loop = asyncio.new_event_loop()
    started = threading.Event()

    async def start() -> web.AppRunner:
        proxy.session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=300),
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            auto_decompress=False,
        )
        application = web.Application(client_max_size=64 << 20)
        application.router.add_route("*", "/{path:.*}", proxy.forward)
        runner = web.AppRunner(application, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        return runner

    def serve() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        started.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        assert proxy.session is not None
        loop.run_until_complete(proxy.session.close())

    thread = threading.Thread(target=serve, name="renaming proxy", daemon=True)
    thread.start()
    assert started.wait(30), "the proxy did not start"
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
