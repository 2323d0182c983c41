"""The screen of `diptych top`. Textual takes a second to import: only that command does."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from typing import ClassVar

import httpx
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.widgets import Footer, Input, Static

from .board import Board
from .common import NO_ANSWER, Admin

HELP = """\
scale prefill=2 decode=4     how many replicas have their home in a pool
flip REPLICA --to ROLE       another role for a worker; its streams move
drain REPLICA [--undo]       nothing new for a worker; what runs ends there
explain REQUEST              why a request went where it went

Enter carries it out, Escape forgets it."""
DECISIONS = 10


class Top(App[str]):
    """Asks again and again; a line at the bottom takes orders."""

    ENABLE_COMMAND_PALETTE = False
    CSS = "#told { height: auto; max-height: 12; } #line { display: none; }"
    BINDINGS: ClassVar = [
        Binding("s", "order('scale ')", "scale"),
        Binding("f", "order('flip ')", "flip"),
        Binding("d", "order('drain ')", "drain"),
        Binding("e", "order('explain ')", "explain"),
        Binding("question_mark", "help", "help", key_display="?"),
        Binding("q", "quit", "quit"),
        Binding("escape", "forget", show=False),
    ]

    def __init__(self, api: Admin, refresh: float) -> None:
        super().__init__()
        self._api, self._every, self._board = api, refresh, Board()

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(id="board", markup=False)
        yield Static(id="told", markup=False)
        yield Input(id="line", select_on_focus=False)
        yield Footer()

    def on_mount(self) -> None:
        self.look()
        self.set_interval(self._every, self.look)

    @work(exclusive=True, group="look")
    async def look(self) -> None:
        try:
            async with self._client() as client:
                cluster = (await client.get("/admin/v1/cluster")).raise_for_status().json()
                found = await client.get("/admin/v1/decisions", params={"limit": DECISIONS})
        except NO_ANSWER as error:
            self.query_one("#told", Static).update(f"no answer: {error or type(error).__name__}")
            return
        decisions = found.json()["decisions"] if found.is_success else []
        self._board.add(cluster)
        for board in self.query("#board").results(Static):  # none: the screen is closing
            board.update("\n".join(self._board.lines(cluster, decisions)))

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self._api.url, headers=self._api.headers, timeout=10.0)

    # ---- orders ----------------------------------------------------------------------------------

    def action_order(self, verb: str) -> None:
        line = self.query_one("#line", Input)
        line.display = True
        line.value = verb
        line.focus()
        line.cursor_position = len(verb)

    def action_forget(self) -> None:
        self.query_one("#line", Input).display = False
        self.query_one("#told", Static).update("")
        self.set_focus(None)

    def action_help(self) -> None:
        self.query_one("#told", Static).update(HELP)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.action_forget()
        self.carry_out(event.value)

    @work(group="order")
    async def carry_out(self, text: str) -> None:
        """Runs the command of that name, as from the shell."""
        try:
            words = shlex.split(text)
        except ValueError as error:
            self.query_one("#told", Static).update(str(error))
            return
        if not words:
            return
        where = ["--admin", self._api.url]
        token = self._api.headers.get("authorization", "").removeprefix("Bearer ")
        given = {"DIPTYCH_ADMIN_TOKEN": token} if token else {}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", "from diptych.cluster.cli import main; main()"),
            *words,
            *where,
            env={**os.environ, **given},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        out, _ = await process.communicate()
        self.query_one("#told", Static).update(out.decode().rstrip())
