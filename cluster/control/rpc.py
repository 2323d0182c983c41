"""The admin API over gRPC: `diptych.v1.Admin` on a port of its own, with the admin key.

Each method of the API checks the key, calls `ClusterOperations` as `http.py` does, and puts the
answer into a message. Any `ApiError` ends the call with the status that the gateway's table of
errors gives it. Beside the API, the server answers `Check` of gRPC's health service without a key,
and has gRPC's reflection.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Never, TypeVar

import grpc
from google.protobuf import json_format
from google.protobuf.struct_pb2 import Struct
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ...protos import admin_pb2, admin_pb2_grpc
from ..config import ControlSettings
from ..gateway.edge.grpc_edge import DETAILS, bind, connection_limits, status_of
from ..gateway.errors import ApiError
from .cluster_operations import ClusterOperations
from .http import BIND_RETRY_S, BIND_TIMEOUT_S, AdminGuard

log = logging.getLogger(__name__)

SERVICE = "diptych.v1.Admin"  #: The API's name in gRPC.
#: The longest request message, 64 KiB: requests are names and counts. A longer one is refused.
REQUEST_BYTES_LIMIT = 1 << 16

Reply = TypeVar("Reply")
Message = TypeVar("Message")


class AdminService:
    """The methods of `diptych.v1.Admin`, and `Check` of gRPC's health service.

    `operations` carries out what the methods say; `guard` checks the caller's key. Every field of
    requests and responses is explained in protos/admin.proto.

    `Status` says what is `missing` until the cluster serves. `Scale` sets replica counts of pools.
    `Drain` gives a replica nothing new, `hand_over` lets what runs there go on elsewhere at once, and
    `force` drains the last replica of a role too; `Undrain` takes that back. `Flip` gives a replica
    another role. `Explain` returns the router's decisions on the attempts of one request.
    """

    def __init__(self, operations: ClusterOperations, guard: AdminGuard) -> None:
        self._operations = operations
        self._guard = guard

    async def Status(
        self, request: admin_pb2.StatusRequest, context: Any
    ) -> admin_pb2.StatusResponse:
        status = await self._call(context, self._operations.status)
        return admin_pb2.StatusResponse(
            state=status["state"],
            missing=status["missing"],
            model=status["model"] or "",
            pools={name: _typed(admin_pb2.Pool, pool) for name, pool in pools_of(status).items()},
            replicas=[_typed(admin_pb2.Replica, worker) for worker in status["workers"]],
            cluster=_struct(status),
        )

    async def Scale(self, request: admin_pb2.ScaleRequest, context: Any) -> admin_pb2.ScaleResponse:
        counts = {
            pool: getattr(request, pool) for pool in ("prefill", "decode") if request.HasField(pool)
        }
        result = await self._call(
            context,
            lambda: self._operations.scale(counts, dry_run=request.dry_run, model=request.model),
        )
        return admin_pb2.ScaleResponse(
            changes=[admin_pb2.Change(**change) for change in result["changes"]],
            says=result["says"],
            undo=result["undo"] or "",
            dry_run=result["dry_run"],
        )

    async def Drain(self, request: admin_pb2.DrainRequest, context: Any) -> admin_pb2.SteerResponse:
        result = await self._call(
            context,
            lambda: self._operations.drain(
                request.replica,
                force=request.force,
                hand_over=request.hand_over,
                dry_run=request.dry_run,
            ),
        )
        return admin_pb2.SteerResponse(**result)

    async def Undrain(
        self, request: admin_pb2.UndrainRequest, context: Any
    ) -> admin_pb2.SteerResponse:
        result = await self._call(
            context,
            lambda: self._operations.undrain(request.replica, dry_run=request.dry_run),
        )
        return admin_pb2.SteerResponse(**result)

    async def Flip(self, request: admin_pb2.FlipRequest, context: Any) -> admin_pb2.SteerResponse:
        result = await self._call(
            context,
            lambda: self._operations.flip(request.replica, request.to, dry_run=request.dry_run),
        )
        return admin_pb2.SteerResponse(**result)

    async def Explain(
        self, request: admin_pb2.ExplainRequest, context: Any
    ) -> admin_pb2.ExplainResponse:
        request_id = request.request_id
        decisions = await self._call(context, lambda: self._operations.explain(request_id))
        return admin_pb2.ExplainResponse(
            request_id=request_id, decisions=[_struct(decision) for decision in decisions]
        )

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> health_pb2.HealthCheckResponse:
        """Say that this server (not the cluster) is there. Needs no key, as probes have none."""
        if request.service not in ("", SERVICE):
            await _refuse(context, ApiError("not_found", f"no service {request.service!r}"))
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)

    async def _call(self, context: Any, work: Callable[[], Awaitable[Reply]]) -> Reply:
        """Return `work`'s result; end the call with a status if the key is wrong or `work` fails."""
        authorization = dict(context.invocation_metadata() or ()).get("authorization", "")
        if not isinstance(authorization, str):  # binary metadata comes as bytes
            authorization = ""
        try:
            refusal = self._guard.key_refusal(authorization)
            if refusal:
                raise refusal
            return await work()
        except ApiError as error:
            await _refuse(context, error)
        except Exception:
            log.exception("an admin call failed")
            await _refuse(context, ApiError("internal", "internal error; Control's log has it"))


def pools_of(status: dict[str, Any]) -> dict[str, Any]:
    """Return the pools of a status by pool; of several models by both names, `qwen/prefill`."""
    models = status["models"]
    if len(models) == 1:
        pools: dict[str, Any] = status["pools"]
        return pools
    return {
        f"{model}/{pool}": summary
        for model, model_status in models.items()
        for pool, summary in model_status["pools"].items()
    }


class AdminHealth(health_pb2_grpc.HealthServicer):
    """gRPC's health service with `Check`; `Watch` is not implemented."""

    def __init__(self, service: AdminService) -> None:
        self.Check = service.Check


async def listen(service: AdminService, settings: ControlSettings) -> grpc.aio.Server:
    """Return a server that listens on `control.grpc_port`.

    Raises RuntimeError when the port is not free after `BIND_TIMEOUT_S`: where Control was started anew,
    its former process may hold it for a while.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + BIND_TIMEOUT_S
    while True:
        server = _make_server(service)
        try:
            bind(server, settings)
            await server.start()
            return server
        except RuntimeError:
            await server.stop(None)
            if loop.time() > deadline:
                raise
            await asyncio.sleep(BIND_RETRY_S)


def _make_server(service: AdminService) -> grpc.aio.Server:
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", REQUEST_BYTES_LIMIT),
            *connection_limits(),
            ("grpc.so_reuseport", 0),  # a taken port is an error; 1 would share it
        ]
    )
    admin_pb2_grpc.add_AdminServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(AdminHealth(service), server)
    health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
    reflection.enable_server_reflection((SERVICE, health_name, reflection.SERVICE_NAME), server)
    return server


async def _refuse(context: Any, error: ApiError) -> Never:
    """End the call with the error's status and its details."""
    await context.abort(error.kind.grpc_status, error.message, ((DETAILS, status_of(error)),))
    raise AssertionError("abort raises")


def _typed(message_type: type[Message], values: dict[str, Any]) -> Message:
    """Return a message of that type with the values of its fields; other values are left out."""
    fields = message_type.DESCRIPTOR.fields  # type: ignore[attr-defined]
    return message_type(**{field.name: values[field.name] for field in fields})


def _struct(values: dict[str, Any]) -> Struct:
    """Return the values as a `Struct`, protobuf's form of a JSON object."""
    return json_format.Parse(json.dumps(values), Struct())
