"""The handshake of `protos/handshake.py` on an asyncio connection.

Neither function has a timeout or closes the connection after an error: the caller does both.
"""

from __future__ import annotations

import asyncio

from ...protos.frames import Hello
from ...protos.handshake import (
    LENGTH,
    DiallerHandshake,
    ListenerHandshake,
    PeerIdentity,
    message_size,
    with_length,
)


async def greet(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, identity: PeerIdentity
) -> None:
    """Do the dialler's side of the handshake.

    `identity` has the secret of the listener (`secret_of_listener`). Raises ConnectionError if the
    listener does not know the secret, sends another message or too long a one, or hangs up.
    """
    handshake = DiallerHandshake(identity)
    # No `drain`, here and in `admit`: messages of a handshake fit into any buffer.
    challenge = await _receive(reader, "Challenge")
    writer.write(with_length(handshake.answer(challenge)))
    handshake.conclude(await _receive(reader, "Welcome"))


async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: str) -> Hello:
    """Do the listener's side of the handshake; return what the dialler says of itself.

    Raises ConnectionError if the dialler does not know the secret, speaks another protocol, sends
    another message or too long a one, or hangs up.
    """
    handshake = ListenerHandshake(secret)
    writer.write(with_length(handshake.challenge()))
    welcome = handshake.admit(await _receive(reader, "Hello"))
    writer.write(with_length(welcome))
    assert handshake.hello is not None  # for mypy: `ListenerHandshake.admit` has set it
    return handshake.hello


async def _receive(reader: asyncio.StreamReader, name: str) -> bytes:
    """Read one message. `name` is the name of the expected message, for the error.

    Raises ConnectionError if the other end hangs up, or announces too long a message.
    """
    try:
        header = await reader.readexactly(LENGTH.size)
        return await reader.readexactly(message_size(header))
    except asyncio.IncompleteReadError:
        raise ConnectionError(f"the other end hung up before its {name}") from None
