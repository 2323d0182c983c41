"""Which URLs lead to this machine: no proxy of the environment can reach them."""

from __future__ import annotations

import ipaddress

import httpx


def is_this_machine(url: str) -> bool:
    """Return whether the URL's host is this machine by a loopback address, or by localhost.

    A proxy would look for it on the machine of its own. Raises httpx.InvalidURL.
    """
    host = httpx.URL(url).host
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified
