"""Serves a process's page of metrics to Prometheus, on a port of its own.

The exporter is a small HTTP server on the process's event loop, because a worker has no other one.
Each connection takes one request, which is enough for a scrape.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from ..config import ObservabilitySettings, host_and_port
from .page import MetricRow, MetricsPage, RowSource, build_registry

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 5.0  #: Time for a request to arrive and its answer to leave, together.
HEAD_BYTES_MAX = 16 << 10  #: Limit of a request's line and headers together.
#: How many ports are tried, from the configured one on: processes on one host share this range.
PORTS_TRIED = 64


def _choose_encoder(
    accept: str, *, vllm_names: bool
) -> tuple[Callable[[CollectorRegistry], bytes], str]:
    """Return what writes a page in the format that the client prefers, and its content type.

    A header that cannot be understood counts as none. So does one that asks for OpenMetrics without
    `escaping=allow-utf-8`, as Prometheus 2 does, if the page has `vllm_names`: the encoder would
    write `_` for their colons, and vLLM's boards would find nothing.
    """
    try:
        encode, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # a version that is no number
        return choose_encoder("")
    escapes_colons = content_type.startswith("application/openmetrics-text") and (
        "escaping=allow-utf-8" not in content_type
    )
    if vllm_names and escapes_colons:
        return choose_encoder("")
    return encode, content_type


class _Answer(NamedTuple):
    """An HTTP response but for its length."""

    status: str
    content_type: str
    body: bytes


class Exporter:
    """Answers `GET /metrics`, one request for each connection, and renders the page for others.

    `labels` are put on every row of this process, unless the row has values of its own for them.
    Under vLLM's names a row has only the label `model` of them, as `model_name`. `read_rows` makes
    the rows anew for each page. `settings` says where to listen, and whether vLLM's names are
    exported, too.
    """

    def __init__(
        self, settings: ObservabilitySettings, labels: dict[str, str], read_rows: RowSource
    ) -> None:
        self._labels = labels
        self._read_rows = read_rows
        self._vllm_names = "vllm" in settings.metrics_compat
        self._registry = build_registry(MetricsPage(labels, read_rows, self._vllm_names))
        self._first_port = settings.metrics_port
        self._host = settings.metrics_host
        self._server: asyncio.Server | None = None
        self.address = ""  #: "host:port"; empty until `start` has returned.

    async def start(self, node_host: str) -> None:
        """Listen on the first free port from the configured one on (0: any).

        `node_host` is the address of the node; the exporter listens there if the configuration has
        no `observability.metrics_host`. Raises OSError if it cannot listen.
        """
        host = self._host or node_host
        port_count = PORTS_TRIED if self._first_port else 1
        last_port = self._first_port + port_count - 1
        for port in range(self._first_port, last_port + 1):
            try:
                self._server = await asyncio.start_server(
                    self._serve, host, port, limit=HEAD_BYTES_MAX
                )
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or port == last_port:
                    raise
        assert self._server
        self.address = host_and_port(host, self._server.sockets[0].getsockname()[1])

    def render(self, accept: str = "") -> tuple[str, bytes]:
        """Return content type and text of the page, in the format that the client prefers.

        `accept` is the request's header of that name; empty: Prometheus' text. Raises what
        `read_rows` raises, and KeyError or AssertionError for a row that is not in the catalogue.
        """
        encode, content_type = _choose_encoder(accept, vllm_names=self._vllm_names)
        return content_type, encode(self._registry)

    def render_with(self, more_rows: list[MetricRow], accept: str = "") -> tuple[str, bytes]:
        """Return what `render` does, with `more_rows` added.

        vLLM's names are exported, too, whatever the settings say.
        """
        encode, content_type = _choose_encoder(accept, vllm_names=True)
        page = MetricsPage(self._labels, lambda: [*self._read_rows(), *more_rows], vllm_names=True)
        return content_type, encode(build_registry(page))

    def close(self) -> None:
        """Accept no more connections. Nothing happens before `start`."""
        if self._server:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                answer = self._answer(head.decode("latin-1"))
                response_head = (
                    f"HTTP/1.1 {answer.status}\r\n"
                    f"content-type: {answer.content_type}\r\n"
                    f"content-length: {len(answer.body)}\r\n"
                    "connection: close\r\n\r\n"
                )
                writer.write(response_head.encode() + answer.body)
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the peer is gone or slow, or its head is too long; a scraper comes again
        finally:
            writer.close()

    def _answer(self, head: str) -> _Answer:
        """Answer a request by its head: the request line and the headers."""
        request_line, *header_lines = head.split("\r\n")
        method, _, target_and_version = request_line.partition(" ")
        path = target_and_version.partition(" ")[0].partition("?")[0]
        if method != "GET" or path != "/metrics":
            return _Answer("404 Not Found", "text/plain", b"GET /metrics\n")
        accept = ""
        for line in header_lines:
            name, _, value = line.partition(":")
            if name.lower() == "accept":
                accept = value
                break
        try:
            content_type, body = self.render(accept)
        except Exception:
            log.exception("the page of metrics could not be made")
            message = b"see the process's log for the error\n"
            return _Answer("500 Internal Server Error", "text/plain", message)
        return _Answer("200 OK", content_type, body)
