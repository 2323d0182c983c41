"""The edge of a gRPC server: its socket with TLS, and an `ApiError` as a `google.rpc.Status`."""

from __future__ import annotations

from pathlib import Path

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from ...config import ControlSettings, GatewaySettings
from ..errors import ApiError
from .listen import resting_connections_limit

DETAILS = "grpc-status-details-bin"  #: the metadata that holds an encoded status


def connection_limits() -> list[tuple[str, int]]:
    """Returns the options of every gRPC server against connections on which nothing happens.

    They do not bound a connection with an open call, nor how long a call may send no message.
    """
    return [
        ("grpc.server_handshake_timeout_ms", 10_000),
        ("grpc.max_connection_idle_ms", 300_000),
        ("grpc.max_allowed_incoming_connections", resting_connections_limit()),
    ]


def status_of(error: ApiError) -> bytes:
    """Returns the encoded `google.rpc.Status` of an error, for the metadata `DETAILS`.

    It has a code, the message and an ErrorInfo, and a RetryInfo where another try may help.
    """
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain="diptych")
    if error.param:
        info.metadata["param"] = error.param
    details = [info]
    if error.retry_after_s is not None:
        wait = Duration()
        wait.FromMilliseconds(round(error.retry_after_s * 1e3))
        details.append(error_details_pb2.RetryInfo(retry_delay=wait))
    code = error.kind.grpc_status.value[0]  # grpc's enum has pairs of a number and a name
    status = status_pb2.Status(code=code, message=error.message)
    for detail in details:
        status.details.add().Pack(detail)
    data: bytes = status.SerializeToString()
    return data


def bind(server: grpc.aio.Server, settings: GatewaySettings | ControlSettings) -> None:
    """Binds the server to `grpc_port`, with TLS if there are PEM files of a certificate and a key.

    Raises RuntimeError when the port is taken, or when gRPC refuses what is in the files; stderr
    says which. A server whose option `grpc.so_reuseport` is 1 shares a port with others that have
    it, and no error says so. Raises OSError when a file cannot be read.
    """
    host = settings.host  # an IPv6 address needs brackets in front of a port
    port = settings.grpc_port
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if settings.tls_cert and settings.tls_key:
        key_and_cert = (
            Path(settings.tls_key).read_bytes(),
            Path(settings.tls_cert).read_bytes(),
        )
        server.add_secure_port(address, grpc.ssl_server_credentials([key_and_cert]))
    else:
        server.add_insecure_port(address)
