"""What Ray's raylet runs to start a process of Python, in place of Ray's own `setup_worker.py`.

It asks the fork server (fork_server.py) for a process that has its imports behind it, and ends. Ray
learns the new process's id from that process itself. Where the server cannot give one, this becomes
Ray's own script, which starts the worker as usual.

This file runs by itself, not as a part of the package: it imports the standard library alone, as it
must be quick.
"""

import json
import os
import signal
import socket
import sys
from typing import Any

SOCKET = "DIPTYCH_FORK_SERVER"  #: The variable with the path of the server's socket.
RAY_SCRIPT = "DIPTYCH_RAY_SETUP_WORKER"  #: The variable with the path of the script of Ray's own.
CONTEXT_OPTION = "--serialized-runtime-env-context="
LANGUAGE_OPTION = "--language="
REPLY_LIMIT_S = 20.0  #: The server may be in the middle of an import.
FORKED = b"1"  #: The new process says that it takes over.
LENGTH_BYTES = 4  #: At the beginning of a request, with the standard streams.


def main(arguments: list[str]) -> None:
    """Have a worker started with these arguments of the raylet."""
    request = fork_request(arguments)
    if request is None or not is_forked(request):
        script = os.environ[RAY_SCRIPT]
        os.execv(sys.executable, [sys.executable, script, *arguments])


def fork_request(arguments: list[str]) -> dict[str, Any] | None:
    """Return what the server needs; None if only Ray's own script can start such a worker.

    That is so for other languages, and where the actor's `runtime_env` names another interpreter or
    a command around it.
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
    if language != "PYTHON" or any(context.values()):
        return None
    return {
        "command": command,
        "environment": {**os.environ, **variables},
        "folder": os.getcwd(),
        "blocked_signals": [int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
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
            return connection.recv(1) == FORKED
    except OSError:
        return False


if __name__ == "__main__":
    main(sys.argv[1:])
