"""Types the commands of the pages as they stand, and writes down what came of each.

    python -m tests.page_commands.run [--group GROUP] [--only TEXT] [--again]

The commands and how they run are in `commands.yaml`; of its groups `suite`, `not_run` and `mention` nothing is typed. What
came of each goes to `last_run.json`, after each command. A command that has passed today as it is in the table is not
typed again without `--again`. What a command needs of others is typed before it. The output of each is below
`build/page_commands`. Exit 1 if one failed, 2 if none was chosen.

Commands run in a folder that has the tree's files and folders as links, so that new files stay out of the tree's root.
`make` and what names ROOT run in the tree itself. These ports must be free: 8000, 8001, 8080, 8089, 9000, 9001.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from .find import ROOT

FOLDER = Path(__file__).parent
TABLE = FOLDER / "commands.yaml"
TYPED_GROUPS = ("alone", "serve", "cluster")  #: whose commands are typed, in this order
LAST_RUN = FOLDER / "last_run.json"
BUILD = ROOT / "build" / "page_commands"
TREE = BUILD / "tree"
LOG_FOLDER = "LOG"  #: of the router beside which commands run, from the tree's folder
ENTRY_KEYS = {"as", "minutes", "status", "says", "needs"}  #: of a command in the table
LIMIT_MINUTES = 10.0
READY_S, STOP_S = 150.0, 60.0
READY = "curl http"  #: in the welcome of a server that is ready
CONTROL = "http://127.0.0.1:8001"
CLUSTER = f"diptych serve --prefill 2 --decode 2 --set router.log_folder={LOG_FOLDER}"
#: what the page of hosted vLLM lets one type first
VLLM = "export VLLM=~/.cache/diptych/engines/vllm/bin/python"
#: variables of make and of this process, which a reader's terminal does not have
OF_THIS_RUN = {
    *("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "ARGS"),
    *("OMP_NUM_THREADS", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV"),
}
CLUSTER_YAML = "pools: {decode: {replicas: 2}}\n"


@dataclass(frozen=True)
class Line:
    """A command of the table."""

    group: str
    command: str
    typed: str  #: the command with values for its placeholders
    limit_s: float = LIMIT_MINUTES * 60
    status: int = 0  #: its exit status if all is well
    says: str = ""  #: what its output has if all is well
    needs: tuple[str, ...] = ()  #: commands of any group that must have run before, in their order


def lines(group: str) -> list[Line]:
    """Return a group's commands in their order. Raises ValueError for a key that means nothing."""
    entries: dict[str, dict[str, Any]] = yaml.safe_load(TABLE.read_text())[group]
    for command, entry in entries.items():
        if unknown := set(entry) - ENTRY_KEYS:
            raise ValueError(
                f"{command}: unknown {sorted(unknown)}, known are {sorted(ENTRY_KEYS)}"
            )
    return [
        Line(
            group,
            command,
            typed=entry.get("as", command),
            limit_s=entry.get("minutes", LIMIT_MINUTES) * 60,
            status=entry.get("status", 0),
            says=entry.get("says", ""),
            needs=tuple(entry.get("needs", ())),
        )
        for command, entry in entries.items()
    ]


def expectation(line: Line) -> str:
    """Return what a record must be of: another command, status or output is another test."""
    return f"{line.typed} -> {line.status} {line.says}".strip()


class Record:
    """What came of each command, in `last_run.json`."""

    def __init__(self) -> None:
        self._commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        self._day = datetime.date.today().isoformat()

    def has_passed_today(self, line: Line) -> bool:
        """Tell whether a command has passed on this day, as it stands in the table."""
        last = self._commands().get(line.command, {})
        is_the_same = last.get("expected") == expectation(line)
        return is_the_same and last["passed"] and last["day"] == self._day

    def write(self, line: Line, passed: bool, seconds: float) -> None:
        """Write down what came of a command now, beside what other runs wrote meanwhile.

        What is no longer in the table is forgotten.
        """
        listed = {line.command for group in TYPED_GROUPS for line in lines(group)}
        commands = {key: last for key, last in self._commands().items() if key in listed}
        commands[line.command] = {
            "expected": expectation(line),
            "passed": passed,
            "seconds": round(seconds),
            "day": self._day,
            "commit": self._commit,
        }
        text = json.dumps(dict(sorted(commands.items())), indent=1)
        new = LAST_RUN.with_suffix(".new")  # a full disk leaves the old record whole
        new.write_text(text + "\n")
        new.replace(LAST_RUN)

    @staticmethod
    def _commands() -> dict[str, dict[str, Any]]:
        return json.loads(LAST_RUN.read_text()) if LAST_RUN.exists() else {}


def make_tree() -> None:
    """Make the folder in which commands run, with what the pages say one has before."""
    TREE.mkdir(parents=True, exist_ok=True)
    for path in ROOT.iterdir():
        link = TREE / path.name
        if path.name != ".git" and not link.is_symlink():
            link.symlink_to(path)
    shared = BUILD / "shared"
    if not shared.is_symlink():
        shared.symlink_to(ROOT.parent / "shared")
    (TREE / "cluster.yaml").write_text(CLUSTER_YAML)
    request = {"messages": [{"role": "user", "content": "What is prefill?"}]}
    asked = {
        "custom_id": "1",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": request,
    }
    (TREE / "IN.jsonl").write_text(json.dumps(asked) + "\n")
    make_certificate()


def make_certificate() -> None:
    """Make cert.pem and key.pem, which a reader of the page on security has."""
    subprocess.run(
        "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 30"
        " -subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1",
        shell=True,
        cwd=TREE,
        capture_output=True,
        check=True,
    )


def environment() -> dict[str, str]:
    """Return the environment of a reader's terminal, in which `diptych` and `python` are ours.

    What `make test-pages` and this process have set for themselves is not in it.
    """
    own = {name: value for name, value in os.environ.items() if name not in OF_THIS_RUN}
    return {**own, "PATH": f"{TREE}/.venv/bin:{own['PATH']}", "COLUMNS": "120"}


def fill(typed: str, names: dict[str, str]) -> str:
    """Put values into a command's placeholders."""
    for placeholder, name in names.items():
        typed = re.sub(rf"\b{placeholder}\b", name, typed)
    return typed


def place_of(typed: str) -> Path:
    """Return the folder for a command: that of `make` is the tree itself, as it writes below build/."""
    return ROOT if typed.startswith("make ") else TREE


def log_of(command: str) -> Path:
    """Return where a command's output goes."""
    name = re.sub(r"[^\w.-]+", "_", command).lstrip("._")[:120]
    return BUILD / f"{name}.log"


def end(process: subprocess.Popen[bytes]) -> int:
    """Give a process and what it started ^C, as a terminal does; return its exit status.

    What has not ended then is killed.
    """
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
    try:
        return process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def type_command(line: Line, typed: str, before: str = VLLM) -> bool:
    """Run a command to its end, in a terminal where another ran before; tell whether it ended as it should."""
    with log_of(line.command).open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-c", f"{before}\n{typed}"],
            cwd=place_of(typed),
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(line.limit_s)
        except subprocess.TimeoutExpired:
            return False
        finally:
            end(process)
    return status == line.status and line.says in log_of(line.command).read_text(errors="replace")


@contextmanager
def server(typed: str, log: Path) -> Iterator[None]:
    """Start a server, wait until it is ready, and end it afterwards.

    Raises:
        RuntimeError: It ended or was not ready in time, or did not end well.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {typed}"],
            cwd=place_of(typed),
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + READY_S
        while READY not in log.read_text():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"it is not ready: {log}")
            time.sleep(0.2)
        yield
    finally:
        status = end(process)
    if status:
        raise RuntimeError(f"it ended with {status}: {log}")


def names_of_cluster() -> dict[str, str]:
    """Return values for the placeholders of commands beside a cluster."""
    chat = httpx.post(
        "http://127.0.0.1:8000/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "What is decode?"}]},
        timeout=30,
    )
    workers = httpx.get(f"{CONTROL}/admin/v1/cluster", timeout=10).json()["workers"]
    prefill = [worker for worker in workers if worker["home"] == "prefill"]
    request = chat.headers["x-request-id"]
    return {
        "REQUEST_ID": request,
        "REQUEST": request,
        "REPLICA": prefill[-1]["id"],
        "PID": str(prefill[-1]["pid"]),
        "DIR": LOG_FOLDER,
    }


def exports(log: Path) -> str:
    """Return the `export` line that `diptych serve` prints, for the terminal in which Ray's own commands work."""
    (line,) = re.findall(r"^.*?(export RAY.*)$", log.read_text(), re.MULTILINE)
    return line


class Runner:
    """Runs what is asked for, tells of each, and counts the failures."""

    def __init__(self, only: str, again: bool) -> None:
        self._only = only
        self._again = again
        self._record = Record()
        self._lines = {line.command: line for group in TYPED_GROUPS for line in lines(group)}
        self._typed: set[str] = set()  #: commands of this run, each of which is typed once
        self.failed: list[str] = []

    @property
    def count(self) -> int:
        """The number of commands that were typed."""
        return len(self._typed)

    def run(self, group: str) -> None:
        """Type a group's commands, in their order."""
        chosen = [
            line
            for line in lines(group)
            if self._only in line.command
            and (self._again or not self._record.has_passed_today(line))
        ]
        if group != "cluster":
            for line in chosen:
                self._try(line)
        elif chosen:
            self._run_beside_a_cluster(chosen)

    def _run_beside_a_cluster(self, chosen: list[Line]) -> None:
        log = BUILD / "cluster.log"
        try:
            with server(CLUSTER, log):
                for line in chosen:
                    self._try(line, exports(log))
        except RuntimeError as error:
            print(error)
            self.failed.append("diptych serve")

    def _try(self, line: Line, before: str = VLLM) -> None:
        if line.command in self._typed:
            return
        self._typed.add(line.command)
        for needed in line.needs:
            self._try(self._lines[needed], before)
        began = time.monotonic()
        try:
            passed = self._run(line, before)
        except (RuntimeError, httpx.HTTPError, KeyError) as error:
            print(f"       {type(error).__name__}: {error}")
            passed = False
        seconds = time.monotonic() - began
        self._record.write(line, passed, seconds)
        print(f"{'passed' if passed else 'FAILED'} {seconds:6.1f} s  {line.command}", flush=True)
        if not passed:
            self.failed.append(line.command)
            print(f"       {log_of(line.command)}", flush=True)

    def _run(self, line: Line, before: str) -> bool:
        names = {"MODEL": str(ROOT / "engine/demo/checkpoint"), "ROOT": str(ROOT)}
        if line.group == "serve":
            with server(fill(line.typed, names), log_of(line.command)):
                return True
        if line.group == "cluster":
            names |= names_of_cluster()
        return type_command(line, fill(line.typed, names), before)


def leave(number: int, frame: object) -> None:
    """End as after ^C, so that what runs is ended too."""
    raise KeyboardInterrupt


def main() -> None:
    """Read the arguments, run, and end with 1 if a command failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--group", choices=TYPED_GROUPS, help="this one only")
    parser.add_argument("--only", default="", help="commands that have this text")
    parser.add_argument("--again", action="store_true", help="those that have passed, too")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, leave)
    make_tree()
    runner = Runner(asked.only, asked.again)
    try:
        for group in TYPED_GROUPS:
            if asked.group in (None, group):
                runner.run(group)
    except KeyboardInterrupt:
        print("ended before all were typed: the same command goes on")
        sys.exit(130)
    if not runner.count:
        print("no command was typed: none has this text, or all have passed today (--again)")
        sys.exit(2)
    sys.exit(1 if runner.failed else 0)


if __name__ == "__main__":
    main()
