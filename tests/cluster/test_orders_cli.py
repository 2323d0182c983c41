"""`diptych scale`, `drain` and `flip`: what they send, what they say, what they refuse to guess."""

from __future__ import annotations

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
    control = Control({"/admin/v1/replicas": {"replicas": workers}})

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
    answers = {"/admin/v1/replicas": {"replicas": [here, there]}}
    answers["/admin/v1/replicas/decode/a:drain"] = {"replicas": ["decode/a"]}
    code, said, control = run(monkeypatch, answers, "drain", "--self")
    assert code == 0 and said.startswith("drain decode/a\n")
    body = {"force": True, "hand_over": True, "dry_run": False}
    assert control.posted == [("/admin/v1/replicas/decode/a:drain", body)]


def test_addresses_of_this_machine_are_known() -> None:
    assert roles._is_local("127.0.0.1") and not roles._is_local("192.0.2.1")
