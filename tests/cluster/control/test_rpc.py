"""The admin API over gRPC: real Operations, with a fleet that only says what it is."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from diptych.cluster.config import ClusterConfig
from diptych.cluster.control import http, rpc
from diptych.cluster.control.cluster_operations import ClusterOperations
from diptych.cluster.control.operations import Operations
from diptych.cluster.gateway.edge import listen
from diptych.cluster.telemetry import ControlTally
from diptych.protos import admin_pb2 as pb
from diptych.protos import admin_pb2_grpc
from google.protobuf.json_format import MessageToDict
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.cluster.control.test_status import ROUTER, WORKERS, seen
from tests.support.certificate import certify
from tests.support.live import free_port

LIMITS = (("grpc.max_allowed_incoming_connections", 4), ("grpc.server_handshake_timeout_ms", 300))
DECISION = {"prefill": "prefill/a", "decode": "decode/a", "ttft_s": 0.25, "refused": None}


class Fleet:
    """Plane and pools in one: workers that do as they are told."""

    def __init__(self) -> None:
        self.hello = SimpleNamespace(name="control/a")
        self.steered: list[tuple[str, str, bool]] = []
        self.sizes: list[dict[str, int]] = []

    async def inspect(self) -> tuple[dict, list[dict]]:
        return ROUTER, WORKERS

    async def observe(self) -> dict:
        return seen()

    async def resize(self, counts: dict[str, int]) -> None:
        self.sizes.append(counts)

    async def check(self, counts: dict[str, int]) -> None: ...

    async def steer(self, worker: str, role: str, hand_over: bool) -> dict:
        self.steered.append((worker, role, hand_over))
        return {}

    async def explain(self, request: str) -> list[dict]:
        return [DECISION] if request == "known" else []


@asynccontextmanager
async def listening(fleet: Fleet, **settings: Any) -> AsyncIterator[tuple[grpc.aio.Channel, Any]]:
    control = {"grpc_port": free_port(), **settings}
    config = ClusterConfig.model_validate({"control": control})
    plane: Any = fleet
    model: Any = SimpleNamespace(
        name="demo", operations=Operations(config, plane, pool_scaler=fleet, tally=ControlTally())
    )
    operations = ClusterOperations(config)
    operations.add(model)
    admin = rpc.AdminService(operations, http.AdminGuard(config.control))
    server = await rpc.listen(admin, config.control)
    address, cert = f"127.0.0.1:{config.control.grpc_port}", settings.get("tls_cert")
    given = grpc.ssl_channel_credentials(Path(cert).read_bytes()) if cert else None
    connect = grpc.aio.secure_channel if given else grpc.aio.insecure_channel
    try:
        async with connect(*((address, given) if given else (address,))) as channel:  # type: ignore
            yield channel, admin_pb2_grpc.AdminStub(channel)
    finally:
        await server.stop(None)


def with_admin(
    work: Callable[[Any], Coroutine[Any, Any, None]], fleet: Fleet | None = None, **settings: Any
) -> None:
    async def run() -> None:
        async with listening(fleet or Fleet(), **settings) as (_, admin):
            await work(admin)

    asyncio.run(run())


async def refused(call: Any) -> tuple[grpc.StatusCode, str, str]:
    """Status, reason and sentence of a call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    trailing = dict(caught.value.trailing_metadata())
    status = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info) and info.domain == "diptych"
    assert status.message == caught.value.details()
    return caught.value.code(), info.reason, caught.value.details()


def test_status_is_typed_and_whole() -> None:
    async def work(admin: Any) -> None:
        told = await admin.Status(pb.StatusRequest())
        assert (told.state, told.model, list(told.missing)) == ("healthy", "demo", [])
        assert told.pools["decode"].target == told.pools["decode"].ready == 2
        assert [one.id for one in told.replicas] == ["prefill/a", "decode/a", "decode/b"]
        assert (told.replicas[0].role, told.replicas[0].jobs) == ("prefill", 4)
        whole = MessageToDict(told.cluster)
        assert whole["requests"]["running"] == 4 and whole["pools"]["prefill"]["itl_p95_ms"] is None

    with_admin(work)


def test_orders_are_carried_out_said_and_undone() -> None:
    fleet = Fleet()

    async def work(admin: Any) -> None:
        dry = await admin.Scale(pb.ScaleRequest(decode=3, dry_run=True))
        assert dry.dry_run and not fleet.sizes and dry.undo == "diptych scale decode=2"
        told = await admin.Scale(pb.ScaleRequest(decode=3))
        assert fleet.sizes == [{"decode": 3}] and told.says == "decode 2 -> 3"
        assert [(one.before, one.after) for one in told.changes] == [(2, 3)]
        drained = await admin.Drain(pb.DrainRequest(replica="decode/a", hand_over=True))
        assert dict(drained.before) == {"decode/a": "decode"}
        await admin.Undrain(pb.UndrainRequest(replica="decode/a"))
        await admin.Flip(pb.FlipRequest(replica="decode/b", to="prefill"))
        assert fleet.steered == [
            ("decode/a", "", True),
            ("decode/a", "decode", False),
            ("decode/b", "prefill", True),
        ]

    with_admin(work, fleet)


def test_what_may_not_be_is_refused_by_the_table_of_errors() -> None:
    fleet = Fleet()

    async def work(admin: Any) -> None:
        code, reason, message = await refused(admin.Drain(pb.DrainRequest(replica="prefill/a")))
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "refused")
        assert "nobody else works as prefill" in message
        asked = admin.Flip(pb.FlipRequest(replica="x", to="prefill"))
        assert (await refused(asked))[:2] == (grpc.StatusCode.NOT_FOUND, "not_found")
        for wrong in (pb.ScaleRequest(), pb.ScaleRequest(prefill=4096)):
            assert (await refused(admin.Scale(wrong)))[0] is grpc.StatusCode.INVALID_ARGUMENT
        assert not fleet.steered and not fleet.sizes
        await admin.Drain(pb.DrainRequest(replica="prefill/a", force=True))
        assert fleet.steered == [("prefill/a", "", False)]

    with_admin(work, fleet)


def test_a_request_is_explained() -> None:
    async def work(admin: Any) -> None:
        told = await admin.Explain(pb.ExplainRequest(request_id="known"))
        assert [MessageToDict(one) for one in told.decisions] == [DECISION]
        unknown = admin.Explain(pb.ExplainRequest(request_id="unknown"))
        assert (await refused(unknown))[0] is grpc.StatusCode.NOT_FOUND

    with_admin(work)


async def test_it_has_a_key_of_its_own_and_tls(tmp_path: Path) -> None:
    cert, private = certify(tmp_path)
    key = tmp_path / "admin"
    key.write_text("word\n")
    fleet = Fleet()

    files = {"key_file": str(key), "tls_cert": str(cert), "tls_key": str(private)}
    async with listening(fleet, **files) as (channel, admin):
        for given in ((), (("authorization", "Bearer words"),)):
            asked = admin.Scale(pb.ScaleRequest(decode=3), metadata=given)
            assert (await refused(asked))[:2] == (grpc.StatusCode.UNAUTHENTICATED, "bad_key")
        assert not fleet.sizes
        right = (("authorization", "Bearer word"),)
        assert (await admin.Status(pb.StatusRequest(), metadata=right)).state == "healthy"
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", rpc.SERVICE):
            asked = health_pb2.HealthCheckRequest(service=name)
            assert (await health.Check(asked)).status == health_pb2.HealthCheckResponse.SERVING
        unknown = health.Check(health_pb2.HealthCheckRequest(service="x"))
        assert (await refused(unknown))[0] is grpc.StatusCode.NOT_FOUND


async def test_reflection_names_its_services() -> None:
    async with listening(Fleet()) as (channel, _):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        [told] = [one async for one in stub.ServerReflectionInfo(iter([asked]))]
        names = {one.name for one in told.list_services_response.service}
        assert {rpc.SERVICE, "grpc.health.v1.Health"} <= names


async def test_it_waits_for_the_port_of_its_predecessor() -> None:
    fleet, port = Fleet(), free_port()
    before = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    before.add_insecure_port(f"127.0.0.1:{port}")
    await before.start()
    ending = asyncio.get_running_loop().call_later(
        0.3, lambda: asyncio.ensure_future(before.stop(None))
    )
    async with listening(fleet, grpc_port=port) as (_, admin):
        assert (await admin.Status(pb.StatusRequest())).state == "healthy"
    ending.cancel()


def test_how_many_may_connect_follows_from_the_files_that_may_be_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The limit may be another one than when the module was imported."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (16, 16))

    async def test() -> None:
        port = free_port()
        async with listening(Fleet(), grpc_port=port):
            strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
            reads = [asyncio.ensure_future(reader.read()) for reader, _ in strangers]
            hung_up, open_reads = await asyncio.wait(reads, timeout=3)  # before any handshake's end
            assert len(hung_up) == 16 and len(open_reads) == 4
            await asyncio.gather(*hung_up, return_exceptions=True)
            for _, writer in strangers:
                writer.transport.abort()
            await asyncio.gather(*open_reads, return_exceptions=True)

    asyncio.run(asyncio.wait_for(test(), 60))


def test_connections_without_a_word_are_bounded_in_number_and_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rpc, "connection_limits", lambda: LIMITS)

    async def test() -> None:
        port = free_port()
        async with listening(Fleet(), grpc_port=port):
            strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
            for reader, _ in strangers:  # the last ones are hung up on at once, the others in time
                with contextlib.suppress(ConnectionError):
                    await reader.read()
            for _, writer in strangers:
                writer.close()
        async with listening(Fleet(), grpc_port=port) as (_, admin):
            assert (await admin.Status(pb.StatusRequest())).cluster

    asyncio.run(asyncio.wait_for(test(), 60))


@pytest.mark.parametrize("said", [b"", b"GET /health HTTP/1.1\r\nhost: c\r\nx-a: "])
def test_the_admin_http_server_hangs_up_on_headers_that_do_not_end(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listen, "HEADERS_TIMEOUT_S", 0.2)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("no request came")

    async def test() -> None:
        settings = ClusterConfig.model_validate({"control": {"port": free_port()}}).control
        server = http.AdminHttpServer(application, settings)
        await server.start()
        for _ in range(1000):
            if server._uvicorn.started:
                break
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection("127.0.0.1", settings.port)
        writer.write(said)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        await server.stop()

    asyncio.run(asyncio.wait_for(test(), 60))
