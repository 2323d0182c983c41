"""Serves a process's page to Prometheus, on a port of its own and on the process's event loop."""

from __future__ import annotations

import asyncio
import errno
import logging

from prometheus_client.exposition import choose_encoder

from ..config import ObservabilitySettings, host_and_port
from .page import Page, Rows, registry

log = logging.getLogger(__name__)

REQUEST_S, HEAD_MAX = 5.0, 16 << 10
PORTS = 64  #: that are tried from the first one on


class Exporter:
    """`GET /metrics`, one request for each connection. `address` is empty until it runs.

    `labels` are those of every row of this process.
    """

    def __init__(self, settings: ObservabilitySettings, labels: dict[str, str], rows: Rows) -> None:
        self._registry = registry(Page(labels, rows, "vllm" in settings.metrics_compat))
        self._first_port = settings.metrics_port
        self._host = settings.metrics_host
        self._server: asyncio.Server | None = None
        self.address = ""

    async def start(self, node_host: str) -> None:
        """Listens on the first free port from the configured one on (0: any). Raises OSError.

        `node_host` is the address of the node, for where `observability.metrics_host` says nothing.
        """
        first_port = self._first_port
        host = self._host or node_host
        for port in range(first_port, first_port + (PORTS if first_port else 1)):
            try:
                self._server = await asyncio.start_server(self._serve, host, port, limit=HEAD_MAX)
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or port == first_port + PORTS - 1:
                    raise
        assert self._server
        self.address = host_and_port(host, self._server.sockets[0].getsockname()[1])

    def page(self, accept: str = "") -> tuple[str, bytes]:
        """Content type and text, in the format that the client prefers."""
        encode, kind = choose_encoder(accept)
        return kind, encode(self._registry)

    def close(self) -> None:
        if self._server:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_S):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                status, kind, body = self._answer(head)
                about = f"content-type: {kind}\r\ncontent-length: {len(body)}\r\n"
                writer.write(
                    f"HTTP/1.1 {status}\r\n{about}connection: close\r\n\r\n".encode() + body
                )
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # whoever it was may come again
        finally:
            writer.close()

    def _answer(self, head: str) -> tuple[str, str, bytes]:
        first, *lines = head.split("\r\n")
        method, _, rest = first.partition(" ")
        if method != "GET" or rest.partition(" ")[0].partition("?")[0] != "/metrics":
            return "404 Not Found", "text/plain", b"GET /metrics\n"
        names = [line.partition(":") for line in lines]
        accept = next((value for name, _, value in names if name.lower() == "accept"), "")
        try:
            kind, body = self.page(accept)
        except Exception:
            log.exception("metrics")
            return "500 Internal Server Error", "text/plain", b"the process's log has it\n"
        return "200 OK", kind, body
