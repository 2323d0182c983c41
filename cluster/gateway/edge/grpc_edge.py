"""The edge of a gRPC server: its socket with TLS, and an `ApiError` as a `google.rpc.Status`."""

from __future__ import annotations

from pathlib import Path

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from ..errors import ApiError

DETAILS = "grpc-status-details-bin"  #: the key of the metadata


def status_of(error: ApiError) -> bytes:
    """Encoded: code and message, ErrorInfo, and RetryInfo where another try may help."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain="diptych")
    if error.param:
        info.metadata["param"] = error.param
    details = [info]
    if error.retry_after_s is not None:
        wait = Duration()
        wait.FromMilliseconds(round(error.retry_after_s * 1e3))
        details.append(error_details_pb2.RetryInfo(retry_delay=wait))
    packed = [any_pb2.Any() for _ in details]
    for one, detail in zip(packed, details, strict=True):
        one.Pack(detail)
    code = error.kind.grpc_status.value[0]
    status = status_pb2.Status(code=code, message=error.message, details=packed)
    data: bytes = status.SerializeToString()
    return data


def bind(server: grpc.aio.Server, host: str, port: int, cert: str | None, key: str | None) -> None:
    """With TLS if there are PEM files. Raises RuntimeError when the port is taken."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if cert and key:
        pair = Path(key).read_bytes(), Path(cert).read_bytes()
        server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
    else:
        server.add_insecure_port(address)
