"""A headless Chromium with one page, by the DevTools protocol: look, click, take a picture."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

from .live import eventually

CHROMIUM = shutil.which("chromium")


class Page:
    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._number = socket, 0

    def call(self, method: str, **given: Any) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": given}))
        while True:
            told = json.loads(self._socket.recv(timeout=60))
            if told.get("id") == self._number:
                assert "error" not in told, told
                return told["result"]

    def open(self, url: str, width: int = 1200, height: int = 760) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.protocol !== 'about:'")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        told = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def wait(self, script: str, seconds: float = 30.0) -> Any:
        """Until an expression is true."""
        return eventually(lambda: self.run(script), seconds)

    def text(self) -> str:
        return self.run("document.body.innerText")

    def picture(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """`folder` holds what the browser keeps."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    flags += ["--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(
        [CHROMIUM or "chromium", *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        active = folder / "DevToolsActivePort"
        port = eventually(lambda: active.exists() and active.read_text().split("\n")[0], 60)
        pages = httpx.get(f"http://127.0.0.1:{port}/json/list", timeout=30).json()
        where = next(one["webSocketDebuggerUrl"] for one in pages if one["type"] == "page")
        with connect(where, max_size=None) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        process.wait(30)
