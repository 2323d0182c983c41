"""The screen of `diptych top`. Only that command imports Textual, which takes a second."""

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

from ...loadtests.loopback import is_this_machine
from .board import Board
from .common import NO_ANSWER, AdminClient

HELP = """\
scale prefill=2 decode=4     how many replicas have their home in a pool
flip REPLICA --to ROLE       another role for a worker; its streams move
drain REPLICA                nothing new for a worker; what runs ends there
undrain REPLICA              it takes requests again
explain REQUEST              why a request went where it went

Enter carries it out, Escape forgets it."""
DECISIONS_LIMIT = 10  #: So many of the router's last decisions are shown.
REQUEST_TIMEOUT_S = 10.0
#: The command line of this very installation, whose script need not be on the PATH.
RUN_DIPTYCH = (sys.executable, "-c", "from diptych.cluster.cli import main; main()")


class Top(App[str]):
    """Shows the status, again and again; a line at the bottom takes orders.

    An order runs as the command of the same name in a process of its own. Its output, help and
    failures are in the field above the line. `refresh_s` is the time between two looks, in seconds.
    Textual calls what is named `action_`, `on_`, and `compose`; `run()` shows the screen until its
    user quits.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = "#message { height: auto; max-height: 12; } #order { display: none; }"
    BINDINGS: ClassVar = [
        Binding("s", "order('scale ')", "scale"),
        Binding("f", "order('flip ')", "flip"),
        Binding("d", "order('drain ')", "drain"),
        Binding("e", "order('explain ')", "explain"),
        Binding("question_mark", "help", "help", key_display="?"),
        Binding("q", "quit", "quit"),
        Binding("escape", "forget", show=False),
    ]

    def __init__(self, admin_client: AdminClient, refresh_s: float) -> None:
        super().__init__()
        self._admin_client = admin_client
        self._refresh_s = refresh_s
        self._board = Board()

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(id="board", markup=False)
        yield Static(id="message", markup=False)
        yield Input(id="order", select_on_focus=False)
        yield Footer()

    def on_mount(self) -> None:
        """Look at once, and then again and again."""
        self.update_board()
        self.set_interval(self._refresh_s, self.update_board)

    # Exclusive: a look that takes longer than `refresh_s` is cancelled by the next one.
    @work(exclusive=True, group="update")
    async def update_board(self) -> None:
        """Ask Control for the status and the last decisions, and show them."""
        try:
            async with self._http_client() as client:
                cluster_response = await client.get("/admin/v1/cluster")
                cluster = cluster_response.raise_for_status().json()
                decisions_response = await client.get(
                    "/admin/v1/decisions", params={"limit": DECISIONS_LIMIT}
                )
        except NO_ANSWER as error:
            self._show_message(f"no answer: {str(error) or type(error).__name__}")
            return
        decisions = []  # none, if no router answers
        if decisions_response.is_success:
            decisions = decisions_response.json()["decisions"]
        self._board.add(cluster)
        for board in self.query("#board").results(Static):  # none while the screen closes
            board.update("\n".join(self._board.lines(cluster, decisions)))

    def _http_client(self) -> httpx.AsyncClient:
        url = self._admin_client.url
        return httpx.AsyncClient(
            base_url=url,
            transport=httpx.AsyncHTTPTransport() if is_this_machine(url) else None,
            headers=self._admin_client.headers,
            timeout=REQUEST_TIMEOUT_S,
        )

    def _show_message(self, text: str) -> None:
        self.query_one("#message", Static).update(text)

    # ---- orders ----------------------------------------------------------------------------------

    def action_order(self, verb: str) -> None:
        """Open the line with the beginning of an order in it."""
        line = self.query_one("#order", Input)
        line.display = True
        line.value = verb
        line.focus()
        line.cursor_position = len(verb)

    def action_forget(self) -> None:
        """Close the line, and empty the field above it."""
        self.query_one("#order", Input).display = False
        self._show_message("")
        self.set_focus(None)

    def action_help(self) -> None:
        """Show what can be ordered."""
        self._show_message(HELP)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Close the line, and carry out what it said."""
        self.action_forget()
        self.carry_out(event.value)

    @work(group="order")
    async def carry_out(self, order: str) -> None:
        """Run the command that the line names, as from a shell, and show its output."""
        try:
            words = shlex.split(order)
        except ValueError as error:
            self._show_message(str(error))
            return
        if not words:
            return
        # Other users of the machine can read a process's arguments, but not its environment.
        environment = dict(os.environ)
        token = self._admin_client.headers.get("authorization", "").removeprefix("Bearer ")
        if token:
            environment["DIPTYCH_ADMIN_TOKEN"] = token
        process = await asyncio.create_subprocess_exec(
            *RUN_DIPTYCH,
            *words,
            "--admin",
            self._admin_client.url,
            env=environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        self._show_message(output.decode().rstrip())
