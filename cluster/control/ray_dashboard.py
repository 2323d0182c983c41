"""Two routes of Ray's dashboard, with which `serve status` and `serve config` work.

`diptych serve` starts no dashboard: the dashboard's 11 processes take 206 MiB and 0.6 to 1.4 s of
the start (2-core VM, `ray.init` with and without the dashboard). These routes only read. Where Ray
asks for its token (`ray_asks_for_token`), the guard of the admin API (http.py) lets a request come
here only with that token (`token_refusal`); elsewhere the rule of the admin API's routes holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..applications import serve_details
from ..gateway.errors import ApiError

VERSION_PATH = "/api/ray/version"
APPLICATIONS_PATH = "/api/serve/applications/"
PATHS = (VERSION_PATH, APPLICATIONS_PATH)  #: The paths of these routes.
SERVE_TIMEOUT_S = 10.0  #: Serve's controller has so long to answer.


def routes() -> list[Route]:
    """Return the two routes, for the admin API's application."""
    return [Route(VERSION_PATH, _version), Route(APPLICATIONS_PATH, _applications)]


def token_refusal(headers: Mapping[str, str]) -> ApiError | None:
    """Return why these headers do not prove that the caller has Ray's token, or None if they do."""
    from ray._private.authentication.authentication_utils import validate_request_token

    if validate_request_token(headers.get("authorization", "")):
        return None
    message = (
        "Ray's token is missing or wrong: send the one of the Ray that the cluster runs on; if "
        "`diptych serve` started that Ray, it printed the token's path"
    )
    return ApiError("bad_key", message)


def ray_asks_for_token() -> bool:
    """Return whether this process's Ray authenticates by token.

    It does so in all processes of a cluster, or in none.
    """
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    enabled: bool = is_token_auth_enabled()
    return enabled


async def _version(_: Request) -> Response:
    """Return what Ray's clients compare with their own version before they ask for more."""
    import ray
    from ray.dashboard.modules.version import CURRENT_VERSION

    session = ray.get_runtime_context().get_session_name()
    return JSONResponse(
        {
            "version": CURRENT_VERSION,
            "ray_version": ray.__version__,
            "ray_commit": ray.__commit__,
            "session_name": session,
        }
    )


async def _applications(_: Request) -> Response:
    """Return the details of the Serve instance, as its controller gives them.

    Raises ApiError if the controller does not answer in `SERVE_TIMEOUT_S`.
    """
    try:
        async with asyncio.timeout(SERVE_TIMEOUT_S):
            return JSONResponse(await serve_details())
    except TimeoutError:
        raise ApiError("no_capacity", "Serve's controller does not answer") from None
