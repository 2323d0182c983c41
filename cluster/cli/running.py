"""Which clusters run on this machine: `serve` leaves a note of each, and commands read them.

A note is a file with the cluster's addresses, in a folder that only this user can enter. A `serve`
that was killed leaves its note behind; the note names its process and when that began, so that it
is recognised as stale, also if another process has the number now.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

NOTE_SUFFIX = ".json"
NOTE_LIMIT_BYTES = 4096  #: A larger file is no note of ours.


class RunningCluster(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster that `diptych serve` runs here."""

    pid: int  #: Of `diptych serve`.
    began: int  #: When that process began, in the kernel's ticks.
    model: str
    http: str  #: The gateway's URL.
    admin: str  #: Control's URL.


def runtime_folder() -> Path:
    """Return the folder of this user's notes, which may not be there yet."""
    session_folder = os.environ.get("XDG_RUNTIME_DIR")
    if session_folder and Path(session_folder).is_dir():
        return Path(session_folder) / "diptych"
    return Path("/tmp") / f"diptych-{os.getuid()}"


@contextlib.contextmanager
def noted(model: str, http: str, admin: str) -> Iterator[None]:
    """Note that this process runs a cluster, for as long as the context lasts.

    A cluster whose note cannot be written runs all the same: commands then need its address.
    """
    pid = os.getpid()
    note = RunningCluster(pid=pid, began=_began(pid) or 0, model=model, http=http, admin=admin)
    file = runtime_folder() / f"{pid}{NOTE_SUFFIX}"
    with contextlib.suppress(OSError):
        _write(file, msgspec.json.encode(note))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


def _write(file: Path, content: bytes) -> None:
    """Write the file so that nobody else reads it. Raises OSError."""
    file.parent.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(file.parent):
        raise PermissionError(f"{file.parent} is not this user's alone")
    # A link, or an older note of a process with this number, must not be written through.
    file.unlink(missing_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)


def running_clusters() -> list[RunningCluster]:
    """Return the clusters of this user that run here, by their process numbers.

    Notes of processes that have ended are deleted.
    """
    folder = runtime_folder()
    if not _is_private(folder):
        return []
    found = []
    for file in folder.glob(f"*{NOTE_SUFFIX}"):
        note = _read(file)
        if note is None:
            continue
        if _began(note.pid) == note.began:
            found.append(note)
            continue
        with contextlib.suppress(OSError):
            file.unlink()
    return sorted(found, key=lambda note: note.pid)


def _read(file: Path) -> RunningCluster | None:
    """Return what the file notes, or None if it is no note of ours."""
    try:
        with file.open("rb") as stream:
            return msgspec.json.decode(stream.read(NOTE_LIMIT_BYTES), type=RunningCluster)
    except (OSError, msgspec.DecodeError):
        return None


def _is_private(folder: Path) -> bool:
    """Return whether the folder is this user's, and nobody else can enter it.

    In /tmp anybody could have made it, to lead commands and their keys elsewhere.
    """
    try:
        status = folder.lstat()
    except OSError:
        return False
    is_open = status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not is_open


def _began(pid: int) -> int | None:
    """Return when a process began, in the kernel's ticks; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # Behind the name, which may hold spaces and brackets, are the fields from the third one on;
    # the 22nd is the start.
    fields = text.rpartition(")")[2].split()
    return int(fields[19])
