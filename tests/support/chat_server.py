"""A small server that speaks the chat API: it thinks, echoes, breaks off, and waits."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HEADERS = {
    "content-type": "text/event-stream",
    "x-request-id": "req-7",
    "x-route": "prefill/a,decode/b",
    "x-prefix-hit-tokens": "3",
}


@dataclass
class ChatServer:
    url: str
    #: bodies of all requests, oldest first
    bodies: list[dict[str, Any]] = field(default_factory=list)
    #: set when a client has left an answer that waits
    client_left: threading.Event = field(default_factory=threading.Event)

    def questions(self) -> list[str]:
        return [body["messages"][-1]["content"] for body in self.bodies]


class _Handler(BaseHTTPRequestHandler):
    chat_server: ChatServer

    def log_message(self, format: str, *values: object) -> None: ...

    def do_GET(self) -> None:
        content = json.dumps({"data": [{"id": "first"}, {"id": "second"}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.chat_server.bodies.append(body)
        question = body["messages"][-1]["content"]
        if question == "refuse":
            content = json.dumps({"error": {"message": "too many requests"}}).encode()
            self.send_response(429)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            return
        if question == "redirect":
            self.send_response(307)
            self.send_header("location", f"{self.chat_server.url}/elsewhere")
            self.send_header("content-length", "0")
            self.end_headers()
            return
        if question == "silence":
            self._wait_until_the_client_leaves()
            return
        self.send_response(200)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if question == "think":
            self._delta(reasoning_content="Well.")
        self._delta(content="echo ")
        if question == "break":
            return
        if question == "reset":
            # Closing a socket sends a reset at once with this option.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            time.sleep(0.2)  # a reset makes the client's kernel forget what it has not read
            self.connection.close()
            return
        if question == "wait":
            self._wait_until_the_client_leaves()
            return
        self._delta(content=question)
        self._delta("stop")
        self._event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _delta(self, finish_reason: str | None = None, **delta: str) -> None:
        self._event({"choices": [{"delta": delta, "finish_reason": finish_reason}]})

    def _event(self, event: dict[str, Any]) -> None:
        text = json.dumps(event, ensure_ascii=False)  # as gateways write it
        self.wfile.write(f"data: {text}\n\n".encode())
        self.wfile.flush()

    def _wait_until_the_client_leaves(self) -> None:
        self.connection.settimeout(60)
        if self.connection.recv(1) == b"":
            self.chat_server.client_left.set()


@contextmanager
def chat_server() -> Iterator[ChatServer]:
    known = ChatServer("")
    handler = type("Handler", (_Handler,), {"chat_server": known})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    known.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield known
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
