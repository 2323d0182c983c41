"""`diptych scale`, `drain` and `flip`: what they send, what they say, what they refuse to guess."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from diptych.cluster.cli import app, common, roles
from typer.testing import CliRunner


class Control:
    """Answers in place of a cluster, and remembers what it was asked."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers, self.posted = answers, list[tuple[str, dict]]()

    def ask(self, _: common.AdminClient, method: str, path: str, **given: Any) -> Any:
        if method == "POST":
            self.posted.append((path, given["json"]))
        return self.answers[path]


def run(monkeypatch: pytest.MonkeyPatch, answers: dict, *words: str) -> tuple[int, str, Control]:
    control = Control(answers)
    monkeypatch.setattr(
        common.AdminClient, "_ask", lambda self, *args, **given: control.ask(self, *args, **given)
    )
    done = CliRunner().invoke(app, list(words))
    return done.exit_code, done.output, control


def status(workers: list[dict], has_router: bool = True, **others: dict) -> dict[str, Any]:
    """Return a status of a model m with these workers, and of other models."""
    own = {"router": {"waiting": 0} if has_router else None, "workers": workers}
    models = {"m": own, **others}
    joined = [worker for model in models.values() for worker in model["workers"]]
    return {**own, "workers": joined, "models": models}


SCALED = {"says": "decode 1 -> 2", "undo": "diptych scale decode=1", "dry_run": False}


def test_scale_sends_the_counts_and_names_the_undo(monkeypatch: pytest.MonkeyPatch) -> None:
    code, said, control = run(monkeypatch, {"/admin/v1/pools:scale": SCALED}, "scale", "decode=2")
    assert (code, said) == (0, "decode 1 -> 2\nundo: diptych scale decode=1\n")
    assert control.posted == [("/admin/v1/pools:scale", {"decode": 2, "dry_run": False})]


@pytest.mark.parametrize(
    "words",
    [
        ("scale", "decode"),
        ("scale", "decode=-1"),
        ("scale", "gateway=2"),
        ("flip", "decode/a", "--to", "both"),
        ("drain",),
        ("drain", "decode/a", "--self"),
    ],
)
def test_a_wrong_order_is_a_usage_error_and_is_not_sent(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    code, _, control = run(monkeypatch, {}, *words)
    assert code == 2 and control.posted == []


def test_a_flip_to_the_role_that_it_has_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"/admin/v1/replicas/decode/a:flip": {"before": {"decode/a": "decode"}}}
    code, said, _ = run(monkeypatch, told, "flip", "decode/a", "--to", "decode")
    assert (code, said) == (0, "decode/a works as decode already\n")


@pytest.mark.parametrize(
    "words",
    [
        ("status", "--admin", "http://[::1"),
        ("status", "--admin", "http://a..b:80"),
        ("status", "--token", "\u00e9"),
        ("drain", "decode/\tx", "--admin", "http://127.0.0.1:1"),
        ("explain", "a\nb", "--admin", "http://127.0.0.1:1"),
        ("chat", "--endpoint", "http://[::1", "hi"),
    ],
)
def test_what_cannot_be_asked_ends_with_a_sentence(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 1 and done.output.startswith("diptych: no "), done.output


def test_drain_self_goes_on_behind_a_worker_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["decode/a", "decode/b"]
    workers = [{"id": name, "address": "127.0.0.1:7"} for name in names]
    control = Control({"/admin/v1/cluster": status(workers)})

    def ask(_: common.AdminClient, method: str, path: str, **given: Any) -> Any:
        if path == "/admin/v1/replicas/decode/a:drain":
            common.fail("decode/a: it is leaving")
        control.answers["/admin/v1/replicas/decode/b:drain"] = {"replicas": ["decode/b"]}
        return control.ask(_, method, path, **given)

    monkeypatch.setattr(common.AdminClient, "_ask", ask)
    done = CliRunner().invoke(app, ["drain", "--self"])
    assert done.exit_code == 1 and "drain decode/b" in done.output
    assert "it is leaving" in done.output


def test_drain_self_hands_over_what_is_on_this_machine_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, there = {"id": "decode/a", "address": "127.0.0.1:7"}, {"id": "decode/b"}
    there |= {"address": "192.0.2.1:7"}  # RFC 5737: nobody's
    answers = {"/admin/v1/cluster": status([here, there])}
    answers["/admin/v1/replicas/decode/a:drain"] = {"replicas": ["decode/a"]}
    code, said, control = run(monkeypatch, answers, "drain", "--self")
    assert code == 0 and said.startswith("drain decode/a\n")
    body = {"force": True, "hand_over": True, "dry_run": False}
    assert control.posted == [("/admin/v1/replicas/decode/a:drain", body)]


def test_drain_self_waits_for_a_router_that_knows_the_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = {"id": "decode/a", "address": "127.0.0.1:7"}
    statuses = [status([], has_router=False), status([], has_router=False), status([here])]
    control = Control({"/admin/v1/replicas/decode/a:drain": {"replicas": ["decode/a"]}})

    def ask(_: common.AdminClient, method: str, path: str, **given: Any) -> Any:
        return (
            statuses.pop(0) if path.endswith("/cluster") else control.ask(_, method, path, **given)
        )

    monkeypatch.setattr(common.AdminClient, "_ask", ask)
    done = CliRunner().invoke(app, ["drain", "--self"])
    assert done.exit_code == 0 and done.output.startswith("drain decode/a\n")
    assert statuses == []


def test_drain_self_fails_where_no_router_says_who_works_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(roles, "ROUTER_WAIT_S", 0.3)
    here = {"id": "decode/a", "address": "127.0.0.1:7"}
    other = {"router": {"waiting": 0}, "workers": [here]}
    answers = {"/admin/v1/cluster": status([], has_router=False, other=other)}
    answers["/admin/v1/replicas/decode/a:drain"] = {"replicas": ["decode/a"]}
    code, said, control = run(monkeypatch, answers, "drain", "--self")
    assert code == 1 and "no router of m answers" in said
    assert len(control.posted) == 1, "the other model's workers are drained all the same"


# ---- waiting -------------------------------------------------------------------------------------

BUSY = {"id": "decode/a", "jobs": 2, "state": "ready", "role": "decode"}
NO_ROUTER = status([], has_router=False)


def wait_through(
    monkeypatch: pytest.MonkeyPatch, statuses: list[dict], *words: str
) -> tuple[int, str, int]:
    """Run a command with --wait; return its code, its output, and how many statuses it looked at.

    The last status is that of all later looks.
    """
    looks: list[dict] = []

    def look() -> dict:
        looks.append(statuses[min(len(looks), len(statuses) - 1)])
        return looks[-1]

    monkeypatch.setattr(common, "POLL_INTERVAL_S", 0.001)
    monkeypatch.setattr(
        common.AdminClient,
        "_remaining",
        lambda self, describe_remaining: describe_remaining(look()),
    )
    path = "/admin/v1/replicas/decode/a"
    answers = {f"{path}:drain": {"replicas": ["decode/a"]}}
    answers[f"{path}:flip"] = {"before": {"decode/a": "decode"}}
    code, said, _ = run(monkeypatch, answers, *words, "--wait")
    return code, said, len(looks)


def test_a_worker_that_is_missing_for_a_moment_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, idle = status([BUSY]), status([{**BUSY, "jobs": 0}])
    unseen = [NO_ROUTER] * 40 + [status([])] * 3  # Control was restarted; then it did not answer
    statuses = [busy, *unseen, busy, *unseen, idle]
    code, said, looks = wait_through(monkeypatch, statuses, "drain", "decode/a")
    assert code == 0 and "idle after" in said and looks == len(statuses)
    assert "decode/a: 2 left" in said and "decode/a: not in sight" in said


def test_a_worker_that_stays_away_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = status([], other={"router": None, "workers": []})
    code, said, looks = wait_through(monkeypatch, [status([BUSY]), gone], "drain", "decode/a")
    assert code == 0 and "idle after" in said
    assert (looks - 1) * 0.2 >= 3, "3 s of looks, at the interval that users have"


def test_a_flip_waits_for_a_worker_that_is_missing_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flipping = status([{**BUSY, "state": "flipping"}])
    done = status([{**BUSY, "role": "prefill"}])
    words = ("flip", "decode/a", "--to", "prefill")
    statuses = [flipping, NO_ROUTER, NO_ROUTER, status([]), done]
    code, said, looks = wait_through(monkeypatch, statuses, *words)
    assert code == 0 and "done after" in said and looks == len(statuses)
    code, said, _ = wait_through(monkeypatch, [flipping, status([])], *words)
    assert code == 1 and "decode/a did not become prefill" in said
    refused = status([{**BUSY, "note": "no room"}])
    code, said, _ = wait_through(monkeypatch, [flipping, refused], *words)
    assert code == 1 and "no room" in said


# ---- addresses -----------------------------------------------------------------------------------


def test_addresses_of_this_machine_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert roles._is_local("127.0.0.1") and not roles._is_local("192.0.2.1")
    # As where net.ipv4.ip_nonlocal_bind is 1: a socket can be bound to any address.
    monkeypatch.setattr(socket.socket, "bind", lambda self, address: None)
    assert roles._is_local("127.0.0.1") and not roles._is_local("192.0.2.1")
    assert roles._is_local("127.0.0.2") and not roles._is_local("no.such.host.invalid")
    assert roles._is_local("[::1]") or not socket.has_ipv6
