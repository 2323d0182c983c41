"""API keys: who may use a gateway, in which classes, and how much.

A key reads `dk_<id>_<secret>`. The id is public. The file of keys has only the SHA-256 of the whole
key, which is enough because the secret is 192 random bits and no password.

Life of a key: `add_key` writes it to the file and returns its text, the only time that the text is
seen. Gateways look at the file once a second and read it again when it has changed. `revoke_key`
takes the key out. The file is always replaced as a whole, by renaming another file over it. A file
that became unreadable changes nothing: the keys that were read last stay valid, and the log says
so.
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
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ....protos import frames
from ..errors import ApiError
from .key_limits import KeyLimiter

log = logging.getLogger(__name__)

FILE_CHECK_INTERVAL_S = 1.0  #: When requests come, the file is looked at once in this time.
ID_BYTES = 4  #: Random bytes of an id; an id that is taken is drawn again.
ID_CHARS = 2 * ID_BYTES  #: In hex.
SECRET_BYTES = 24  #: The 192 random bits of a key's secret.
KEY_CHARS_MAX = 200  #: A longer text is never a key, and is not even split.
#: Of keys that are in no file: the configuration gives their hashes.
GIVEN_KEY_TENANT = "default"
#: Compared in place of the hash of an unknown id, so that comparing takes as long as for a known
#: one.
UNKNOWN_KEY_SHA256 = "0" * 64
#: Plain enough to stand in headers and metrics.
KeyWord = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]


class KeyFileError(Exception):
    """The key file, or a change that is asked of it, is not valid; the message says what."""


class ApiKey(BaseModel):
    """One key of the file. Its limits are those of all gateways together; None is no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    id: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  #: Of the whole key.
    tenant: KeyWord  #: Who uses the key; several keys may have the same one.
    slo_class: KeyWord | None = None  #: Of requests that name no class.
    classes: tuple[KeyWord, ...] = ()  #: Classes that a request may name. Empty: all.
    #: Answers that may be asked for in a minute, and as many at once after a quiet minute.
    requests_per_min: Annotated[int, Field(ge=1)] | None = None
    #: Calls that may be open at a time, and answers that may be generated at a time.
    concurrency: Annotated[int, Field(ge=1)] | None = None
    #: Keys of one group share the prefix cache. None: the key shares it with its tenant only.
    cache_group: KeyWord | None = None


class Keyring(BaseModel):
    """All keys of a file."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    keys: tuple[ApiKey, ...] = ()

    @model_validator(mode="after")
    def _check_ids(self) -> Keyring:
        if len({key.id for key in self.keys}) < len(self.keys):
            raise ValueError("two keys have the same id")
        return self

    def find(self, key_text: str) -> ApiKey | None:
        """Return the key whose text this is, or None.

        A wrong text of a known id, which is public, is hashed and compared just as one of an
        unknown id: the comparison tells nothing of the secret.
        """
        key_id = _id_of(key_text)
        key = next((key for key in self.keys if key.id == key_id), None)
        expected_sha256 = key.sha256 if key else UNKNOWN_KEY_SHA256
        if not hmac.compare_digest(sha256_of(key_text), expected_sha256):
            return None
        return key


class FileVersion(NamedTuple):
    """Identifies a state of the key file: two versions differ if the file has changed between."""

    modified_ns: int
    size: int
    inode: int


class AccessControl:
    """Finds out whose key a request has, and holds the key to its limits.

    Without a `path` and `key_hashes` no request needs a key. Keys of `key_hashes` (SHA-256) have no
    limits; their text may be anything of at most `KEY_CHARS_MAX` characters. Raises KeyFileError if
    the file cannot be read at the start. `now` is `time.monotonic()`, or was when the request
    arrived.
    """

    def __init__(self, path: Path | None, key_hashes: Iterable[str] = ()) -> None:
        self._path = path
        self._given_keys = [
            ApiKey(id=sha256[:ID_CHARS], sha256=sha256, tenant=GIVEN_KEY_TENANT)
            for sha256 in key_hashes
        ]
        self._limiter = KeyLimiter()
        self._checked_at_s = -math.inf  #: When the file was looked at last.
        self._read_error = ""  #: Why the file could not be read at the last look.
        self._keyring = Keyring()
        self._file_version: FileVersion | None = None  #: Of the file that was read.
        if path:
            # Before reading: if the file changes in between, the next look reads it again.
            self._file_version = _file_version(path)
            self._keyring = read_keys(path)

    def authenticate(
        self, authorization: str | None, api_key: str | None, now: float
    ) -> ApiKey | None:
        """Return the key of a request by its headers, or None if no key is needed.

        `api_key` is the header x-api-key and goes before `authorization`, which must be "Bearer".
        Raises ApiError without a key, or with one that is not valid.
        """
        if self._path is None and not self._given_keys:
            return None
        if self._path is not None:
            self._read_if_changed(self._path, now)
        scheme, _, bearer_text = (authorization or "").partition(" ")
        key_text = api_key or ""
        if not key_text and scheme.lower() == "bearer":
            key_text = bearer_text.strip()
        if not key_text:
            message = "an API key is needed: authorization: Bearer dk_..., or x-api-key: dk_..."
            raise ApiError("bad_key", message)
        key = self._keyring.find(key_text) or self._find_given(key_text)
        if key is None:
            raise ApiError("bad_key", "this API key is not known")
        return key

    def _find_given(self, key_text: str) -> ApiKey | None:
        """Return the key whose text this is, of those without a file, or None.

        The text is compared with all of them, in equal times.
        """
        if len(key_text) > KEY_CHARS_MAX:
            return None
        sha256 = sha256_of(key_text)
        matching_keys = [key for key in self._given_keys if hmac.compare_digest(key.sha256, sha256)]
        return matching_keys[0] if matching_keys else None

    @contextlib.contextmanager
    def admit(self, key: ApiKey | None, now: float) -> Iterator[None]:
        """Count a call as open for as long as the context is.

        Raises ApiError above one of the key's limits.
        """
        if key is None:
            yield
            return
        self._limiter.open_call(key, now)
        try:
            yield
        finally:
            self._limiter.close_call(key)

    @contextlib.contextmanager
    def generating(
        self, key: ApiKey | None, answers: int, *, call_answers: int = 0
    ) -> Iterator[None]:
        """Count answers as generated for as long as the context is open.

        `call_answers` are those of the whole call, where its prompts are counted one by one. Raises
        ApiError above one of the key's limits.
        """
        if key is None:
            yield
            return
        self._limiter.begin_answers(key, answers, time.monotonic(), call_answers=call_answers)
        try:
            yield
        finally:
            self._limiter.end_answers(key, answers)

    def charge_prompts(
        self, key: ApiKey | None, further_prompts: int, *, call_answers: int
    ) -> None:
        """Count the prompts of a call but its first, each as a call. Raises ApiError at a limit.

        `call_answers` are those of all its prompts.
        """
        if key is not None and further_prompts:
            now = time.monotonic()
            self._limiter.charge_prompts(key, further_prompts, now, call_answers=call_answers)

    def check_answers(self, key: ApiKey | None, answers: int) -> None:
        """Raise ApiError if a call asks for more answers than its key may ever have."""
        if key is None:
            return
        limits = [limit for limit in (key.concurrency, key.requests_per_min) if limit]
        if limits and answers > min(limits):
            message = f"this key may ask for {min(limits)} answers in a call, not for {answers}"
            raise ApiError("forbidden", message)

    # ---- the other gateways ----------------------------------------------------------------------

    def usage(self, now: float) -> dict[str, frames.KeyUse]:
        """Return what the keys use at this gateway now, by their ids."""
        return self._limiter.report(now)

    def take_usage(self, gateway: str, usage: Mapping[str, frames.KeyUse]) -> None:
        """Take note of what the keys use at another gateway; empty: nothing any more."""
        self._limiter.take_report(gateway, usage)

    def share_between(self, gateways: int) -> None:
        """Let so many gateways share what is left of each key's limits from now on.

        It holds until `share_between` is called again.
        """
        self._limiter.begin_interval(gateways)

    def _read_if_changed(self, path: Path, now: float) -> None:
        """Read the file again if it has changed, at most once in `FILE_CHECK_INTERVAL_S`.

        An error leaves the keys as they are, and is logged.
        """
        if now - self._checked_at_s < FILE_CHECK_INTERVAL_S:
            return
        self._checked_at_s = now
        try:
            file_version = _file_version(path)
            if file_version == self._file_version:
                self._read_error = ""  # it is readable again, and what it was
                return
            self._keyring = read_keys(path)
        except KeyFileError as error:
            if str(error) != self._read_error:  # logged once, though every look finds it
                log.error("API keys: %s; those read before go on", error)
            self._read_error = str(error)
            return
        self._file_version = file_version
        self._read_error = ""
        self._limiter.forget_all_but({key.id for key in self._keyring.keys})
        log.info("API keys: %d of %s", len(self._keyring.keys), path)


def read_keys(path: Path) -> Keyring:
    """Read the file of keys; an empty file has none. Raises KeyFileError."""
    try:
        tree = yaml.safe_load(path.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise KeyFileError(f"cannot read {path}: {' '.join(str(error).split())}") from None
    try:
        return Keyring.model_validate(tree)
    except ValidationError as error:
        finding = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, finding["loc"])) or "the file"
        raise KeyFileError(f"{path}: {where}: {finding['msg'].lower()}") from None


def add_key(
    path: Path,
    tenant: str,
    slo_class: str | None = None,
    classes: tuple[str, ...] = (),
    requests_per_min: int | None = None,
    concurrency: int | None = None,
    cache_group: str | None = None,
) -> tuple[ApiKey, str]:
    """Add a key to the file, which is made if it is missing. The fields are those of `ApiKey`.

    Returns the key and its text, which is kept nowhere. Raises KeyFileError, and OSError where the
    file's folder is missing or may not be written.
    """
    with _changing_keys(path) as keys:
        used_ids = {key.id for key in keys}
        key_id = secrets.token_hex(ID_BYTES)
        while key_id in used_ids:
            key_id = secrets.token_hex(ID_BYTES)
        key_text = f"dk_{key_id}_{secrets.token_hex(SECRET_BYTES)}"
        try:
            key = ApiKey(
                id=key_id,
                sha256=sha256_of(key_text),
                tenant=tenant,
                slo_class=slo_class,
                classes=classes,
                requests_per_min=requests_per_min,
                concurrency=concurrency,
                cache_group=cache_group,
            )
        except ValidationError as error:
            finding = error.errors(include_url=False)[0]
            raise KeyFileError(f"{finding['loc'][0]}: {finding['msg'].lower()}") from None
        keys.append(key)
    return key, key_text


def revoke_key(path: Path, key_id: str) -> ApiKey:
    """Take a key out of the file and return it.

    Raises as `add_key` does, also for an unknown id.
    """
    with _changing_keys(path) as keys:
        for key in keys:
            if key.id == key_id:
                keys.remove(key)
                return key
        raise KeyFileError(f"{path} has no key {key_id}")


@contextlib.contextmanager
def _changing_keys(path: Path) -> Iterator[list[ApiKey]]:
    """Give the keys of a file to change, and write the file behind that.

    A lock on the folder lets one process at a time do so. An error leaves the file as it was. Of a
    link the file behind it is changed.
    """
    path = Path(os.path.realpath(path))
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        keys = list(read_keys(path).keys) if path.exists() else []
        yield keys
        entries = [key.model_dump(mode="json", exclude_defaults=True) for key in keys]
        _replace_file(path, yaml.safe_dump({"keys": entries}, sort_keys=False))
    finally:
        os.close(folder)  # and with it the lock


def _replace_file(path: Path, text: str) -> None:
    """Write all of a file or nothing of it.

    A new file is readable by its owner only; one that exists keeps its owner, group and mode.
    Raises KeyFileError if this process may not give the file to them.
    """
    status = path.stat() if path.exists() else None
    descriptor, temporary_name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as temporary_file:
            temporary_file.write(text)
            temporary_file.flush()
            os.fsync(temporary_file.fileno())
        if status is not None:
            _give_to_owner(path, temporary_name, status)
        os.replace(temporary_name, path)
    except BaseException:
        os.unlink(temporary_name)
        raise


def _give_to_owner(path: Path, temporary_name: str, status: os.stat_result) -> None:
    """Give the new file the old one's owner, group and mode. Raises KeyFileError.

    Otherwise the gateway, which another user may have started, could read the file no more: it
    would go on with the keys that it has, a revoked one among them.
    """
    try:
        os.chown(temporary_name, status.st_uid, status.st_gid)
    except PermissionError:
        owner = f"the user {status.st_uid} and the group {status.st_gid}"
        raise KeyFileError(f"{path} belongs to {owner}: only that user may change it") from None
    os.chmod(temporary_name, status.st_mode & 0o777)  # behind chown, which may clear bits of it


def _file_version(path: Path) -> FileVersion:
    """Return the file's version. Raises KeyFileError.

    Links are followed, because Kubernetes changes a file by changing a link.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise KeyFileError(f"cannot read {path}: {error.strerror}") from None
    return FileVersion(status.st_mtime_ns, status.st_size, status.st_ino)


def _id_of(key_text: str) -> str:
    """Return the id that a key's text has; empty if the text is not that of a key."""
    if len(key_text) > KEY_CHARS_MAX:  # a header may be long
        return ""
    parts = key_text.split("_")
    if len(parts) != 3 or parts[0] != "dk":
        return ""
    return parts[1]


def sha256_of(text: str) -> str:
    """Return the SHA-256 of a key's text, in hex."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
