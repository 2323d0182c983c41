"""What Ray's raylet runs to start a process of Python, in place of Ray's own `setup_worker.py`.

It asks the fork server (fork_server.py) for a process that has its imports behind it, and ends. Ray
learns the new process's id from that process itself. Where the server does not give one, this
becomes what Ray would have run.

This file runs by itself, not as a part of the package. It imports the standard library alone, as it
must be quick.
"""

import json
import os
import resource
import signal
import socket
import sys
from typing import Any

SOCKET = "DIPTYCH_FORK_SERVER"  #: The variable with the path of the server's socket.
RAY_SCRIPT = "DIPTYCH_RAY_SETUP_WORKER"  #: The variable with the path of Ray's `setup_worker.py`.
CONTEXT_OPTION = "--serialized-runtime-env-context="
LANGUAGE_OPTION = "--language="
LENGTH_BYTES = 4  #: At the beginning of a request: how long its JSON is.
REPLY_LIMIT_S = 20.0  #: The server may be in the middle of an import, and others may wait for it.
FORKED = b"1"  #: The new process is there.
TAKEN = b"2"  #: The answer to that: it is to go on, as nothing else is started.


def main(arguments: list[str]) -> None:
    """Have a process started with these arguments of the raylet."""
    request = fork_request(arguments)
    if request is not None and is_forked(request):
        return
    if any(argument.startswith(LANGUAGE_OPTION) for argument in arguments):
        arguments = [os.environ[RAY_SCRIPT], *arguments]
    # Else Ray has nothing to set up: the arguments are what Ray's own script would run.
    os.execv(sys.executable, [sys.executable, *arguments])


def fork_request(arguments: list[str]) -> dict[str, Any] | None:
    """Return what the server needs to know; None if it cannot start such a process.

    It starts Python scripts only, without options of the interpreter, and not where the actor's
    `runtime_env` names another interpreter, another script, or a command around it.
    """
    context: dict[str, Any] = {}
    language = ""
    command = []
    for argument in arguments:
        if argument.startswith(CONTEXT_OPTION):
            context = json.loads(argument.removeprefix(CONTEXT_OPTION) or "{}")
        elif argument.startswith(LANGUAGE_OPTION):
            language = argument.removeprefix(LANGUAGE_OPTION)
        else:
            command.append(argument)
    variables = context.pop("env_vars", {})
    if context.get("py_executable") == sys.executable:
        context.pop("py_executable")
    if language != "PYTHON" or any(context.values()) or command[0].startswith("-"):
        return None
    return {
        "command": command,
        "environment": {**os.environ, **variables},
        "folder": os.getcwd(),
        "blocked_signals": [int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
    }


def is_forked(request: dict[str, Any]) -> bool:
    """Send the request and this process's standard streams; return whether a process took over."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(REPLY_LIMIT_S)
            connection.connect(os.environ[SOCKET])
            body = json.dumps(request).encode()
            socket.send_fds(connection, [len(body).to_bytes(LENGTH_BYTES, "big")], [0, 1, 2])
            connection.sendall(body)
            if connection.recv(1) != FORKED:
                return False
            connection.sendall(TAKEN)
            return True
    except OSError:
        return False


if __name__ == "__main__":
    main(sys.argv[1:])
