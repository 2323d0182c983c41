"""`diptych chat` and `diptych run`: on a terminal, in a pipe, and when something goes wrong."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from diptych.cluster.cli import answer as answer_module
from diptych.cluster.cli import app
from diptych.cluster.cli.answer import FILES_LIMIT_BYTES
from diptych.cluster.cli.prompt import HISTORY_LIMIT_BYTES, TerminalPrompt, open_history
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from typer.testing import CliRunner

from tests.support.chat_server import ChatServer, chat_server
from tests.support.pty import OnTerminal

DIPTYCH = str(Path(sys.executable).parent / "diptych")
ENTER = "\r"
ALT_ENTER = "\x1b\r"
LEFT = "\x1b[D"
UP = "\x1b[A"
PROMPT = "\x1b[?2004h"  #: bracketed paste is on: a line can be typed


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server() as server:
        yield server


def invoke(*words: str, typed: str = "") -> tuple[int, str, str]:
    done = CliRunner().invoke(app, list(words), input=typed)
    return done.exit_code, done.stdout, done.stderr


# ---- the prompt ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (f"ab{LEFT}x{ENTER}", "axb"),
        (f"one{ALT_ENTER}two{ENTER}", "one\ntwo"),
        (f"one\\{ENTER}two{ENTER}", "one\ntwo"),
        (f"  {UP}{ENTER}", "asked before"),
    ],
    ids=["arrow keys", "Alt-Enter", "a backslash", "history"],
)
def test_keys_edit_the_message(keys: str, message: str, tmp_path: Path) -> None:
    history = tmp_path / "history"
    history.write_text("\n# 2026-01-01\n+asked before\n")
    with create_pipe_input() as keyboard:
        keyboard.send_text(keys.replace(f"  {UP}", UP))
        prompt = TerminalPrompt(history, keyboard, DummyOutput())
        assert prompt.read() == message


def test_ctrl_d_and_ctrl_c_are_told_apart(tmp_path: Path) -> None:
    for keys, error in (("\x04", EOFError), ("half a line\x03", KeyboardInterrupt)):
        with create_pipe_input() as keyboard:
            keyboard.send_text(keys)
            prompt = TerminalPrompt(tmp_path / "history", keyboard, DummyOutput())
            with pytest.raises(error):
                prompt.read()


def test_only_its_user_reads_the_history_and_it_does_not_grow_for_ever(tmp_path: Path) -> None:
    file = tmp_path / "new" / "history"
    open_history(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    entry = "\n# 2026-01-01\n+" + 1000 * "x" + "\n"
    file.write_text(entry * (2 * HISTORY_LIMIT_BYTES // 1000) + "\n# 2026-01-02\n+the last\n")
    file.chmod(0o644)
    newest_first = list(open_history(file).load_history_strings())
    assert newest_first[0] == "the last" and set(newest_first[1:]) == {1000 * "x"}
    assert file.stat().st_size < HISTORY_LIMIT_BYTES
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_without_a_place_for_it_the_history_is_kept_in_memory(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    assert list(open_history(blocker / "history").load_history_strings()) == []


# ---- the dialogue in a pipe ----------------------------------------------------------------------


def test_a_dialogue_in_a_pipe_is_plain_and_goes_on_after_an_error(server: ChatServer) -> None:
    typed = "one\nrefuse\nbreak\n\ntwo \\\nlines\n"
    code, said, errors = invoke("chat", "--endpoint", server.url, typed=typed)
    assert code == 0
    assert said.startswith("echo one\n\nprefill/a -> decode/b   TTFT ") and "\x1b" not in said
    assert errors.splitlines() == [
        "diptych: too many requests",
        "diptych: the answer broke off before its end",
    ]
    assert server.questions() == ["one", "refuse", "break", "two \nlines"]
    spoken = [message["content"] for message in server.bodies[-1]["messages"]]
    assert spoken == ["one", "echo one", "two \nlines"], "what was refused is no part of it"


def test_system_and_files_go_before_the_first_question(server: ChatServer, tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("The notes.\n")
    words = ["chat", "--endpoint", server.url, "--system", "Be brief.", "--file", str(notes)]
    invoke(*words, typed="one\ntwo\n")
    first, second = (body["messages"] for body in server.bodies)
    assert first == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "The notes.\n\none"},
    ]
    assert second[-1] == {"role": "user", "content": "two"}


def test_thinking_is_no_part_of_plain_output_and_is_in_json(server: ChatServer) -> None:
    _, said, _ = invoke("chat", "--endpoint", server.url, typed="think\n")
    assert "Well." not in said
    _, said, _ = invoke("chat", "think", "-o", "json", "--endpoint", server.url)
    answer = json.loads(said)
    assert (answer["reasoning"], answer["text"]) == ("Well.", "echo think")
    assert answer["request_id"] == "req-7" and answer["ttft_ms"] > 0


def test_slash_commands_tell_of_the_dialogue(server: ChatServer, tmp_path: Path) -> None:
    saved = tmp_path / "said.md"
    other = tmp_path / "other.md"
    other.write_text("mine")
    commands = ["/route", "one", "/route", "/stats", "/model", "/model third", "/model second"]
    commands += ["two", f"/save {saved}", f"/save {saved}", f"/save {other}", "/nothing", "/help"]
    commands += ["/etc/hosts: what is it?", "/exit", "never asked"]
    code, said, _ = invoke("chat", "--endpoint", server.url, typed="\n".join(commands) + "\n")
    assert code == 0 and said.startswith("no answer yet\n")
    assert "prefill/a -> decode/b; 3 of 5 prompt tokens were cached" in said
    assert "why: diptych explain req-7" in said
    assert "all:  1 answers, 2 tokens; 3 of 5 prompt tokens were cached" in said
    assert "* first\n  second\n" in said and "third is not served" in said
    assert said.count(f"wrote {saved}") == 2 and f"{other} is there already" in said
    assert other.read_text() == "mine" and "**user**\n\none\n" in saved.read_text()
    assert "/nothing is no command; /help lists them" in said and "Alt-Enter" in said
    assert server.questions() == ["one", "two", "/etc/hosts: what is it?"]
    assert [body["model"] for body in server.bodies] == ["", "second", "second"]


# ---- the dialogue on a terminal ------------------------------------------------------------------


def test_ctrl_c_stops_the_answer_and_keeps_the_dialogue(server: ChatServer, tmp_path: Path) -> None:
    environment = {**os.environ, "TERM": "xterm", "HOME": str(tmp_path)}
    environment.pop("XDG_STATE_HOME", None)
    environment.pop("NO_COLOR", None)
    environment["PROMPT_TOOLKIT_NO_CPR"] = "1"  # nobody here says where the cursor is
    terminal = OnTerminal([DIPTYCH, "chat", "--endpoint", server.url], environment, tmp_path)
    try:
        terminal.wait_for(PROMPT)
        terminal.type("think" + ENTER)
        assert "\x1b[2mWell.\x1b[0m" in terminal.wait_for("prefix hit")
        terminal.wait_for(PROMPT)
        terminal.type("wait" + ENTER)
        terminal.wait_for("echo ")
        terminal.type("\x03")
        terminal.wait_for("stopped")
        assert server.client_left.wait(30), "the server was not told"
        terminal.wait_for(PROMPT)
        terminal.type(f"bc{LEFT}{LEFT}a{ENTER}")
        terminal.wait_for("echo abc")
        terminal.wait_for(PROMPT)
        terminal.type("\x04")
    finally:
        code = terminal.end()
    assert code == 0
    assert server.questions() == ["think", "wait", "abc"]
    history = tmp_path / ".local/state/diptych/chat_history"
    assert "+abc" in history.read_text() and stat.S_IMODE(history.stat().st_mode) == 0o600


def test_a_model_cannot_command_the_terminal() -> None:
    from diptych.cluster.cli.terminal import printable

    assert printable("a\x1b]0;title\x07\tb\r\nc\x9b2J") == "a]0;title\tb\nc2J"


# ---- run -----------------------------------------------------------------------------------------


def test_run_prints_the_answer_and_nothing_else(server: ChatServer, tmp_path: Path) -> None:
    where = ["--endpoint", server.url]
    assert invoke("run", "think", *where) == (0, "echo think\n", "")
    assert invoke("run", "-", *where, typed="from a pipe") == (0, "echo from a pipe\n", "")
    notes = tmp_path / "notes.txt"
    notes.write_text("Notes.")
    invoke("run", "one", "--file", str(notes), "--system", "s", "--max-tokens", "7", *where)
    assert server.questions()[-1] == "Notes.\n\none"
    assert (
        server.bodies[-1]["max_tokens"] == 7 and server.bodies[-1]["messages"][0]["content"] == "s"
    )
    code, said, _ = invoke("run", "think", "-o", "json", *where)
    assert code == 0 and json.loads(said)["reasoning"] == "Well."


def test_run_says_what_is_wrong_and_with_which_code(server: ChatServer, tmp_path: Path) -> None:
    where = ["--endpoint", server.url]
    assert invoke("run", "refuse", *where) == (1, "", "diptych: too many requests\n")
    broke = "diptych: the answer broke off before its end\n"
    assert invoke("run", "break", *where) == (1, "echo \n", broke)
    assert invoke("run", "-", *where, typed=" \n")[::2] == (2, "diptych: the prompt is empty\n")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    wrong = f"diptych: {binary} is no text in UTF-8\n"
    assert invoke("run", "x", "--file", str(binary), *where)[::2] == (2, wrong)
    assert invoke("run", "x", "-o", "yaml", *where)[0] == 2
    assert invoke("run", "x", "--endpoint", "http://127.0.0.1:9")[0] == 1
    assert len(server.bodies) == 2


def test_an_answer_may_have_any_character(server: ChatServer) -> None:
    question = "a\u2028b\u2029c\x85d"
    assert invoke("run", question, "--endpoint", server.url) == (0, f"echo {question}\n", "")


def test_what_breaks_an_answer_is_told_from_an_absent_gateway(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = ["--endpoint", server.url]
    broke = "diptych: the answer broke off before its end\n"
    assert invoke("run", "reset", *where) == (1, "echo \n", broke)
    monkeypatch.setattr(answer_module, "READ_TIMEOUT_S", 0.3)
    assert invoke("run", "wait", *where) == (1, "echo \n", broke)
    assert invoke("run", "silence", *where) == (1, "", "diptych: no answer within 0.3 s\n")
    assert invoke("run", "redirect", *where) == (1, "", "diptych: HTTP 307\n")


def test_a_question_that_is_no_text_is_wrong_usage(server: ChatServer, tmp_path: Path) -> None:
    where = ["--endpoint", server.url]
    sentence = "diptych: what is asked is no text in UTF-8\n"
    assert invoke("run", "\udcff", *where) == (2, "", sentence)
    assert invoke("chat", "\udcff", *where) == (2, "", sentence)
    assert invoke("run", "hi", "--system", "\udcff", *where) == (2, "", sentence)
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(
        [DIPTYCH, "chat", *where], input=b"\xff\n", env=environment, capture_output=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (2, b"diptych: stdin is no text in UTF-8\n")
    assert server.bodies == []


def test_an_output_that_cannot_have_the_answer_is_not_an_absent_gateway(
    server: ChatServer,
) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [DIPTYCH, "run", "gr\u00fcn", "--endpoint", server.url]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert (
        done.stderr
        == "diptych: stdout is ascii and cannot have this answer: set PYTHONIOENCODING=utf-8\n"
    )


def test_a_temperature_that_is_no_number_is_wrong_usage(server: ChatServer) -> None:
    for text in ("nan", "inf"):
        code, _, said = invoke("run", "hi", "--temperature", text, "--endpoint", server.url)
        assert code == 2 and "--temperature" in said
    assert server.bodies == []


def test_a_file_that_is_too_long_is_called_so(tmp_path: Path) -> None:
    file = tmp_path / "long.txt"
    file.write_bytes("\u00e9".encode() * (FILES_LIMIT_BYTES // 2 + 2))  # cut within a letter
    code, _, said = invoke("run", "hi", "--file", str(file), "--endpoint", "http://127.0.0.1:9")
    assert (code, said) == (2, "diptych: --file: more than 8 MiB of text\n")


def test_only_a_dialogue_on_a_terminal_imports_prompt_toolkit(server: ChatServer) -> None:
    code = (
        "import sys; from diptych.cluster.cli import app\n"
        f"app(['chat', 'hi', '--endpoint', {server.url!r}], standalone_mode=False)\n"
        "print('prompt_toolkit' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"
