"""How late and how exact this client is, measured against a server that knows better.

`serve` is a server in a process of its own. It streams chat chunks at fixed times, and puts the
time at which it sent each into the chunk (CLOCK_MONOTONIC, the same in all processes of a machine).
`measure` reads such streams with the client of the load test, several at once, and compares.
"""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import sys
import threading
import time
from typing import Any, NamedTuple

from .errors import LoadError
from .percentiles import percentiles
from .sse import EventDecoder, HttpConnection

STREAMS = 8  #: read at once
CHUNKS = 40  #: of each stream: at this pace, one second
GAP_S = 0.025  #: between two chunks of a stream
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class EchoedChunk(NamedTuple):
    """When the server sent a chunk, and when the client says that it came."""

    sent_s: float
    arrived_s: float


def serve() -> None:
    """Serves until stdin ends, which `measure` closes; prints the port first."""
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    threading.Thread(target=_accept, args=(listener,), daemon=True).start()
    sys.stdin.read()


def _accept(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    """Streams chat chunks to whatever request comes; a chunk's text is when it was sent, in ns."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.recv(65536)
    connection.sendall(HEAD)
    began = time.perf_counter()
    for number in range(CHUNKS):
        time.sleep(max(0.0, began + number * GAP_S - time.perf_counter()))
        body = b'data: {"choices":[{"delta":{"content":"%d"}}]}\n\n' % time.perf_counter_ns()
        connection.sendall(b"%x\r\n%s\r\n" % (len(body), body))
    connection.sendall(b"0\r\n\r\n")


def _read(url: str, chunks: list[EchoedChunk], lags_s: list[float]) -> None:
    """Appends one stream's chunks, and the lags of its reads."""
    connection = HttpConnection(url, 10.0)
    events = EventDecoder()
    connection.send("GET", "/", b"", {})
    for arrived_s, piece in connection.pieces():
        for event in events.feed(piece):
            sent_ns = int(json.loads(event.data)["choices"][0]["delta"]["content"])
            chunks.append(EchoedChunk(sent_ns / 1e9, arrived_s))
    lags_s += connection.lags_s
    connection.close()


def measure() -> dict[str, Any]:
    """Reads `STREAMS` streams for one second; returns p50 and p99 of three errors.

    `late_us`: from a chunk's send to its stamp. `gap_error_us`: |measured gap - true gap|.
    `read_us`: from the kernel's stamp to this process; empty where the kernel stamps nothing.
    Raises LoadError if the server does not start.
    """
    command = [sys.executable, "-m", "diptych.loadtests.echo"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdin is not None
    try:
        port = process.stdout.readline().strip()
        if not port:  # the process has ended
            raise LoadError("the client cannot be measured: its test server did not start")
        url = f"http://127.0.0.1:{port}"
        streams: list[list[EchoedChunk]] = [[] for _ in range(STREAMS)]
        lags_s: list[float] = []
        readers = [threading.Thread(target=_read, args=(url, chunks, lags_s)) for chunks in streams]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
    finally:
        process.stdin.close()
        process.wait(10)

    lateness_s = [chunk.arrived_s - chunk.sent_s for chunks in streams for chunk in chunks]
    gap_errors_s = [
        _gap_error_s(previous, chunk)
        for chunks in streams
        for previous, chunk in itertools.pairwise(chunks)
    ]
    return {
        "streams": STREAMS,
        "chunks": len(lateness_s),
        "late_us": percentiles(lateness_s, (50, 99), factor=1e6, digits=1),
        "gap_error_us": percentiles(gap_errors_s, (50, 99), factor=1e6, digits=1),
        "read_us": percentiles(lags_s, (50, 99), factor=1e6, digits=1),
    }


def _gap_error_s(previous: EchoedChunk, chunk: EchoedChunk) -> float:
    measured_s = chunk.arrived_s - previous.arrived_s
    true_s = chunk.sent_s - previous.sent_s
    return abs(measured_s - true_s)


if __name__ == "__main__":
    serve()
