"""API keys: a file with their hashes, who may do what, and how much of it (pure but for the file).

A key reads `dk_<id>_<secret>`. The id is public; the file has only the SHA-256 of the whole key,
which is enough as the secret is 192 random bits and no password. The file is written whole (another
file is renamed over it) and read again by gateways when it changes. A file that became unreadable
changes nothing: the keys that were read last go on, and the log says so.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import logging
import math
import os
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..errors import ApiError

log = logging.getLogger(__name__)

LOOK_S = 1.0  #: between two looks at the file
SECRET_BYTES = 24
KEY_CHARS = 200  #: a longer one is none of ours
NOBODY = "0" * 64  #: compared for an unknown id, so that it takes as long as a known one
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]


class KeyFileError(Exception):
    """The key file is not what it should be; the message says where."""


class Key(BaseModel):
    """One key. Limits are of each gateway; None: no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    id: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    tenant: Name
    slo_class: Name | None = None  #: of requests that name none
    classes: tuple[Name, ...] = ()  #: that a request may name; empty: all
    requests_per_min: Annotated[int, Field(ge=1)] | None = None
    concurrency: Annotated[int, Field(ge=1)] | None = None


class Keyring(BaseModel):
    """All keys of a file."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    keys: tuple[Key, ...] = ()

    @model_validator(mode="after")
    def _differ(self) -> Keyring:
        if len({key.id for key in self.keys}) < len(self.keys):
            raise ValueError("two keys have the same id")
        return self

    def find(self, given: str) -> Key | None:
        """The key that `given` is. The comparison takes the same time for every wrong one."""
        parts = given.split("_") if len(given) <= KEY_CHARS else []
        named = parts[1] if len(parts) == 3 and parts[0] == "dk" else ""
        key = next((key for key in self.keys if key.id == named), None)
        same = hmac.compare_digest(_digest(given), key.sha256 if key else NOBODY)
        return key if same else None


@dataclass(slots=True)
class Account:
    """What one key has used: a bucket of `requests_per_min` that fills in a minute."""

    spent: float = 0.0  #: requests
    at: float = 0.0
    running: int = 0


class Accounts:
    """Limits of rate and concurrency, by key."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}

    def enter(self, key: Key, now: float) -> None:
        """Counts one more request, until `leave`. Raises ApiError."""
        account = self._accounts.setdefault(key.id, Account())
        if key.concurrency and account.running >= key.concurrency:
            message = f"this key has {account.running} requests running, its limit"
            raise ApiError("rate_limited", message)
        if key.requests_per_min:
            per_s = key.requests_per_min / 60
            account.spent = max(0.0, account.spent - (now - account.at) * per_s)
            account.at = now
            if account.spent + 1 > key.requests_per_min:
                wait = (account.spent + 1 - key.requests_per_min) / per_s
                message = f"this key may make {key.requests_per_min} requests a minute"
                raise ApiError("rate_limited", message, retry_after_s=math.ceil(wait))
            account.spent += 1
        account.running += 1

    def leave(self, key: Key) -> None:
        self._accounts[key.id].running -= 1

    def keep(self, ids: set[str]) -> None:
        """Forgets keys that are gone."""
        for gone in [i for i, a in self._accounts.items() if i not in ids and not a.running]:
            del self._accounts[gone]


class Door:
    """Who comes in. `path` None: everybody, without a key."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._accounts = Accounts()
        self._looked = -math.inf
        self._mark: tuple = ()  #: of the file that was read
        self._trouble = ""  #: why it could not be read the last time
        self._ring = Keyring()
        if path:  # a broken file is found at start
            self._mark = _mark(path)
            self._ring = read_keys(path)

    def check(self, authorization: str | None, api_key: str | None, now: float) -> Key | None:
        """The key of a request's headers; None: none is needed. Raises ApiError."""
        if self._path is None:
            return None
        self._look(self._path, now)
        scheme, _, bearer = (authorization or "").partition(" ")
        given = api_key or (bearer.strip() if scheme.lower() == "bearer" else "")
        if not given:
            message = "an API key is needed: authorization: Bearer dk_..., or x-api-key: dk_..."
            raise ApiError("bad_key", message)
        key = self._ring.find(given)
        if key is None:
            raise ApiError("bad_key", "this API key is not known")
        return key

    @contextlib.contextmanager
    def inside(self, key: Key | None, now: float) -> Iterator[None]:
        """For as long as a request runs. Raises ApiError over the key's limits."""
        if key is None:
            yield
            return
        self._accounts.enter(key, now)
        try:
            yield
        finally:
            self._accounts.leave(key)

    def _look(self, path: Path, now: float) -> None:
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        try:
            mark = _mark(path)
            if mark == self._mark:
                return
            self._ring = read_keys(path)
        except KeyFileError as error:
            if str(error) != self._trouble:  # it is read again at every look: said once
                log.error("API keys: %s; those read before go on", error)
            self._trouble = str(error)
            return
        self._mark, self._trouble = mark, ""
        self._accounts.keep({key.id for key in self._ring.keys})
        log.info("API keys: %d of %s", len(self._ring.keys), path)


def read_keys(path: Path) -> Keyring:
    """Raises KeyFileError."""
    try:
        tree = yaml.safe_load(path.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise KeyFileError(f"cannot read {path}: {' '.join(str(error).split())}") from None
    try:
        return Keyring.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise KeyFileError(f"{path}: {where}: {first['msg'].lower()}") from None


def add_key(
    path: Path,
    tenant: str,
    slo_class: str | None = None,
    classes: tuple[str, ...] = (),
    requests_per_min: int | None = None,
    concurrency: int | None = None,
) -> tuple[Key, str]:
    """Adds a key; returns it and its text, which is nowhere else. Raises KeyFileError."""
    with _changing(path) as keys:
        taken = {key.id for key in keys}
        name = next(i for i in iter(lambda: secrets.token_hex(4), "") if i not in taken)
        text = f"dk_{name}_{secrets.token_hex(SECRET_BYTES)}"
        try:
            key = Key(
                id=name,
                sha256=_digest(text),
                tenant=tenant,
                slo_class=slo_class,
                classes=classes,
                requests_per_min=requests_per_min,
                concurrency=concurrency,
            )
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise KeyFileError(f"{first['loc'][0]}: {first['msg'].lower()}") from None
        keys.append(key)
    return key, text


def revoke_key(path: Path, name: str) -> Key:
    """Takes a key out, by its id. Raises KeyFileError."""
    with _changing(path) as keys:
        found = next((key for key in keys if key.id == name), None)
        if found is None:
            raise KeyFileError(f"{path} has no key {name}")
        keys.remove(found)
    return found


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[list[Key]]:
    """The keys of a file, which is written anew afterwards; one who changes it at a time."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        keys = list(read_keys(path).keys) if path.exists() else []
        yield keys
        entries = [key.model_dump(mode="json", exclude_defaults=True) for key in keys]
        _replace(path, yaml.safe_dump({"keys": entries}, sort_keys=False))
    finally:
        os.close(folder)  # and the lock with it


def _replace(path: Path, text: str) -> None:
    """All of it or nothing, readable by the owner; a file that exists keeps its mode."""
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
    number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(number, "w") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _mark(path: Path) -> tuple:
    """Differs when the file does; follows links, as Kubernetes swaps them. Raises KeyFileError."""
    try:
        seen = path.stat()
    except OSError as error:
        raise KeyFileError(f"cannot read {path}: {error.strerror}") from None
    return seen.st_mtime_ns, seen.st_size, seen.st_ino


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
