"""The admin API over gRPC: `diptych.v1.Admin` on a port of its own, with the admin key."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Never, TypeVar

import grpc
from google.protobuf import json_format
from google.protobuf.struct_pb2 import Struct
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ...protos import admin_pb2 as pb
from ...protos import admin_pb2_grpc
from ..config import ControlSettings
from ..gateway.edge.grpc_edge import DETAILS, bind, status_of
from ..gateway.errors import ApiError
from .http import BIND_S, Guard

if TYPE_CHECKING:
    from .control import Control

log = logging.getLogger(__name__)

SERVICE = "diptych.v1.Admin"
MESSAGE_MAX = 1 << 16  #: bytes of a request

Reply = TypeVar("Reply")


class Admin:
    """The methods of both services, over a `Control`. What is wrong ends a call with a status."""

    def __init__(self, control: Control, guard: Guard) -> None:
        self._control, self._guard = control, guard

    async def Status(self, asked: pb.StatusRequest, context: Any) -> pb.StatusResponse:
        told = await self._call(context, lambda: self._control.status())
        return pb.StatusResponse(
            state=told["state"],
            missing=told["missing"],
            model=told["model"] or "",
            pools={name: _known(pb.Pool, pool) for name, pool in told["pools"].items()},
            replicas=[_known(pb.Replica, worker) for worker in told["workers"]],
            cluster=_struct(told),
        )

    async def Scale(self, asked: pb.ScaleRequest, context: Any) -> pb.ScaleResponse:
        pools = [pool for pool in ("prefill", "decode") if asked.HasField(pool)]
        counts = {pool: getattr(asked, pool) for pool in pools}
        told = await self._call(context, lambda: self._control.scale(counts, asked.dry_run))
        changes = [pb.Change(**change) for change in told["changes"]]
        return pb.ScaleResponse(
            changes=changes, says=told["says"], undo=told["undo"] or "", dry_run=told["dry_run"]
        )

    async def Drain(self, asked: pb.DrainRequest, context: Any) -> pb.SteerResponse:
        given = asked.replica, asked.force, asked.hand_over, asked.dry_run
        return pb.SteerResponse(**await self._call(context, lambda: self._control.drain(*given)))

    async def Undrain(self, asked: pb.UndrainRequest, context: Any) -> pb.SteerResponse:
        given = asked.replica, asked.dry_run
        return pb.SteerResponse(**await self._call(context, lambda: self._control.undrain(*given)))

    async def Flip(self, asked: pb.FlipRequest, context: Any) -> pb.SteerResponse:
        given = asked.replica, asked.to, asked.dry_run
        return pb.SteerResponse(**await self._call(context, lambda: self._control.flip(*given)))

    async def Explain(self, asked: pb.ExplainRequest, context: Any) -> pb.ExplainResponse:
        name = asked.request_id
        decisions = await self._call(context, lambda: self._control.explain(name))
        return pb.ExplainResponse(request_id=name, decisions=[_struct(one) for one in decisions])

    async def Check(
        self, asked: health_pb2.HealthCheckRequest, context: Any
    ) -> health_pb2.HealthCheckResponse:
        """Of this server, not of the cluster; needs no key: probes have none."""
        if asked.service not in ("", SERVICE):
            await _refuse(context, ApiError("not_found", f"no service {asked.service!r}"))
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)

    async def _call(self, context: Any, work: Callable[[], Awaitable[Reply]]) -> Reply:
        """`work`'s result, for whoever has the key."""
        given = dict(context.invocation_metadata() or ()).get("authorization", "")
        try:
            wrong = self._guard.wrong_key(given if isinstance(given, str) else "")
            if wrong:
                raise wrong
            return await work()
        except ApiError as error:
            await _refuse(context, error)
        except Exception:
            log.exception("an admin call failed")
            await _refuse(context, ApiError("internal", "internal error; Control's log has it"))


class _Health(health_pb2_grpc.HealthServicer):
    """gRPC's health service; `Watch` is not there."""

    def __init__(self, admin: Admin) -> None:
        self.Check = admin.Check


async def listen(admin: Admin, settings: ControlSettings) -> grpc.aio.Server:
    """Raises RuntimeError when the port does not become free."""
    limit = asyncio.get_running_loop().time() + BIND_S
    tls = settings.tls_cert, settings.tls_key
    while True:
        server = _server(admin)
        try:
            bind(server, settings.host, settings.grpc_port, *tls)
            await server.start()
            return server
        except RuntimeError:  # a replica before this one may still have it
            await server.stop(None)
            if asyncio.get_running_loop().time() > limit:
                raise
            await asyncio.sleep(0.2)


def _server(admin: Admin) -> grpc.aio.Server:
    limits = [("grpc.max_receive_message_length", MESSAGE_MAX), ("grpc.so_reuseport", 0)]
    server = grpc.aio.server(options=limits)
    admin_pb2_grpc.add_AdminServicer_to_server(admin, server)
    health_pb2_grpc.add_HealthServicer_to_server(_Health(admin), server)
    health = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
    reflection.enable_server_reflection((SERVICE, health, reflection.SERVICE_NAME), server)
    return server


async def _refuse(context: Any, error: ApiError) -> Never:
    await context.abort(error.kind.grpc_status, error.message, ((DETAILS, status_of(error)),))
    raise AssertionError("abort raises")


def _known(kind: type[Reply], told: dict[str, Any]) -> Reply:
    """A message of what is told and what its type has."""
    names = [field.name for field in kind.DESCRIPTOR.fields]  # type: ignore[attr-defined]
    return kind(**{name: told[name] for name in names})


def _struct(told: dict[str, Any]) -> Struct:
    return json_format.Parse(json.dumps(told), Struct())
