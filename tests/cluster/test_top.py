"""`diptych top` and `diptych config`, without a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from diptych.cluster.cli import app
from diptych.cluster.cli.board import Board, cell, sparkline
from diptych.cluster.cli.common import AdminClient
from diptych.cluster.cli.screen import Top
from typer.testing import CliRunner

from tests.cluster.control.test_status import ROUTER, WORKERS, told, worker

TRANSFER = {"transport": "nixl", "bytes_sent": 3 << 20, "bytes_received": 0, "failures": {"x": 2}}
DECISION: dict[str, Any] = {
    "key": ["req-1~ab12", 0],
    "prefill": "prefill/a",
    "decode": "decode/b",
    "note": "",
    "prompt_tokens": 900,
    "hit_tokens": 640,
    "ttft_s": 0.287,
    "observed": {"ttft_ms": 301.2},
}


def cluster() -> dict[str, Any]:
    return told([{**one, "transfer": TRANSFER} for one in WORKERS], ROUTER)


def test_a_cell_says_role_state_pool_and_work() -> None:
    assert cell(worker("decode/ab12cd34")) == "D● decode/ab12cd34    ██░░░░░░   4"
    assert cell(worker("decode/a", "prefill", state="flipping")).startswith("p↻ decode/a")


def test_queues_are_drawn_against_the_longest() -> None:
    assert sparkline([0, 4, 8]) == " ▄█" and sparkline([0, 0]) == "  "


def test_the_board_shows_pools_replicas_transfers_and_decisions() -> None:
    board = Board()
    board.add(cluster())
    text = "\n".join(board.lines(cluster(), [DECISION]))
    for part in ("HEALTHY", "goodput  ████", "60.0%", "D● decode/a", "nixl", "3.0", "312 ms"):
        assert part in text
    assert (
        "prefill/a -> decode/b" in text and "900 tokens, 640 cached  TTFT 287 ms, was 301" in text
    )


class Offline(Top):
    """Asks a function instead of a cluster."""

    up = True

    def _http_client(self) -> httpx.AsyncClient:
        def answer(request: httpx.Request) -> httpx.Response:
            if not self.up:
                raise httpx.ConnectError("refused")
            if request.url.path.endswith("decisions"):
                return httpx.Response(200, json={"decisions": [DECISION]})
            return httpx.Response(200, json=cluster())

        return httpx.AsyncClient(base_url="http://x", transport=httpx.MockTransport(answer))


async def test_the_screen_shows_the_cluster_takes_orders_and_survives_its_absence() -> None:
    screen = Offline(AdminClient("http://127.0.0.1:1", ""), 60.0)
    async with screen.run_test(size=(140, 40)) as pilot:
        await screen.workers.wait_for_complete()
        assert "prefill/a -> decode/b" in str(screen.query_one("#board").render())
        await pilot.press("question_mark")
        assert "flip REPLICA" in str(screen.query_one("#message").render())
        await pilot.press("s", *"prefill=x", "enter")
        await screen.workers.wait_for_complete()
        assert "expected prefill=N" in str(screen.query_one("#message").render())
        screen.up = False
        screen.update_board()
        await screen.workers.wait_for_complete()
        assert "no answer: refused" in str(screen.query_one("#message").render())


# ---- config --------------------------------------------------------------------------------------


def config(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["config", *arguments])
    return done.exit_code, done.output


def test_every_value_says_where_it_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("slo: {ttft_ms: 300}\n")
    code, text = config("show", str(file), "--set", "router.queue_max=7")
    origins = dict(line.split("  # ") for line in text.splitlines())
    said = {key.split(":")[0]: origin for key, origin in origins.items()}
    assert code == 0 and said["slo.ttft_ms"] == str(file)
    assert (said["router.queue_max"], said["slo.itl_ms"]) == ("--set", "default")
    assert "secret" not in said


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("slo: {ttft_ms: 300}", 0, "is right"),
        ("slo: {tfft: 1}", 1, "slo.tfft: extra inputs are not permitted"),
        ("a: [", 1, "cannot read"),
    ],
)
def test_a_file_is_judged(tmp_path: Path, text: str, code: int, says: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    got, told = config("validate", str(file))
    assert got == code and says in told


def test_two_files_are_compared_with_their_defaults(tmp_path: Path) -> None:
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text("pools: {decode: {replicas: 1}}")  # the default
    new.write_text("pools: {decode: {replicas: 3}}")
    assert config("diff", str(old), str(old)) == (0, "")
    assert config("diff", str(old), str(new)) == (1, "pools.decode.replicas: 1 -> 3\n")


def test_values_of_models_come_from_their_entry_or_the_top_level(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "models: {tiny: /models/tiny, meta.llama: /models/llama, "
        "qwen2.5: {model: {path: /m}, slo: {ttft_ms: 9}}}\n"
        "slo: {itl_ms: 50}\n"
    )
    code, text = config("show", str(file), "--set", "slo.ttft_ms=7")
    assert code == 0, text
    lines = dict(line.split("  # ") for line in text.splitlines())
    said = {
        key.split(":")[0]: (key.split(": ")[1].strip(), origin) for key, origin in lines.items()
    }
    assert said["models.tiny.model.path"] == ('"/models/tiny"', str(file))
    assert said["models.meta.llama.model.path"] == ('"/models/llama"', str(file))
    assert said["models.meta.llama.pools.decode.replicas"] == ("1", "default")
    assert said["models.tiny.slo.itl_ms"] == ("50.0", str(file))
    assert said["models.tiny.slo.ttft_ms"] == ("7.0", "--set")
    assert said["models.qwen2.5.slo.ttft_ms"] == ("9.0", str(file))
    assert said["models.tiny.pools.decode.replicas"] == ("1", "default")


def test_the_running_configuration_says_of_which_model_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def get(_: AdminClient, path: str) -> dict[str, Any]:
        asked.append(path)
        return {"models": {"a": {}, "b/c": {}}} if path.endswith("cluster") else {"silence_s": 3}

    monkeypatch.setattr(AdminClient, "get", get)
    code, text = config("show")
    assert code == 0 and text.startswith("# a, one of a, b/c: --model chooses another\nsilence_s")
    code, text = config("show", "--model", "b/c")
    assert code == 0 and text.startswith("# b/c, one of a, b/c")
    assert asked[-1] == "/admin/v1/config?model=b%2Fc"
    code, text = config("show", "--model", "a", "--set", "silence_s=1")
    assert code == 2 and "a file shows all of its models" in text


def test_the_board_shows_the_pools_of_every_model() -> None:
    one, other = cluster(), cluster()
    for pool in one["pools"].values():
        pool["queue"] = 0
    workers = [{**worker, "model": name} for name in "ab" for worker in one["workers"]]
    several = {**one, "models": {"a": one, "b": other}, "workers": workers}
    board = Board()
    board.add(several)
    lines = board.lines(several, [])
    for name in ("a", "b"):
        (row,) = [line for line in lines if line.startswith(f"{name}/decode ")]
        assert ("█" in row) == (name == "b")
        assert any(f"{name}/decode/a " in line for line in lines)
    assert sum("HEALTHY" in line for line in lines) == 2
    assert "… starting" in "\n".join(lines)
