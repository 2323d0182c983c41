"""A Ray token for tests that start Ray themselves, and a stranger's calls, which have none."""

from __future__ import annotations

import os
import pickle
import secrets
from pathlib import Path

import grpc
from diptych.cluster.launch.ray_cluster import AUTH_MODE, HARMLESS_CALL, TOKEN_PATH
from ray.serve.generated.serve_pb2 import ASGIRequest

SERVE_CALL = "/ray.serve.ASGIService/HandleRequest"
#: Calls that a raylet, and every process that runs Ray's tasks, answers and forgets.
RAYLET_CALL = "/ray.rpc.NodeManagerService/GetSystemConfig"
WORKER_CALL = "/ray.rpc.CoreWorkerService/NumPendingTasks"
TIMEOUT_S = 5.0


def token_environment(folder: Path) -> dict[str, str]:
    """Return this process's environment with a new token in `folder` for Ray to ask for."""
    token_file = folder / "ray_token"
    token_file.touch(mode=0o600)
    token_file.write_text(secrets.token_hex(32))
    return {**os.environ, AUTH_MODE: "token", TOKEN_PATH: str(token_file)}


class _Code:
    """What a stranger sends to a process that unpickles it: code, here one that makes a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple:
        return Path.touch, (self._file,)


def run_code(address: str, makes: Path) -> grpc.StatusCode:
    """Call Serve's replica at `address` without a token, with code that makes the file `makes`."""
    request = ASGIRequest(pickled_request_metadata=pickle.dumps(_Code(makes)))
    return call(address, SERVE_CALL, request.SerializeToString())


def call(address: str, method: str = HARMLESS_CALL, message: bytes = b"") -> grpc.StatusCode:
    """Make a gRPC call without a token, and return how it ended."""
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(method)(message, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK
