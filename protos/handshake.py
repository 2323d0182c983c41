"""How two ends of a connection prove that they know the cluster's secret without saying it.

    listener -> dialler   Challenge(a)
    dialler -> listener   Hello(name, kind, b, HMAC(secret, "dial", a, b, name, kind, protocol),
                                protocol)
    listener -> dialler   Welcome(HMAC(secret, "listen", a, b))

The `secret` of these proofs is the listener's own. `secret_of_listener` makes it from the cluster's
secret and the listener's name. For frames that is the address. For KV over sockets of ours (TCP and
shared memory; NIXL has connections of its own, which prove nothing) it is the name of the *agent*, a
worker's end of the transport. A proof for one listener is worthless at any other, so a false listener
cannot pass it on.

The listener proves itself last, and only to a dialler that has proved to know the secret.
HMAC is HMAC-SHA256 (RFC 2104) over the parts, each behind its length. `a` and `b` are random, so
that a proof is good for one connection. What follows is neither encrypted nor signed: an attacker
who can change packets on the way can still read it, and take a connection over.

`DiallerHandshake` and `ListenerHandshake` take and return messages, without their lengths, and do
no I/O. `cluster/wire/handshake.py` carries them out for frames, `kv_transfer/transports/stream.py`
for KV.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from .frames import PROTOCOL, Challenge, Hello, Welcome

HANDSHAKE_BYTES_MAX = 4096  #: The largest size of a handshake's message.
#: A listener hangs up on a caller that has proved nothing for so long; a dialler waits as long.
HANDSHAKE_TIMEOUT_S = 5.0
#: At most so many callers of one listener may have proved nothing yet; when one more comes, the
#: listener hangs up on the oldest. A flood keeps a peer out only if it opens so many connections
#: while the peer's handshake goes on. Peers that dial at once would keep each other out likewise,
#: so the limit is far above the number of peers that a cluster has. It is also below the number of
#: files that a process may open.
UNPROVED_CALLERS_MAX = 512
NONCE_BYTES = 16  #: Of `a` and `b`; 128 random bits never come twice.
LENGTH = struct.Struct(">I")  #: Stands in front of each message.
_encode = msgspec.msgpack.Encoder().encode
Message = TypeVar("Message", Challenge, Hello, Welcome)


class HandshakeRefused(ConnectionError):
    """The other end does not know the secret or does not speak this protocol.

    It is also raised for bytes that are not the expected message, and for a message too large.
    """


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """What a dialling process says of itself, and the secret that it proves to know.

    `DiallerHandshake` proves `secret` as it is, so it must get an identity with the secret of the
    listener that is dialled. `cluster/wire/connection.py`'s `dial` takes an identity with the
    cluster's secret, and replaces that by the listener's.
    """

    name: str  #: By which the listener knows this peer, and tells it from the others.
    kind: str  #: gateway | worker | control | kv
    secret: str = field(repr=False)  #: Of the listener; for `dial`, the cluster's.


class DiallerHandshake:
    """The side of the end that dials: `answer` the Challenge, then `conclude` with the Welcome."""

    def __init__(self, identity: PeerIdentity) -> None:
        """`identity` has the secret of the listener (`secret_of_listener`)."""
        self._identity = identity
        self._expected_proof = b""  #: Of the Welcome; empty before `answer`.

    def answer(self, challenge_message: bytes) -> bytes:
        """Return the Hello for a Challenge. Raises HandshakeRefused."""
        challenge = _decoded(challenge_message, Challenge)
        identity = self._identity
        own_nonce = secrets.token_bytes(NONCE_BYTES)
        # The proof covers the Hello's other fields, so it is made from a Hello without one.
        unproved = Hello(name=identity.name, kind=identity.kind, nonce=own_nonce, proof=b"")
        proof = dialler_proof(identity.secret, challenge.nonce, unproved)
        self._expected_proof = listener_proof(identity.secret, challenge.nonce, own_nonce)
        return _encode(msgspec.structs.replace(unproved, proof=proof))

    def conclude(self, welcome_message: bytes) -> None:
        """Check the Welcome. Raises HandshakeRefused if its proof is not that of the secret."""
        welcome = _decoded(welcome_message, Welcome)
        if not hmac.compare_digest(welcome.proof, self._expected_proof):
            raise HandshakeRefused("who answers does not know the cluster's secret")


class ListenerHandshake:
    """The side of the end that was dialled: send the `challenge`, then `admit` the Hello.

    Each is good for one connection.
    """

    def __init__(self, secret: str) -> None:
        """`secret` is this listener's own (`secret_of_listener`)."""
        self._secret = secret
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        #: What the dialler says of itself; None until that is proved.
        self.hello: Hello | None = None

    def challenge(self) -> bytes:
        """Return the Challenge."""
        return _encode(Challenge(self._nonce))

    def admit(self, hello_message: bytes) -> bytes:
        """Return the Welcome for a Hello.

        Raises HandshakeRefused if the dialler does not know the secret, or speaks another protocol.
        """
        hello = _decoded(hello_message, Hello)
        if not hmac.compare_digest(hello.proof, dialler_proof(self._secret, self._nonce, hello)):
            raise HandshakeRefused(f"{hello.name[:80]!r} does not know the cluster's secret")
        # Only after the proof, which covers the protocol: the error names what the peer speaks.
        if hello.protocol != PROTOCOL:
            raise HandshakeRefused(f"{hello.name} speaks protocol {hello.protocol}")
        self.hello = hello
        return _encode(Welcome(listener_proof(self._secret, self._nonce, hello.nonce)))


def with_length(message: bytes) -> bytes:
    """Return what travels: the message behind its length."""
    return LENGTH.pack(len(message)) + message


def message_size(header: bytes | memoryview) -> int:
    """Return how many bytes the message behind `header` has. A header is `LENGTH.size` bytes.

    Raises HandshakeRefused above `HANDSHAKE_BYTES_MAX`.
    """
    size: int = LENGTH.unpack(header)[0]
    if size > HANDSHAKE_BYTES_MAX:
        raise HandshakeRefused(f"{size} bytes where a message of a handshake was expected")
    return size


def secret_of_listener(secret: str, kind: str, name: str) -> str:
    """Return the secret of one listener, made from `secret`, which is the cluster's.

    `kind` and `name` are "kv" and the agent's name, or "frames" and the address. A proof of this
    secret is worth nothing to other listeners, whose secrets differ.
    """
    return _hmac(secret, [b"listener", kind.encode(), name.encode()]).hex()


def dialler_proof(secret: str, listener_nonce: bytes, hello: Hello) -> bytes:
    """Return the proof for `hello`, whose own `proof` field is ignored.

    The proof has 32 bytes, and covers all other fields of `hello` and the listener's nonce.
    """
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


def listener_proof(secret: str, listener_nonce: bytes, dialler_nonce: bytes) -> bytes:
    """Return the proof for the Welcome: 32 bytes."""
    return _hmac(secret, [b"listen", listener_nonce, dialler_nonce])


def _hmac(secret: str, parts: list[bytes]) -> bytes:
    # With their lengths, so that no other parts join to the same bytes.
    return hmac.digest(secret.encode(), b"".join(with_length(part) for part in parts), "sha256")


def _decoded(data: bytes, message_type: type[Message]) -> Message:
    """Return the message that the other end sent. Raises HandshakeRefused if it is another."""
    try:
        return msgspec.msgpack.decode(data, type=message_type)
    # RecursionError: the decoder also goes into the values of fields that the message lacks.
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise HandshakeRefused(f"what came is no {message_type.__name__}") from None
