"""The report: self-contained, with its plots, rendered by a real browser; the command's edges."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from diptych.cluster.cli import app
from diptych.loadtests import plots, report
from diptych.loadtests.endpoint import EndpointFacts
from diptych.loadtests.outcomes import LoadOutcome
from diptych.loadtests.plan import LoadPlan
from diptych.loadtests.result import ClientCost, assemble
from typer.testing import CliRunner, Result

FACTS = EndpointFacts("http://<x>", "m", 4096, ("a", "b"), 3, True, True, "diptych")
ABOUT = {
    "started": "2026-11-21T10:00:00+00:00",
    "machine": {"cpu": "C", "cores": 2, "memory_gib": 4.0, "system": "Linux"},
    "commit": "abc",
    "versions": {"python": "3"},
}
PLOTS = (
    *("time to first token", "gaps between tokens", "goodput against offered rate"),
    *("met by prompt length, tenths", "timeline", "first token of each request"),
)


def run(seed: int = 0, **options: Any) -> dict[str, Any]:
    rng = random.Random(seed)
    plan = LoadPlan(load="ramp", rate="1-8", steps=3, duration=30.0, gate="goodput>=0.5", **options)
    found = []
    for number in range(200):
        at = number * 30 / 200
        gaps = [rng.expovariate(50) for _ in range(rng.randint(1, 40))]
        error = "500" if number % 50 == 0 else ""
        ttft = rng.expovariate(1.5)
        found.append(
            LoadOutcome(
                *(f"load-{number}", at, at + 0.001, int(at // 10), rng.randint(10, 900)),
                output_tokens=len(gaps) + 1,
                ttft_s=ttft,
                e2e_s=ttft + sum(gaps),
                gaps_s=gaps,
                error=error,
                lags_s=[1e-4],
            )
        )
    client = ClientCost({"gap_error_us": {"p50": 1.0, "p99": 9.0}}, {"local": (1.0, 30.0)})
    return json.loads(json.dumps(assemble(plan, FACTS, found, client, {"finished": 196}, ABOUT)))


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def page() -> str:
    """The report of one run."""
    return report.document(run())


def test_a_report_is_one_file_with_every_plot_and_figure(page: str) -> None:
    document = run()
    tags = Tags(page).seen
    assert sum(tag == "svg" for tag, _ in tags) == 1
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in tags}
    outside = [v for _, a in tags for k, v in a.items() if k in ("href", "src", "xlink:href")]
    assert all(value and value.startswith("#") for value in outside)
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))
    for title in PLOTS:
        assert title in text
    summary = document["summary"]
    assert f"{summary['goodput']:.1%} goodput" in text
    assert f"TTFT {summary['ttft_ms']['mean']:.1f} {summary['ttft_ms']['p50']:.1f}" in text
    assert "&lt;x&gt;" in page and "<x>" not in page, "what is not ours is escaped"
    assert "G90" in text and "seed=0" in text and "commit abc" in text
    assert report.document(document) == page, "equal run, equal file"


def test_a_report_of_nothing_still_renders() -> None:
    document = assemble(LoadPlan(), FACTS, [], ClientCost(), {}, ABOUT)
    assert "goodput" in report.document(document) and "goodput -" in report.text(document)


@pytest.mark.parametrize("last_s", [19.5, 24.0])
def test_rates_of_a_trace_are_of_the_time_in_which_it_came(tmp_path: Path, last_s: float) -> None:
    """A later turn may come behind the trace's own time, as it waits for the turn before."""
    file = tmp_path / "trace.jsonl"
    row = '{"timestamp": %d, "input_length": 9, "output_length": 8, "hash_ids": [1]}'
    file.write_text("\n".join(row % (500 * number) for number in range(40)))
    plan = LoadPlan(load="trace", trace=str(file), rate="2", duration=60.0)
    at = [*(number / 2 for number in range(39)), last_s]
    found = [LoadOutcome(f"{s}", s, s, 0, 9, ttft_s=0.1, e2e_s=0.1) for s in at]
    document = assemble(plan, FACTS, found, ClientCost(), {}, ABOUT)
    span_s = max(20.0, last_s)
    assert document["span_s"] == pytest.approx(span_s)
    assert document["summary"]["offered_per_s"] == pytest.approx(40 / span_s)
    assert f"the trace ended after {span_s:.1f} s of 60 s" in document["warnings"]
    whole = assemble(replace(plan, duration=15.0), FACTS, found[:30], ClientCost(), {}, ABOUT)
    assert whole["span_s"] == 15.0 and not any("trace" in text for text in whole["warnings"])


def test_over_grpc_answers_have_the_lengths_that_are_asked_for() -> None:
    plan = LoadPlan(grpc="127.0.0.1:9")
    document = assemble(plan, FACTS, [], ClientCost(), {}, ABOUT)
    assert document["endpoint"]["ignore_eos"] and not document["warnings"]


def test_two_runs_stand_side_by_side_with_what_differs() -> None:
    first, second = run(0), run(1, slo="ttft=1s,itl=200ms")
    page = report.comparison(first, second, ("before", "after"))
    assert "slo: ttft=2s,itl=200ms and ttft=1s,itl=200ms" in page
    assert "before every gap" in page and "after every gap" in page
    rows = {row[0]: row for row in report.compared(first, second, ("before", "after"))}
    a, b = first["summary"]["ttft_ms"]["p99"], second["summary"]["ttft_ms"]["p99"]
    assert rows["TTFT p99, ms"][-1] == f"{b / a:.3f}"


def screenshot(page: Path, png: Path) -> Path:
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("no chromium here (apt-get install chromium)")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    window = ["--window-size=1300,1000", f"--screenshot={png}", page.as_uri()]
    subprocess.run([browser, *flags, *window], capture_output=True, timeout=90, check=True)
    return png


def check_screenshot(png: Path, missed: bool = True) -> None:
    """Not blank, and in the colours of the plots: met in blue, what was `missed` in red."""
    import numpy as np
    from PIL import Image

    pixels = np.asarray(Image.open(png).convert("RGB"), dtype=int)
    assert pixels.shape == (1000, 1300, 3)

    def share(color: str) -> float:
        wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
        return float((abs(pixels - wanted).sum(axis=2) < 30).mean())

    assert share("#2f6db5") > 0.005
    assert share(plots.MISS) > 0.00005 or not missed
    assert share("#ffffff") < 0.98
    plot_area = pixels[250:, :1000]
    inked = (plot_area.sum(axis=2) < 720).mean(axis=0)
    assert (inked > 0.01).mean() > 0.8, "plots over the whole width"


def test_a_browser_renders_the_report(tmp_path: Path, page: str) -> None:
    file = tmp_path / "report.html"
    file.write_text(page)
    check_screenshot(screenshot(file, tmp_path / "report.png"))


def diptych(*arguments: object) -> Result:
    done = CliRunner().invoke(app, ["loadtest", *(str(argument) for argument in arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--profile", "waves"], 2, "expected one of constant"),
        (["--duration", "soon"], 2, "expected a time"),
        (["--gate", "goodness>=1"], 2, "expected one of goodput"),
        (["-o", "xml"], 2, "expected table or json"),
        (["--grpc", "auto", "--endpoint", "http://127.0.0.1:9"], 2, "auto needs --laptop"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], code: int, told: str) -> None:
    done = diptych(*arguments)
    assert done.exit_code == code and told in done.stderr


def test_an_endpoint_that_is_not_there_is_named() -> None:
    command = [Path(sys.executable).parent / "diptych", "loadtest", "--duration", "1s"]
    command += ["--endpoint", "http://127.0.0.1:9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and "no endpoint at" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_that_cannot_be_kept_is_not_begun(tmp_path: Path) -> None:
    done = diptych("--json", tmp_path / "nowhere" / "run.json", "--endpoint", "http://127.0.0.1:1")
    assert done.exit_code == 2 and "cannot write" in done.stderr


@pytest.mark.slow
def test_compare_takes_two_runs_and_nothing_else(tmp_path: Path) -> None:
    for name, seed in (("before", 0), ("after", 1)):
        (tmp_path / f"{name}.json").write_text(json.dumps(run(seed)))
    (tmp_path / "other.json").write_text("{}")
    before, after, page = tmp_path / "before.json", tmp_path / "after.json", tmp_path / "x.html"
    done = diptych("compare", before, after, "--html", page)
    assert done.exit_code == 0 and "ratio" in done.stdout and page.read_text().count("<svg") == 1
    done = diptych("compare", before, tmp_path / "other.json")
    assert done.exit_code == 2 and "no JSON of a load test" in done.stderr


def test_without_locust_the_command_says_how_to_get_it() -> None:
    code = (
        "import sys; sys.modules['locust'] = None\n"
        "import importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'locust' else real(name, *a)\n"
        "sys.argv = ['diptych', 'loadtest']\n"
        "from diptych.cluster.cli import main; main()"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and "pip install 'diptych[loadtest]'" in done.stderr


def test_where_all_failed_no_latency_is_shown() -> None:
    plan = LoadPlan(load="ramp", rate="1-8", steps=2, duration=2.0)
    failed = [LoadOutcome(str(n), float(n), float(n), n, 10, error="500") for n in (0, 1)]
    document = assemble(plan, FACTS, failed, ClientCost(), {}, ABOUT)
    for row in report.stage_table(document)[1:]:
        assert row[-2:] == ["-", "-"]
    assert "<b class=''>-</b>TTFT p99" in report.document(document)
    assert "<b class=''>-</b>ITL p99" in report.document(document)


def test_what_made_two_runs_unlike_is_told_with_both_runs_warnings() -> None:
    first, second = run(0), run(0)
    assert report.differences(first, second) == []
    second["endpoint"] |= {"ignore_eos": False, "usage": False}
    second |= {"skipped": 3, "ended_s": 12.0, "warnings": ["answers end where they like"]}
    first["warnings"] = ["late"]
    differing = " ".join(report.differences(first, second))
    for part in ("ignore_eos", "usage", "left out: - and 3", "after, s: - and 12"):
        assert part in differing
    names = ("before", "after")
    for text in (
        report.compared_text(first, second, names),
        report.comparison(first, second, names),
    ):
        assert "warning, before: late" in text
        assert "warning, after: answers end where they like" in text
