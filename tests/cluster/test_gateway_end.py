"""How a gateway ends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from diptych.cluster.gateway import gateway as gateway_module
from diptych.cluster.gateway.errors import ApiError
from diptych.cluster.gateway.gateway import Gateway
from diptych.cluster.gateway.service import GatewayService


class Service:
    """One whose requests the test ends."""

    def __init__(self) -> None:
        self.running = 1
        self.running_at_the_end: int | None = None
        self.refuses = False

    def refuse_requests(self) -> None:
        self.refuses = True

    async def end_requests(self) -> None:
        self.running_at_the_end = self.running

    async def close(self) -> None: ...


async def stop() -> None: ...


@pytest.mark.parametrize("ends_in_time", [True, False])
def test_running_answers_are_waited_for_where_serve_s_proxies_listen(
    ends_in_time: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not ends_in_time:
        monkeypatch.setattr(gateway_module, "DRAIN_S", gateway_module.CLOSE_S + 0.05)

    async def test() -> None:
        service = Service()
        gateway: Any = SimpleNamespace(
            _servers=[], service=service, _directory=SimpleNamespace(stop=stop)
        )
        ending = asyncio.ensure_future(Gateway._end(gateway))
        for _ in range(5):
            await asyncio.sleep(0)
        assert service.running_at_the_end is None and service.refuses
        if ends_in_time:
            service.running = 0
        await asyncio.wait_for(ending, 5)
        assert service.running_at_the_end == service.running

    asyncio.run(test())


def test_a_gateway_that_ends_refuses_new_requests() -> None:
    service: Any = SimpleNamespace(models={})
    GatewayService.refuse_requests(service)
    with pytest.raises(ApiError, match="shutting down") as refused:
        GatewayService.find(service, "")
    assert refused.value.reason == "draining"
