"""API keys: what the file says, who is let in, how much of it."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import threading
from pathlib import Path

import pytest
from click.testing import Result
from diptych.cluster.cli import app
from diptych.cluster.gateway.edge import keys
from diptych.cluster.gateway.edge.keys import (
    AccessControl,
    ApiKey,
    KeyFileError,
    add_key,
    read_keys,
    revoke_key,
)
from diptych.cluster.gateway.errors import ApiError
from typer.testing import CliRunner


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


def refused(door: AccessControl, given: str, now: float = 0.0) -> str:
    with pytest.raises(ApiError) as error:
        door.authenticate(f"Bearer {given}" if given else None, None, now)
    return error.value.reason


def test_a_key_opens_the_door_by_either_header_and_only_its_hash_is_kept(file: Path) -> None:
    key, text = add_key(file, "acme")
    door = AccessControl(file)
    assert door.authenticate(f"Bearer {text}", None, 0.0) == key
    assert door.authenticate(f"bearer {text}", None, 0.0) == key
    assert door.authenticate(None, text, 0.0) == key
    assert text.split("_")[2] not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_every_other_text_is_refused(file: Path) -> None:
    _, text = add_key(file, "acme")
    _, other = add_key(file, "other")
    door = AccessControl(file)
    spliced = f"dk_{text.split('_')[1]}_{other.split('_')[2]}"
    wrong = [
        "",
        "x",
        text[:-1],
        text + "0",
        text.upper(),
        spliced,
        "dk__",
        "é_\ud800_b",
        "_" * 9999,
    ]
    assert {refused(door, one) for one in wrong} == {"bad_key"}
    assert refused(door, "") == "bad_key"


def test_without_a_file_nobody_needs_a_key() -> None:
    assert AccessControl(None).authenticate(None, None, 0.0) is None


def test_a_changed_file_is_read_again_within_a_second(file: Path) -> None:
    first, text = add_key(file, "acme")
    door = AccessControl(file)
    door.authenticate(f"Bearer {text}", None, 10.0)
    _, late = add_key(file, "late")
    revoke_key(file, first.id)
    assert door.authenticate(f"Bearer {text}", None, 10.5) == first  # not looked yet
    assert refused(door, text, 11.0) == "bad_key"
    assert door.authenticate(f"Bearer {late}", None, 11.0).tenant == "late"


def test_a_file_that_cannot_be_read_for_a_moment_is_read_later(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, text = add_key(file, "acme")
    door = AccessControl(file)
    revoke_key(file, first.id)

    def denied(path: Path) -> None:
        raise KeyFileError(f"cannot read {path}: permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(keys, "read_keys", denied)
        for now in (10.0, 20.0, 30.0):
            assert door.authenticate(f"Bearer {text}", None, now) == first
    assert caplog.text.count("permission denied") == 1
    assert refused(door, text, 40.0) == "bad_key"


def test_an_error_that_comes_again_is_logged_again(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, text = add_key(file, "acme")
    door = AccessControl(file)
    away = file.with_name("away.yaml")
    for now in (10.0, 20.0):
        file.rename(away)
        door.authenticate(f"Bearer {text}", None, now)
        away.rename(file)  # the same file as before
        door.authenticate(f"Bearer {text}", None, now + 5)
    assert caplog.text.count("those read before go on") == 2


def test_a_file_that_broke_or_vanished_changes_nothing(file: Path) -> None:
    key, text = add_key(file, "acme")
    door = AccessControl(file)
    file.write_text("keys: [{id: 12}]")
    assert door.authenticate(f"Bearer {text}", None, 10.0) == key
    file.unlink()
    assert door.authenticate(f"Bearer {text}", None, 20.0) == key
    file.write_text("keys: []")
    assert refused(door, text, 30.0) == "bad_key"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot read"),
        ("keys: [", "cannot read"),
        ("keys: 5", "keys"),
        ("kys: []", "kys"),
        ("keys: [{id: 0a0b0c0d, tenant: a}]", "keys.0.sha256: field required"),
        ("- 1", "valid dictionary"),
    ],
)
def test_a_file_that_is_wrong_at_start_is_refused_in_one_line(
    file: Path, text: str | None, says: str
) -> None:
    if text is not None:
        file.write_text(text)
    with pytest.raises(KeyFileError) as error:
        AccessControl(file)
    assert says in str(error.value) and "\n" not in str(error.value)


def a_key(**limits: int) -> ApiKey:
    return ApiKey(id="0a0b0c0d", sha256="0" * 64, tenant="acme", **limits)


def test_as_many_requests_a_minute_as_the_key_may_make() -> None:
    door, key = AccessControl(None), a_key(requests_per_min=3)
    for _ in range(3):
        with door.admit(key, 100.0):
            pass
    with pytest.raises(ApiError) as error, door.admit(key, 100.0):
        pass
    # a request is worth 60 / 3 = 20 s
    assert (error.value.reason, error.value.headers()) == ("rate_limited", {"retry-after": "20"})
    with pytest.raises(ApiError), door.admit(key, 119.0):
        pass
    with door.admit(key, 121.0):
        pass
    with pytest.raises(ApiError), door.admit(key, 121.5):
        pass


def test_as_many_requests_at_a_time_as_the_key_may_run_however_they_end() -> None:
    door, key = AccessControl(None), a_key(concurrency=1)
    with contextlib.suppress(ZeroDivisionError), door.admit(key, 0.0):
        with pytest.raises(ApiError) as error, door.admit(key, 0.0):
            pass
        assert error.value.reason == "rate_limited"
        raise ZeroDivisionError
    with door.admit(key, 0.0):
        pass


def test_an_unknown_id_is_compared_as_long_as_a_known_one(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, text = add_key(file, "acme")
    compared: list[tuple[int, int]] = []
    real = keys.hmac.compare_digest

    def compare(a: str, b: str) -> bool:
        compared.append((len(a), len(b)))
        return real(a, b)

    monkeypatch.setattr(keys.hmac, "compare_digest", compare)
    door = AccessControl(file)
    for one in (text[:-1] + "x", "dk_ffffffff_00", "nonsense"):
        assert refused(door, one) == "bad_key"
    assert compared == [(64, 64)] * 3


def test_writers_at_the_same_time_lose_no_key(file: Path) -> None:
    threads = [threading.Thread(target=add_key, args=(file, f"t{n}")) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key.tenant for key in read_keys(file).keys} == {f"t{n}" for n in range(8)}
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_change_keeps_the_mode_that_the_operator_gave_the_file(file: Path) -> None:
    add_key(file, "acme")
    file.chmod(0o640)
    add_key(file, "other")
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


def test_the_command_prints_a_key_once_lists_it_and_revokes_it(file: Path) -> None:
    def cli(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["keys", *arguments, "-f", str(file)])

    added = cli("add", "--tenant", "acme", "--class", "batch", "--rate", "60")
    text = added.stdout.strip()
    assert added.exit_code == 0, added.stderr
    key = AccessControl(file).authenticate(f"Bearer {text}", None, 0.0)
    assert key and (key.tenant, key.slo_class, key.requests_per_min) == ("acme", "batch", 60)
    listed = cli("list").stdout
    assert key.id in listed and "acme" in listed and text not in listed and key.sha256 not in listed
    assert cli("revoke", key.id).exit_code == 0
    again = cli("revoke", key.id)
    assert again.exit_code == 1 and "has no key" in again.stderr
    assert "tenant" in cli("add", "--tenant", "a b").stderr


# ---- the file is replaced ------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_changed_file_keeps_its_owner_and_mode(file: Path) -> None:
    key, _ = add_key(file, "acme")
    os.chown(file, 12345, 12346)
    file.chmod(0o640)
    revoke_key(file, key.id)
    status = file.stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (12345, 12346, 0o640)
    assert read_keys(file).keys == ()


def test_a_file_whose_owner_cannot_be_kept_stays_as_it_was(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, _ = add_key(file, "acme")

    def denied(path: str, uid: int, gid: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chown", denied)
    with pytest.raises(KeyFileError, match="belongs to the user "):
        revoke_key(file, key.id)
    assert read_keys(file).keys == (key,)
    assert list(file.parent.iterdir()) == [file], "nothing is left behind"


def test_behind_a_link_the_file_is_changed_and_the_link_stays(file: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere" / "keys.yaml"
    target.parent.mkdir()
    file.symlink_to("elsewhere/keys.yaml")
    key, _ = add_key(file, "acme")
    assert file.is_symlink() and read_keys(target).keys == (key,)
    revoke_key(file, key.id)
    assert file.is_symlink() and read_keys(target).keys == ()


# ---- the command ---------------------------------------------------------------------------------


def test_long_names_of_tenants_leave_the_columns_apart(file: Path) -> None:
    tenant = "t" * 40
    add_key(file, tenant, slo_class="interactive", classes=("interactive", "batch", "background"))
    add_key(file, "b", requests_per_min=600)
    lines = CliRunner().invoke(app, ["keys", "list", "-f", str(file)]).stdout.splitlines()
    assert [re.split("  +", line)[1:] for line in lines] == [
        ["TENANT", "CLASS", "MAY NAME", "PER MINUTE", "AT A TIME"],
        [tenant, "interactive", "interactive, batch, background", "-", "-"],
        ["b", "-", "all", "600", "-"],
    ]


def test_an_output_that_is_not_known_is_wrong_usage(file: Path) -> None:
    done = CliRunner().invoke(app, ["keys", "list", "-f", str(file), "-o", "yaml"])
    assert done.exit_code == 2 and done.stderr == "diptych: -o yaml: expected table or json\n"
