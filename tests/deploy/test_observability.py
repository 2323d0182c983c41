"""Dashboards, alerts and runbooks: current, parsed, and about metrics that exist."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from diptych.cluster.cli import app
from diptych.cluster.telemetry.catalogue import METRICS, VLLM_METRICS
from typer.testing import CliRunner

from deploy.observability import dashboards

FOLDER = dashboards.FOLDER.parent
RULES = yaml.safe_load((FOLDER / "rules.yaml").read_text())
TESTS = yaml.safe_load((FOLDER / "rules_test.yaml").read_text())
EVERY = [rule for group in RULES["groups"] for rule in group["rules"]]
ALERTS = [rule for rule in EVERY if "alert" in rule]
RECORDED = {rule["record"] for rule in EVERY if "record" in rule}
RUNBOOKS = sorted((FOLDER / "runbooks").glob("*.md"))
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(not PROMTOOL, reason="promtool is not installed")


def panels() -> Iterator[tuple[str, str]]:
    """(panel, query) of every dashboard, as Grafana reads them."""
    for path in sorted(dashboards.FOLDER.glob("*.json")):
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            for target in panel["targets"]:
                yield f"{path.stem}: {panel['title']}", target["expr"]


QUERIES = [*panels(), *((rule.get("alert") or rule["record"], rule["expr"]) for rule in EVERY)]


def selectors(node: Any) -> Iterator[promql.VectorSelector]:
    """Every selector of a query, whatever it stands in."""
    if isinstance(node, promql.VectorSelector):
        yield node
    for name in ("lhs", "rhs", "expr", "vector_selector", "param"):
        yield from selectors(getattr(node, name)) if getattr(node, name, None) else ()
    for part in getattr(node, "args", None) or ():
        yield from selectors(part)


def series_names() -> set[str]:
    """Return every name that a query may ask for."""
    names: set[str] = set()
    for name, metric in {**METRICS, **VLLM_METRICS}.items():
        if metric.kind == "histogram":
            names |= {f"{name}_bucket", f"{name}_sum", f"{name}_count"}
        else:
            names.add(name)
    return names


def labels_of(name: str) -> set[str]:
    """Labels of a series: those of its metric, and `le` of a bucket."""
    metric = next(
        m for n, m in METRICS.items() if name in (n, f"{n}_bucket", f"{n}_sum", f"{n}_count")
    )
    base = ("model", "pool", "replica") if metric.part == "worker" else ("model",)
    return {*base, *metric.labels, *(("le",) if name.endswith("_bucket") else ())}


@pytest.mark.parametrize(("where", "query"), QUERIES)
def test_queries_parse_and_ask_for_series_that_exist(where: str, query: str) -> None:
    text = query.replace("$__rate_interval", "5m").replace("$model", "m")
    found = list(selectors(promql.parse(text)))
    assert found, where
    for one in found:
        assert one.name in series_names() | RECORDED, f"{where}: no metric {one.name}"
        if one.name in RECORDED:
            continue
        used = {matcher.name for matcher in one.matchers.matchers}
        assert used <= labels_of(one.name), f"{where}: {one.name} has no {used}"
    known = set().union(*(labels_of(one.name) for one in found if one.name not in RECORDED))
    if known:
        grouped = {
            x.strip() for names in re.findall(r"by \(([^)]*)\)", text) for x in names.split(",")
        }
        assert grouped <= known, f"{where}: no label {grouped - known}"


@pytest.mark.parametrize(("where", "query"), list(panels()))
def test_a_panel_shows_only_the_models_that_are_chosen(where: str, query: str) -> None:
    for one in selectors(promql.parse(query.replace("$__rate_interval", "5m"))):
        matchers = {(matcher.name, matcher.value) for matcher in one.matchers.matchers}
        assert ("model", "$model") in matchers, f"{where}: {one.name} is of all models"


def test_the_curves_of_a_panel_can_be_told_apart() -> None:
    for path in dashboards.FOLDER.glob("*.json"):
        for panel in json.loads(path.read_text())["panels"]:
            legends = [target["legendFormat"] for target in panel["targets"]]
            assert len(set(legends)) == len(legends), f"{path.stem}: {panel['title']}: {legends}"
            for target in panel["targets"]:
                # A recorded share is of one model, so it has a curve for each.
                if any(name in target["expr"] for name in RECORDED):
                    assert "{{model}}" in target["legendFormat"], panel["title"]


def test_a_query_for_what_does_not_exist_would_be_seen() -> None:
    with pytest.raises(AssertionError, match="no metric"):
        test_queries_parse_and_ask_for_series_that_exist("x", "rate(diptych_request_total[5m])")
    wrong = 'rate(diptych_requests_total{status="200"}[5m])'
    with pytest.raises(AssertionError, match="has no"):
        test_queries_parse_and_ask_for_series_that_exist("x", f"sum({wrong}) / 2 > 1")
    with pytest.raises(AssertionError, match="no label"):
        test_queries_parse_and_ask_for_series_that_exist("x", "sum by (pod) (diptych_queue_depth)")


def test_the_dashboards_are_what_the_code_makes_and_no_panel_lies_on_another() -> None:
    assert dashboards.main(["--check"]) == 0
    for path in dashboards.FOLDER.glob("*.json"):
        board = json.loads(path.read_text())
        places = [(one["gridPos"]["x"], one["gridPos"]["y"]) for one in board["panels"]]
        assert len(set(places)) == len(places) > 3
        assert {one["name"] for one in board["templating"]["list"]} == {"datasource", "model"}


def test_every_alert_has_a_page_and_a_test_and_a_severity() -> None:
    pages = {path.name for path in RUNBOOKS}
    named = {Path(rule["annotations"]["runbook"]).name for rule in ALERTS}
    assert named == pages
    for rule in ALERTS:
        page = (FOLDER.parents[1] / rule["annotations"]["runbook"]).read_text()
        assert rule["alert"] in page
        assert rule["labels"]["severity"] in ("page", "ticket")
    fired = {
        one["alertname"]
        for case in TESTS["tests"]
        for one in case.get("alert_rule_test", [])
        if one["exp_alerts"]
    }
    assert fired == {rule["alert"] for rule in ALERTS}


@pytest.mark.parametrize("page", RUNBOOKS, ids=lambda path: path.stem)
def test_commands_of_a_runbook_exist(page: Path) -> None:
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    commands = [line for block in blocks for line in block.strip().split("\n")]
    assert commands
    for command in commands:
        tool, *words = shlex.split(command)
        assert tool in ("diptych", "kubectl", "curl"), command
        if tool != "diptych":
            continue
        told = CliRunner().invoke(app, [words[0], "--help"])
        assert told.exit_code == 0, command
        options = {word for word in words if word.startswith("-")}
        assert all(re.search(rf"(?<![\w-]){option}\b", told.output) for option in options), command


# ---- promtool ------------------------------------------------------------------------------------


def promtool(*words: str, cwd: Path = FOLDER) -> subprocess.CompletedProcess[str]:
    command = ["promtool", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@needs_promtool
def test_rules_and_configuration_are_right_and_the_rules_pass_their_tests() -> None:
    for words in (
        ("check", "rules", "rules.yaml"),
        ("check", "config", "prometheus.yml"),
        ("test", "rules", "rules_test.yaml"),
    ):
        done = promtool(*words)
        assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.long
def test_the_tests_miss_an_alert_that_never_fires_and_one_that_always_does(tmp_path: Path) -> None:
    """Each alert is broken in both ways; the tests of the rules must fail."""
    shutil.copy(FOLDER / "rules_test.yaml", tmp_path)
    survived = []
    for rule in ALERTS:
        for broken in ("vector(0) > 1", "vector(1)"):
            groups = [
                {
                    **group,
                    "rules": [{**r, "expr": broken} if r is rule else r for r in group["rules"]],
                }
                for group in RULES["groups"]
            ]
            (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
            if promtool("test", "rules", "rules_test.yaml", cwd=tmp_path).returncode == 0:
                survived.append((rule["alert"], broken))
    assert survived == []
