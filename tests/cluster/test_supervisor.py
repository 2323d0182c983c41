"""The supervisor of `diptych serve`: what it starts again, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from diptych.cluster.launch import processes
from diptych.cluster.launch.processes import has_ended
from diptych.cluster.launch.supervisor import (
    LOST_EXIT_CODE,
    RESTARTS_LIMIT,
    RESTARTS_WINDOW_S,
    ChildEnd,
    RestartPolicy,
    Verdict,
    stop_signals,
)

from tests.support.live import eventually

#: A cluster's stand-in: a folder, and a process in a session of its own with a child that ignores
#: what it can ignore. It writes down its processes, is ready, and then does what `then` says.
SCRIPT = """
import os, pathlib, shutil, signal, subprocess, sys, time
from diptych.cluster.launch.supervisor import LOST_EXIT_CODE, ChildNote, supervise

place = pathlib.Path(sys.argv[1])
then = sys.argv[2]
stubborn = "trap '' INT TERM; sleep 600 & sleep 600"

def run(supervised):
    folder = place / f"ray-{os.getpid()}"
    folder.mkdir()
    supervised.tell(ChildNote(folder=str(folder)))
    below = subprocess.Popen(["sh", "-c", stubborn], start_new_session=then != "hang up")
    try:  # A test that reads of this start may interrupt it at once.
        with (place / "started").open("a") as file:
            file.write(f"{os.getpid()} {below.pid}\\n")
        if then == "fail":
            return 7
        if then == "start":
            from diptych.cluster.cli.serve import _exit_at_signal

            _exit_at_signal(print, supervised)
            (place / "starting").touch()
            time.sleep(600)
        supervised.tell(ChildNote(ready=True))
        starts = len((place / "started").read_text().splitlines())
        if then == "lost and interrupted" and not (place / "interrupted").exists():
            return LOST_EXIT_CODE
        if then == "lost twice" and starts < 3:
            return LOST_EXIT_CODE
        if then == "killed once" and starts < 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if then == "ended by a library once" and starts < 2:
            os._exit(1)
        time.sleep(600)
    except KeyboardInterrupt:
        with (place / "started").open("a") as file:
            file.write("stopped\\n" if below.poll() is None else "cut off\\n")
        return 0

def remove_and_interrupt(folder, ignore_errors):
    (place / "interrupted").touch()
    remove(folder)
    os.kill(os.getpid(), signal.SIGINT)

remove = shutil.rmtree
if then == "lost and interrupted":
    shutil.rmtree = remove_and_interrupt
sys.exit(supervise(run, lambda line: print(line, flush=True)))
"""


@contextmanager
def supervised(place: Path, then: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", SCRIPT, str(place), then]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def started(place: Path, count: int) -> list[str]:
    """The lines of the processes that were started, once there are so many."""
    file = place / "started"

    def lines() -> list[str]:
        return file.read_text().splitlines() if file.exists() else []

    return eventually(lambda: len(lines()) >= count and lines())


def nothing_is_left(place: Path, lines: list[str]) -> bool:
    pids = [int(word) for line in lines for word in line.split() if word.isdigit()]
    assert pids
    return all(map(has_ended, pids)) and not list(place.glob("ray-*"))


def test_a_lost_cluster_is_started_again_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    with supervised(tmp_path, "lost twice") as process:
        *lost, last = started(tmp_path, 3)
        eventually(lambda: len(list(tmp_path.glob("ray-*"))) == 1)
        assert not has_ended(int(last.split()[0]))
        for line in lost:
            assert all(has_ended(int(number)) for number in line.split())
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stdout and process.stdout.read().count("starting the cluster again") == 2
    lines = started(tmp_path, 4)
    assert lines[-1] == "stopped", "SIGTERM stops the cluster as ^C does"
    assert nothing_is_left(tmp_path, lines)


@pytest.mark.parametrize("then", ["killed once", "ended by a library once"])
def test_a_child_that_did_not_end_itself_is_started_again(tmp_path: Path, then: str) -> None:
    with supervised(tmp_path, then) as process:
        started(tmp_path, 2)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    assert nothing_is_left(tmp_path, started(tmp_path, 2))


def test_a_signal_while_a_lost_cluster_is_cleaned_up_ends_it(tmp_path: Path) -> None:
    with supervised(tmp_path, "lost and interrupted") as process:
        assert process.wait(20) == LOST_EXIT_CODE
        assert process.stdout and not process.stdout.read()
    lines = started(tmp_path, 1)
    assert len(lines) == 1 and nothing_is_left(tmp_path, lines)


def test_a_closed_terminal_stops_the_cluster_and_cuts_nothing_off_before(tmp_path: Path) -> None:
    with supervised(tmp_path, "hang up") as process:
        started(tmp_path, 1)
        os.killpg(process.pid, signal.SIGHUP)
        assert process.wait(20) == 0
    lines = started(tmp_path, 2)
    assert lines[-1] == "stopped" and nothing_is_left(tmp_path, lines)


def test_a_closed_terminal_is_ignored_below_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert signal.SIGHUP in stop_signals()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert stop_signals() == {signal.SIGINT, signal.SIGTERM}
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_cannot_start_is_not_started_again(tmp_path: Path) -> None:
    with supervised(tmp_path, "fail") as process:
        assert process.wait(20) == 7
    lines = started(tmp_path, 1)
    assert len(lines) == 1 and nothing_is_left(tmp_path, lines)


def test_when_the_supervisor_is_killed_its_cluster_stops(tmp_path: Path) -> None:
    with supervised(tmp_path, "serve") as process:
        lines = started(tmp_path, 1)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert started(tmp_path, 2)[-1] == "stopped"
        pids = [int(number) for number in lines[0].split()]
        eventually(lambda: all(map(has_ended, pids)))


def test_a_start_whose_supervisor_is_killed_leaves_nothing(tmp_path: Path) -> None:
    with supervised(tmp_path, "start") as process:
        lines = started(tmp_path, 1)
        eventually((tmp_path / "starting").exists)
        process.send_signal(signal.SIGKILL)
        process.wait()
        eventually(lambda: nothing_is_left(tmp_path, lines))


def test_a_process_that_was_there_before_is_let_alone(tmp_path: Path) -> None:
    before = "import subprocess\nother = subprocess.Popen(['sleep', '600'])\n"
    after = "assert other.poll() is None\nother.kill()\nprint('let alone')\nsys.exit(code)"
    script = before + SCRIPT.replace("sys.exit(supervise(", "code = (supervise(") + after
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), "fail"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout) == (7, "let alone\n"), done.stderr


#: Ends a descendant whose name is no text, and not the new child of an older process.
WITH_OTHERS = """
import ctypes, os, subprocess, sys, time
from diptych.cluster.launch.processes import (
    adopt_orphans, descendants, end_descendants, has_ended, reap_orphans
)

older = subprocess.Popen(
    ["sh", "-c", "read line; sleep 600 & echo $!; wait"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE,
)
spare = descendants(os.getpid())
assert spare == {older.pid}, spare
adopt_orphans()
older.stdin.write(b"now\\n")
older.stdin.flush()
of_the_older = int(older.stdout.readline())

named = os.fork()
if not named:
    ctypes.CDLL(None).prctl(15, b"\\xff\\xfe) S 1")  # PR_SET_NAME
    os.close(1)
    time.sleep(600)
while b"\\xff" not in open(f"/proc/{named}/comm", "rb").read():
    time.sleep(0.01)
assert not has_ended(named)
assert end_descendants(10.0, spare=spare) == set()
assert has_ended(named) and not has_ended(of_the_older)
reap_orphans(spare=spare)
assert not os.path.exists(f"/proc/{named}")
older.kill()
os.kill(of_the_older, 9)
"""


def test_any_name_is_ended_and_what_belongs_to_others_is_not() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITH_OTHERS], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_process_that_may_not_be_killed_is_among_those_that_have_not_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def denied(process: int, number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(processes, "descendants", lambda ancestor, *others: {4711})
    monkeypatch.setattr(processes, "reap_orphans", lambda spare: None)
    monkeypatch.setattr(os, "kill", denied)
    assert processes.end_descendants(0.05, spare=set()) == {4711}


LOST = ChildEnd(LOST_EXIT_CODE, was_ready=True, was_told_to_end=False)


@pytest.mark.parametrize(
    ("end", "verdict"),
    [
        (LOST, Verdict.RESTART),
        (ChildEnd(-signal.SIGKILL, was_ready=True, was_told_to_end=False), Verdict.RESTART),
        (ChildEnd(-signal.SIGKILL, was_ready=False, was_told_to_end=False), Verdict.END),
        (ChildEnd(LOST_EXIT_CODE, was_ready=True, was_told_to_end=True), Verdict.END),
        (ChildEnd(0, was_ready=True, was_told_to_end=True), Verdict.END),
        (ChildEnd(1, was_ready=True, was_told_to_end=False), Verdict.END),
        (ChildEnd(1, True, was_told_to_end=False, ended_itself=False), Verdict.RESTART),
        (ChildEnd(1, True, was_told_to_end=True, ended_itself=False), Verdict.END),
        (ChildEnd(1, False, was_told_to_end=False, ended_itself=False), Verdict.END),
    ],
)
def test_only_a_cluster_that_served_and_was_lost_is_started_again(
    end: ChildEnd, verdict: Verdict
) -> None:
    assert RestartPolicy().judge(end, now=0.0) is verdict


def test_a_cluster_that_is_lost_again_and_again_is_given_up() -> None:
    policy = RestartPolicy()
    for number in range(RESTARTS_LIMIT):
        assert policy.judge(LOST, now=10.0 * number) is Verdict.RESTART
    assert policy.judge(LOST, now=60.0) is Verdict.GIVE_UP
    assert policy.judge(LOST, now=60.0 + RESTARTS_WINDOW_S) is Verdict.RESTART


def test_the_test_process_itself_has_not_ended() -> None:
    assert not has_ended(os.getpid())


#: A cluster whose start loses each exception, as imports and finalizers of Ray do now and then.
STUBBORN_START = """
import sys, time
from diptych.cluster.cli.serve import _run_until_interrupted
from diptych.cluster.launch.supervisor import supervise

def report(line):
    print(line, flush=True)

class Cluster:
    def start(self, report_progress, note_folder):
        report_progress("starting Ray")
        while True:
            try:
                time.sleep(600)
            except BaseException:
                pass

sys.exit(supervise(lambda told: _run_until_interrupted(Cluster(), report, told), report))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_start_that_loses_exceptions_is_stopped_too(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STUBBORN_START], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "starting Ray\n"
            process.send_signal(number)
            assert process.wait(20) == 0
            assert process.stdout.read() == "stopping\n"
        finally:
            process.kill()
