"""A small proxy for vLLM's servers: a script for vLLM's own Python. It imports nothing of Diptych.

    python proxy.py --port 8200 --backend http://127.0.0.1:8201 --backend http://127.0.0.1:8202
    python proxy.py --port 8200 --prefill http://127.0.0.1:8201 --backend http://127.0.0.1:8202

Without `--prefill`, calls go to the backends in turn. With it, a call goes to a prefill server for
one token first; the `kv_transfer_params` that come back travel with the call to a backend, which
fetches the KV over NIXL. That is the protocol of vLLM's NixlConnector.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import uuid
from collections.abc import Iterator
from typing import Any

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

BODY_BYTES_LIMIT = 64 << 20  #: Of a call; above any that the bench sends.
#: What a call to a prefill server has instead of its own values: one token, as one JSON answer, and
#: that the KV is kept for another server. The names that are None are filled in by the answer.
ONE_TOKEN_FIELDS: dict[str, Any] = {
    "stream": False,
    "max_tokens": 1,
    "kv_transfer_params": {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    },
}


class PrefillError(Exception):
    """A prefill server did not answer with 200; `response` is what the client gets instead."""

    def __init__(self, response: web.Response) -> None:
        super().__init__(response.status)
        self.response = response


class Proxy:
    """Forwards calls, each to the next server in turn."""

    def __init__(self, backends: list[str], prefills: list[str]) -> None:
        self._first_backend = backends[0]
        self._backends: Iterator[str] = itertools.cycle(backends)
        self._prefills: Iterator[str] | None = itertools.cycle(prefills) if prefills else None
        self._session: ClientSession | None = None

    async def open(self, _: web.Application) -> None:
        """Open the connections to the servers, once there is an event loop."""
        # Neither connections nor seconds are limited: what waits is to wait in the servers.
        self._session = ClientSession(
            connector=TCPConnector(limit=0), timeout=ClientTimeout(total=None)
        )

    async def close(self, _: web.Application) -> None:
        """End the connections to the servers, and what still runs on them."""
        assert self._session
        await self._session.close()

    async def models(self, request: web.Request) -> web.Response:
        """Answer what the first backend says of its model; all serve the same one."""
        assert self._session
        async with self._session.get(self._first_backend + request.path) as answer:
            return web.Response(
                body=await answer.read(), status=answer.status, content_type="application/json"
            )

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Stream the answer of the next backend to the client, after the prefill if there is one.

        Both servers get the call under one request id, which is new: the client's headers are not
        forwarded.
        """
        assert self._session
        body = await request.json()
        headers = {"x-request-id": str(uuid.uuid4())}
        if self._prefills is not None:
            try:
                body |= await self._prefill(request.path, body, headers)
            except PrefillError as error:
                return error.response
        url = next(self._backends) + request.path
        async with self._session.post(url, json=body, headers=headers) as answer:
            content_type = answer.headers.get("content-type", "application/json")
            response = web.StreamResponse(
                status=answer.status, headers={"content-type": content_type}
            )
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response

    async def _prefill(
        self, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> dict[str, Any]:
        """Have the prompt computed; return the fields that say where its KV is.

        They are empty if the server says nothing of it: then the backend computes the prompt
        itself. Raises PrefillError.
        """
        assert self._session and self._prefills is not None
        # Fields that vLLM refuses beside one token without streaming, or by which it would answer
        # with more than one.
        dropped_fields = ("stream_options", "min_tokens", "max_completion_tokens")
        kept = {name: value for name, value in body.items() if name not in dropped_fields}
        url = next(self._prefills) + path
        async with self._session.post(url, json=kept | ONE_TOKEN_FIELDS, headers=headers) as answer:
            if answer.status != 200:
                text = await answer.text()
                content_type = answer.content_type
                response = web.Response(text=text, status=answer.status, content_type=content_type)
                raise PrefillError(response)
            fields = await answer.json()
        parameters = fields.get("kv_transfer_params")
        return {"kv_transfer_params": parameters} if parameters else {}


async def health(_: web.Request) -> web.Response:
    """Answer that the proxy is up; the servers behind it were waited for before it started."""
    return web.Response(text="ok")


def main() -> None:
    """Serve the proxy on `--port` until a signal ends the process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--backend", action="append", required=True)
    parser.add_argument("--prefill", action="append", default=[])
    options = parser.parse_args()
    # A call takes two open files, and the usual limit of 1,024 would refuse calls in vLLM's name.
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    proxy = Proxy(options.backend, options.prefill)
    app = web.Application(client_max_size=BODY_BYTES_LIMIT)
    app.on_startup.append(proxy.open)
    app.on_cleanup.append(proxy.close)
    app.router.add_get("/health", health)
    app.router.add_get("/v1/models", proxy.models)
    app.router.add_post("/v1/completions", proxy.forward)
    app.router.add_post("/v1/chat/completions", proxy.forward)
    web.run_app(app, host="127.0.0.1", port=options.port, access_log=None, print=None)


if __name__ == "__main__":
    main()
