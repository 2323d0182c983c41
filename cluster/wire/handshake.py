"""How two ends of a connection prove that they know the cluster's secret without saying it.

    listener -> dialler   Challenge(a)
    dialler -> listener   Hello(name, kind, b, HMAC(secret, "dial", a, b, name, kind, protocol))
    listener -> dialler   Welcome(HMAC(secret, "listen", a, b))

HMAC is HMAC-SHA256 (RFC 2104) over the parts, each behind its length; `a` and `b` are random, so a
proof is good for one connection. What follows is neither encrypted nor signed: who can change
packets on the way can still read it, and take a connection over.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import struct
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from ...protos.frames import PROTOCOL, Challenge, Hello, Welcome

HELLO_MAX = 4096  #: bytes of a frame before its sender is known
NONCE_BYTES = 16
_LENGTH = struct.Struct(">I")
_encode = msgspec.msgpack.Encoder().encode
Frame = TypeVar("Frame")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who dials."""

    name: str
    kind: str  #: gateway | worker | control
    secret: str = field(repr=False)


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, caller: Caller) -> None:
    """The dialler's side. Raises ConnectionError."""
    theirs = (await _receive(reader, Challenge)).nonce
    mine = secrets.token_bytes(NONCE_BYTES)
    proof = _dialled(caller.secret, theirs, mine, caller.name, caller.kind, PROTOCOL)
    _send(writer, Hello(caller.name, caller.kind, mine, proof))
    welcome = await _receive(reader, Welcome)
    if not hmac.compare_digest(welcome.proof, _proof(caller.secret, b"listen", theirs, mine)):
        raise ConnectionError("who answers does not know the cluster's secret")


async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: str) -> Hello:
    """The listener's side. Raises ConnectionError."""
    mine = secrets.token_bytes(NONCE_BYTES)
    _send(writer, Challenge(mine))
    hello = await _receive(reader, Hello)
    known = _dialled(secret, mine, hello.nonce, hello.name, hello.kind, hello.protocol)
    if not hmac.compare_digest(hello.proof, known):
        raise ConnectionError(f"{hello.name[:80]!r} does not know the cluster's secret")
    if hello.protocol != PROTOCOL:
        raise ConnectionError(f"{hello.name} speaks protocol {hello.protocol}")
    _send(writer, Welcome(_proof(secret, b"listen", mine, hello.nonce)))
    return hello


def _dialled(secret: str, a: bytes, b: bytes, name: str, kind: str, protocol: int) -> bytes:
    return _proof(secret, b"dial", a, b, name.encode(), kind.encode(), str(protocol).encode())


def _proof(secret: str, *parts: bytes) -> bytes:
    message = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
    return hmac.digest(secret.encode(), message, "sha256")


def _send(writer: asyncio.StreamWriter, frame: Any) -> None:
    data = _encode(frame)
    writer.write(_LENGTH.pack(len(data)) + data)


async def _receive(reader: asyncio.StreamReader, kind: type[Frame]) -> Frame:
    try:
        (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if size > HELLO_MAX:
            raise ConnectionError(f"{size} bytes where a {kind.__name__} was expected")
        return msgspec.msgpack.decode(await reader.readexactly(size), type=kind)
    except asyncio.IncompleteReadError:
        raise ConnectionError(f"the other end hung up before its {kind.__name__}") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ConnectionError(f"what came is no {kind.__name__}") from None
