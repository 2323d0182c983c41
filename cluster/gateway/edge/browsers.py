"""Which pages in a browser may use a gateway (pure).

A browser sends requests for any page that its user has open, and reaches what its user reaches. A
page that has no key can do nothing where a key is needed. Where none is needed two headers, which
no page can forge, tell whose page asks:

* `Origin` is the page's own. It must be absent (no page asks), the gateway's own, of this machine,
  or listed in `gateway.origins`.
* `Host` is what the page calls the gateway. A page can have its own domain lead to the gateway's
  address (DNS rebinding), and is of the same origin then. So a gateway answers to addresses, and to
  the names in `gateway.hosts`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from ...config import LOOPBACK, GatewaySettings
from ..errors import ApiError

#: Origins of pages that this machine serves; the whole origin must match.
LOOPBACK_ORIGINS = (
    r"https?://(localhost|[a-z0-9-]+\.localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]{1,5})?"
)
ANY = "*"  #: In `gateway.hosts` any name, in `gateway.origins` any page.
REMEMBERED_ADDRESSES = 256  #: Reading one costs 5 us, and a client sends the same each time.
NAME_CHARS_MAX = 80  #: So much of a header is repeated in an error.


class BrowserPolicy:
    """Which requests of browsers a gateway answers, and which pages may read answers (CORS).

    Where keys are needed, `check` lets every request pass: the key decides.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._checks_pages = not settings.asks_for_keys
        self._hosts = frozenset(host.lower() for host in settings.hosts)
        #: True if no other machine reaches the gateway, so that only loopback names are its own.
        #: Serve's proxies listen on addresses of their own, whatever `settings.host` says.
        self._loopback_only = settings.listen == "gateway" and settings.host in LOOPBACK
        if settings.origins is None:  # the default
            self._origins: tuple[str, ...] = (ANY,) if settings.asks_for_keys else ()
        else:
            self._origins = settings.origins

    def cors_arguments(self) -> Mapping[str, Any] | None:
        """Return the arguments of Starlette's CORS middleware.

        None: only the gateway's own pages read answers, which needs no middleware.
        """
        if self._checks_pages:
            return {"allow_origins": self._origins, "allow_origin_regex": LOOPBACK_ORIGINS}
        if not self._origins:
            return None
        return {"allow_origins": self._origins}

    def check(self, host: str | None, origin: str | None) -> None:
        """Raise ApiError for a request that a foreign page may have sent.

        `host` and `origin` are the headers; None: the request has none.
        """
        if not self._checks_pages:
            return
        if not self._is_own_name(host or ""):
            message = (
                f"host {(host or '')[:NAME_CHARS_MAX]!r} is none of this gateway's names: "
                "list it in gateway.hosts, or let clients need keys"
            )
            raise ApiError("forbidden", message)
        if origin is not None and not self._may_ask(origin, host or ""):
            message = (
                f"pages of {origin[:NAME_CHARS_MAX]!r} may not use this gateway: "
                "list it in gateway.origins, or let clients need keys"
            )
            raise ApiError("forbidden", message)

    def _is_own_name(self, host: str) -> bool:
        """Return whether `host` is a name of this gateway, to which no stranger's domain leads.

        A request without a Host header has no such name.
        """
        name = _without_port(host).lower().rstrip(".")  # "example.com." is the same domain
        if not name:
            return False
        if ANY in self._hosts or name in self._hosts or _is_loopback_name(name):
            return True
        # "*.example.com" is all names in that domain, but not example.com itself.
        if any(pattern[:2] == "*." and name.endswith(pattern[1:]) for pattern in self._hosts):
            return True
        # A page whose domain is made to lead here sends the domain's name, never an address.
        return not self._loopback_only and _address_of(name) is not None

    def _may_ask(self, origin: str, host: str) -> bool:
        """Return whether a page is listed, the gateway's own, or of this machine.

        The origin "null", of pages from files, is none of these unless it is listed.
        """
        if origin in self._origins:
            return True
        try:
            page = urlsplit(origin)
        except ValueError:
            return False
        if page.scheme not in ("http", "https") or not page.netloc:
            return False
        is_own_page = page.netloc.lower() == host.lower()
        return is_own_page or _is_loopback_name(_without_port(page.netloc).lower())


def _without_port(host: str) -> str:
    """Return the name or address of "host:port" or "host", IPv6 without its brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


@lru_cache(REMEMBERED_ADDRESSES)
def _address_of(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that `name` writes; None if `name` is no address. Looks nothing up."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _is_loopback_name(name: str) -> bool:
    """Return whether a name or address always leads to the machine that looks it up."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    address = _address_of(name)
    return address is not None and address.is_loopback
