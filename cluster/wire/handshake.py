"""How two ends of a connection prove that they know the cluster's secret without saying it.

    listener -> dialler   Challenge(a)
    dialler -> listener   Hello(name, kind, b, HMAC(secret, "dial", a, b, name, kind, protocol))
    listener -> dialler   Welcome(HMAC(secret, "listen", a, b))

HMAC is HMAC-SHA256 (RFC 2104) over the parts, each behind its length. `a` and `b` are random, so
that a proof is good for one connection. What follows is neither encrypted nor signed: an attacker
who can change packets on the way can still read it, and take a connection over.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import struct
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from ...protos.frames import PROTOCOL, Challenge, Hello, Welcome

HANDSHAKE_BYTES_MAX = 4096  #: Of a frame whose sender has proved nothing yet.
NONCE_BYTES = 16
_LENGTH = struct.Struct(">I")
_encode = msgspec.msgpack.Encoder().encode
Frame = TypeVar("Frame")


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """What a dialling process says of itself, and the secret that it proves to know."""

    name: str
    kind: str  #: gateway | worker | control
    secret: str = field(repr=False)


async def greet(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, identity: PeerIdentity
) -> None:
    """Do the dialler's side of the handshake.

    Raises ConnectionError if the listener does not know the secret, or hangs up.
    """
    challenge = await _receive(reader, Challenge)
    own_nonce = secrets.token_bytes(NONCE_BYTES)
    unproved = Hello(name=identity.name, kind=identity.kind, nonce=own_nonce, proof=b"")
    proof = _dialler_proof(identity.secret, challenge.nonce, unproved)
    _send(writer, msgspec.structs.replace(unproved, proof=proof))
    welcome = await _receive(reader, Welcome)
    expected_proof = _listener_proof(identity.secret, challenge.nonce, own_nonce)
    if not hmac.compare_digest(welcome.proof, expected_proof):
        raise ConnectionError("who answers does not know the cluster's secret")


async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: str) -> Hello:
    """Do the listener's side of the handshake; return what the dialler says of itself.

    Raises ConnectionError if the dialler does not know the secret, speaks another protocol, or
    hangs up.
    """
    own_nonce = secrets.token_bytes(NONCE_BYTES)
    _send(writer, Challenge(own_nonce))
    hello = await _receive(reader, Hello)
    if not hmac.compare_digest(hello.proof, _dialler_proof(secret, own_nonce, hello)):
        raise ConnectionError(f"{hello.name[:80]!r} does not know the cluster's secret")
    if hello.protocol != PROTOCOL:
        raise ConnectionError(f"{hello.name} speaks protocol {hello.protocol}")
    _send(writer, Welcome(_listener_proof(secret, own_nonce, hello.nonce)))
    return hello


def _dialler_proof(secret: str, listener_nonce: bytes, hello: Hello) -> bytes:
    return _hmac(
        secret,
        [
            b"dial",
            listener_nonce,
            hello.nonce,
            hello.name.encode(),
            hello.kind.encode(),
            str(hello.protocol).encode(),
        ],
    )


def _listener_proof(secret: str, listener_nonce: bytes, dialler_nonce: bytes) -> bytes:
    return _hmac(secret, [b"listen", listener_nonce, dialler_nonce])


def _hmac(secret: str, parts: list[bytes]) -> bytes:
    message = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
    return hmac.digest(secret.encode(), message, "sha256")


def _send(writer: asyncio.StreamWriter, frame: Challenge | Hello | Welcome) -> None:
    data = _encode(frame)
    writer.write(_LENGTH.pack(len(data)) + data)


async def _receive(reader: asyncio.StreamReader, frame_type: type[Frame]) -> Frame:
    """Read a frame of one type. Raises ConnectionError for anything else."""
    try:
        (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if size > HANDSHAKE_BYTES_MAX:
            raise ConnectionError(f"{size} bytes where a {frame_type.__name__} was expected")
        return msgspec.msgpack.decode(await reader.readexactly(size), type=frame_type)
    except asyncio.IncompleteReadError:
        raise ConnectionError(f"the other end hung up before its {frame_type.__name__}") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ConnectionError(f"what came is no {frame_type.__name__}") from None
