"""How late and how exact this client is, measured against a server that knows better.

`serve` is a server of its own process that streams chat chunks at fixed times and puts the time at
which it sent each into the chunk (CLOCK_MONOTONIC, the same in all processes of a machine).
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
from typing import Any

import numpy as np

from .sse import Connection, Events

STREAMS, CHUNKS, GAP_S = 8, 40, 0.025
LINE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def serve() -> None:
    """Prints its port; ends when stdin does."""
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    threading.Thread(target=_accept, args=(listener,), daemon=True).start()
    sys.stdin.read()


def _accept(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.recv(65536)
    connection.sendall(LINE)
    begin = time.perf_counter()
    for number in range(CHUNKS):
        time.sleep(max(0.0, begin + number * GAP_S - time.perf_counter()))
        body = b'data: {"choices":[{"delta":{"content":"%d"}}]}\n\n' % time.perf_counter_ns()
        connection.sendall(b"%x\r\n%s\r\n" % (len(body), body))
    connection.sendall(b"0\r\n\r\n")


def _read(url: str, rows: list[tuple[float, float]], lags: list[float]) -> None:
    connection, events = Connection(url, 10.0), Events()
    connection.send("GET", "/", b"", {})
    for stamp, piece in connection.pieces():
        for _, payload in events.feed(piece):
            sent = int(json.loads(payload)["choices"][0]["delta"]["content"]) / 1e9
            rows.append((sent, stamp))
    lags += connection.lags_s
    connection.close()


def measure() -> dict[str, Any]:
    """One second, `STREAMS` streams: `late_us`: from a chunk's send to its stamp; `gap_error_us`:
    |measured gap - true gap|; `read_us`: from the kernel's stamp to ours. p50 and p99."""
    command = [sys.executable, "-m", "diptych.loadtests.echo"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdin is not None
    try:
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        streams: list[list[tuple[float, float]]] = [[] for _ in range(STREAMS)]
        lags: list[float] = []
        readers = [threading.Thread(target=_read, args=(url, rows, lags)) for rows in streams]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
    finally:
        process.stdin.close()
        process.wait(10)
    late = [stamp - sent for rows in streams for sent, stamp in rows]
    errors = [
        abs((b[1] - a[1]) - (b[0] - a[0])) for rows in streams for a, b in itertools.pairwise(rows)
    ]
    return {
        "streams": STREAMS,
        "chunks": len(late),
        "late_us": _ranks(late),
        "gap_error_us": _ranks(errors),
        "read_us": _ranks(lags),
    }


def _ranks(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    found = np.percentile(seconds, (50, 99)) * 1e6
    return {"p50": round(float(found[0]), 1), "p99": round(float(found[1]), 1)}


if __name__ == "__main__":
    serve()
