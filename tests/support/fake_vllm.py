"""A process that speaks vLLM's HTTP and computes nothing; and a Python that starts it for vLLM.

    python fake_vllm.py --port 8000 --token-ms 2 --calls calls.jsonl

Each word of a message is a token. Every call is a line of the file `calls`.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TEMPLATE_TOKENS = 3


def write_fake_python(folder: Path, *, token_ms: float = 2.0, broken: bool = False) -> Path:
    """Write a program that takes vLLM's command lines: it serves this fake, or runs a script."""
    bin_folder = folder / "bin"
    bin_folder.mkdir(parents=True, exist_ok=True)
    program = bin_folder / "python"
    serve = (
        f'exec "{sys.executable}" "{__file__}" --token-ms {token_ms} --calls "{folder}/calls" "$@"'
    )
    program.write_text(
        textwrap.dedent(
            f"""\
            #!/bin/bash
            case "$1" in
                -c) echo 0.32.0 2.13.0 ;;
                -m) {"echo no such kernel; exit 3" if broken else serve} ;;
                *) exec "{sys.executable}" "$@" ;;
            esac
            """
        )
    )
    program.chmod(0o755)
    return program


def calls(folder: Path) -> list[dict[str, Any]]:
    """Return what the servers of a fake Python were asked, streamed calls alone."""
    path = folder / "calls"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    options: argparse.Namespace

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "live", "max_model_len": 4096}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        call = {"port": self.options.port, "body": body}
        with open(self.options.calls, "a") as file:
            file.write(json.dumps(call) + "\n")
        words = sum(len(message["content"].split()) for message in body["messages"])
        usage = {"prompt_tokens": words + TEMPLATE_TOKENS, "completion_tokens": body["max_tokens"]}
        if not body.get("stream"):
            self._answer(
                {"usage": usage, "choices": [], "kv_transfer_params": {"from": call["port"]}}
            )
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for number in range(body["max_tokens"]):
            time.sleep(self.options.token_ms / 1e3)
            is_last = number == body["max_tokens"] - 1
            delta = {"delta": {"content": " word"}, "finish_reason": "length" if is_last else None}
            self._event({"choices": [delta]})
        self._event({"choices": [], "usage": usage})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _answer(self, fields: dict[str, Any]) -> None:
        payload = json.dumps(fields).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def _event(self, fields: dict[str, Any]) -> None:
        self._chunk(f"data: {json.dumps(fields)}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--token-ms", type=float, default=2.0)
    parser.add_argument("--calls", required=True)
    Handler.options, _ = parser.parse_known_args()
    ThreadingHTTPServer(("127.0.0.1", Handler.options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
