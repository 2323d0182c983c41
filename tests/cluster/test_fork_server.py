"""The fork server with real processes: what it forks, whom it refuses, and who goes on without it.

The client is the script that the raylet runs, with a script of this test in the place of Ray's.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from diptych.cluster.launch import fork_client, fork_server
from diptych.cluster.launch.fork_client import fork_request

from tests.support.live import eventually
from tests.support.variants import daily

CLIENT = str(Path(fork_client.__file__))
#: Writes down what the process is that runs it: in the place of Ray's worker script.
SELF_PORTRAIT = """
import json, os, resource, signal, sys
from ray import UniqueID
print(json.dumps({
    "arguments": sys.argv,
    "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
    "folder": os.getcwd(),
    "group": os.getpgid(0),
    "id": UniqueID.from_random().hex(),
    "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "parent": os.getppid(),
    "process": os.getpid(),
    "RAY_JOB_ID": os.environ.get("RAY_JOB_ID"),
    "had_imported": "decimal" in sys.modules,
}), flush=True)
"""
PLAIN = 'import sys; print("started by itself", sys.argv[1:])'


class Server:
    """A fork server below this process, and its folder."""

    def __init__(self, folder: Path, *modules: str) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(folder),
            fork_client.SOCKET: str(folder / "socket"),
            fork_client.RAY_SCRIPT: str(folder / "plain.py"),
        }
        (folder / "portrait.py").write_text(SELF_PORTRAIT)
        (folder / "plain.py").write_text(PLAIN)
        self.log = folder / "log"
        with socket.socket(socket.AF_UNIX) as listener, self.log.open("wb") as log_file:
            listener.bind(self.environment[fork_client.SOCKET])
            listener.listen()
            module = "diptych.cluster.launch.fork_server"
            lists = ["decimal", fork_server.SEPARATOR, *modules]
            arguments = [str(listener.fileno()), str(os.getpid()), *lists]
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                pass_fds=[listener.fileno()],
                env=self.environment,
                stdout=log_file,
                stderr=log_file,
            )

    def ask(self, *arguments: str, **variables: str) -> str:
        """Run the client as a raylet does; return what was written to its standard output."""
        script = str(self.folder / "portrait.py")
        read_end, write_end = os.pipe()
        client = subprocess.Popen(
            [sys.executable, CLIENT, script, *arguments, "--language=PYTHON"],
            env={**self.environment, "RAY_JOB_ID": "01000000", **variables},
            cwd=self.folder,
            stdout=write_end,
            preexec_fn=_restrict,
        )
        os.close(write_end)
        with os.fdopen(read_end) as output:
            written = output.read()  # until the client and the process that it got have ended
        assert client.wait(30) == 0
        return written


def _restrict() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with _serving(tmp_path) as server:
        yield server


@contextmanager
def _serving(folder: Path, *modules: str) -> Iterator[Server]:
    """Run a server that imports these modules behind Ray; they may lie in the folder."""
    server = Server(folder, *modules)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def test_a_forked_process_is_what_the_client_was(server: Server) -> None:
    first = json.loads(server.ask("--node-id=7"))
    assert first["arguments"] == [str(server.folder / "portrait.py"), "--node-id=7"]
    assert first["parent"] == server.process.pid, "it was not forked"
    assert first["had_imported"]
    assert first["folder"] == str(server.folder)
    assert first["blocked"] == [signal.SIGINT]
    assert first["group"] == first["process"], "it has the server's process group"
    assert first["RAY_JOB_ID"] == "01000000"
    assert first["open_files"] == [100, 200]
    second = json.loads(server.ask())
    assert second["parent"] == server.process.pid
    assert second["process"] != first["process"]
    assert second["id"] != first["id"], "both draw the same ids"


@pytest.mark.parametrize("variable", ["RAY_JOB_ID", "OMP_NUM_THREADS", *daily(["NEW"])])
def test_who_has_other_variables_is_started_by_ray(server: Server, variable: str) -> None:
    assert "process" in server.ask()
    portrait = str(server.folder / "portrait.py")
    plain = f"started by itself {[portrait, '--node-id=7', '--language=PYTHON']}\n"
    assert server.ask("--node-id=7", **{variable: "other"}) == plain
    assert f"refused: Refused('other variables: {variable}')" in server.log.read_text()
    assert "process" in server.ask(), "the others are refused, too"


def test_the_first_request_may_bring_variables_of_ray_alone(server: Server) -> None:
    assert "by itself" in server.ask(LD_PRELOAD="/lib/other.so")
    assert "process" in server.ask(RAY_RAYLET_PID="7")


def test_without_a_server_ray_starts_the_process(server: Server) -> None:
    server.process.kill()
    server.process.wait()
    assert "by itself" in server.ask()
    Path(server.environment[fork_client.SOCKET]).unlink()
    assert "by itself" in server.ask()


def test_a_server_that_ends_within_a_request_leaves_it_to_ray(server: Server) -> None:
    assert "process" in server.ask()
    os.kill(server.process.pid, signal.SIGSTOP)
    portrait = str(server.folder / "portrait.py")
    client = subprocess.Popen(
        [sys.executable, CLIENT, portrait, "--language=PYTHON"],
        env={**server.environment, "RAY_JOB_ID": "01000000"},
        stdout=subprocess.PIPE,
        text=True,
    )
    with pytest.raises(subprocess.TimeoutExpired):
        client.communicate(timeout=0.3)
    server.process.kill()
    assert "by itself" in client.communicate(timeout=30)[0]


def test_a_request_that_is_none_harms_nobody(server: Server) -> None:
    requests = [
        b"",
        b"\0\0\0\7{}",
        b"\0\0\0\2{}",
        b"\0\0\0\2[]",
        b"\0\0\0\7not all",
        b"\xff\xff\xff\xff",
    ]
    for request in requests:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(server.environment[fork_client.SOCKET])
            if request:
                socket.send_fds(connection, [request], [0, 1, 2])
    assert "process" in server.ask()
    assert server.log.read_text().count("refused") == len(requests)


def test_a_client_that_has_given_up_gets_no_process(server: Server) -> None:
    """It has started one by itself."""
    assert "process" in server.ask()
    request = {
        "command": [str(server.folder / "portrait.py")],
        "environment": {**server.environment, "RAY_JOB_ID": "01000000"},
        "folder": str(server.folder),
        "blocked_signals": [],
        "open_files": [100, 100],
    }
    body = json.dumps(request).encode()
    read_end, write_end = os.pipe()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(server.environment[fork_client.SOCKET])
        length = len(body).to_bytes(fork_client.LENGTH_BYTES, "big")
        socket.send_fds(connection, [length], [0, write_end, 2])
        connection.sendall(body)
    os.close(write_end)
    with os.fdopen(read_end) as output:
        assert output.read() == ""
    assert "refused" not in server.log.read_text()


@pytest.mark.parametrize(
    ("code", "flaw"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=[9]).start()", "thread"),
        ("import ray; ray.UniqueID.from_random()", "draw the same ids"),
    ],
)
def test_a_module_after_which_processes_are_not_sound_ends_the_forking(
    tmp_path: Path, code: str, flaw: str
) -> None:
    (tmp_path / "unsound.py").write_text(code)
    with _serving(tmp_path, "unsound") as server:
        eventually(lambda: "by itself" in server.ask())
        assert flaw in server.log.read_text()


def test_classes_of_ray_leave_the_processes_sound(tmp_path: Path) -> None:
    """Each draws an id when its module is imported."""
    (tmp_path / "actors.py").write_text("import ray\n@ray.remote\nclass Actor:\n    pass\n")
    with _serving(tmp_path, "actors", "fractions") as server:
        ids = {json.loads(server.ask())["id"] for _ in range(4)}
        assert len(ids) == 4
        assert "refused" not in server.log.read_text()


def test_the_server_ends_with_whoever_started_it(tmp_path: Path) -> None:
    starter = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from tests.cluster.test_fork_server import Server
print(Server(Path({str(tmp_path)!r})).process.pid)
"""
    run = subprocess.run(
        [sys.executable, "-c", starter], capture_output=True, text=True, check=True, timeout=60
    )
    server = Path(f"/proc/{run.stdout.strip()}")
    eventually(lambda: not server.exists())


@pytest.mark.parametrize(
    "context",
    [
        {"py_executable": "/other/python"},
        {"command_prefix": ["nice"]},
        {"override_worker_entrypoint": "/worker.py"},
    ],
)
def test_what_another_interpreter_or_command_runs_is_left_to_ray(context: dict) -> None:
    option = fork_client.CONTEXT_OPTION
    assert fork_request(["x.py", f"{option}{json.dumps(context)}", "--language=PYTHON"]) is None
    own = {"py_executable": sys.executable, "command_prefix": [], "java_jars": []}
    variables = {"env_vars": {"A": "1"}}
    request = fork_request(["x.py", f"{option}{json.dumps(own | variables)}", "--language=PYTHON"])
    assert request is not None
    assert request["command"] == ["x.py"]
    assert request["environment"] == {**os.environ, "A": "1"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["Main", "--language=JAVA"],
        ["-s", "x.py", "--language=PYTHON"],
        ["x.py"],
    ],
)
def test_what_is_no_script_of_python_is_left_to_ray(arguments: list[str]) -> None:
    assert fork_request(arguments) is None


def test_without_a_language_ray_has_nothing_to_set_up(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(PLAIN)
    command = [sys.executable, CLIENT, str(script), "--node-id=7"]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    assert output == "started by itself ['--node-id=7']\n"
