"""Writes the Grafana dashboards in `dashboards/`, one JSON file each.

    .venv/bin/python deploy/observability/dashboards.py            # rewrite
    .venv/bin/python deploy/observability/dashboards.py --check    # exit 1 and name what is stale

Typed builders of Grafana's own SDK (grafana-foundation-sdk). Queries ask for metrics of
`cluster/telemetry/catalogue.py` and for recording rules of `rules.yaml`; tests check every name.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import GraphDrawStyle
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    GridPos,
    VariableRefresh,
)

FOLDER = Path(__file__).parent / "dashboards"
#: Prometheus, as whoever looks at a board chooses it: the variable that `_with_variables` adds.
SOURCE = DataSourceRef("prometheus", "${datasource}")
WIDTH = 8  #: of a panel, in Grafana's grid units
HEIGHT = 8
GRID_WIDTH = 24  #: Grafana's, in the same units: three panels in a row
RATE = "$__rate_interval"  #: Grafana's variable: a time that has a few scrapes in it


Queries = tuple[tuple[str, str], ...]  #: PromQL and legend of each
OF_MODEL = 'model=~"$model"'  #: the label matcher for the models that are chosen on the board


class Panel(NamedTuple):
    """One panel of a dashboard."""

    title: str
    unit: str  #: Grafana's id of the unit, such as `percentunit`: 1 is shown as 100 %
    queries: Queries
    about: str = ""  #: what the panel's info sign shows
    number: bool = False  #: one value, no curve
    bars: bool = False  #: bars in place of lines, for counts


def quantiles(metric: str, by: str = "", where: str = OF_MODEL) -> Queries:
    """Returns the queries for p50, p95 and p99 of a histogram, for each value of the labels `by`.

    `metric` has no prefix `diptych_`, here and below; `where` are label matchers of PromQL.
    """
    labels = f"le, {by}" if by else "le"
    legend = f" {_legend(by)}" if by else ""
    buckets = f"sum by ({labels}) (rate(diptych_{metric}_bucket{{{where}}}[{RATE}]))"
    return tuple(
        (f"histogram_quantile({quantile}, {buckets})", f"p{round(100 * quantile)}{legend}")
        for quantile in (0.5, 0.95, 0.99)
    )


def rate(metric: str, by: str, where: str = OF_MODEL, what: str = "") -> Queries:
    """Returns the query for a counter's increase a second, by the labels `by`.

    `what` stands behind their values in the legend, here and below: a panel with several queries
    needs it.
    """
    return ((f"sum by ({by}) (rate(diptych_{metric}{{{where}}}[{RATE}]))", _legend(by, what)),)


def gauge(metric: str, by: str, where: str = OF_MODEL, what: str = "") -> Queries:
    """Returns the query for a gauge, summed by the labels `by`."""
    return ((f"sum by ({by}) (diptych_{metric}{{{where}}})", _legend(by, what)),)


def recorded(name: str, by: str, what: str = "") -> Queries:
    """Returns the query for a recording rule of rules.yaml, which has the labels `by`."""
    return ((f"{name}{{{OF_MODEL}}}", _legend(by, what)),)


def _legend(labels: str, what: str = "") -> str:
    """Grafana's template of the values of labels: "{{pool}} {{role}}" for "pool, role".

    `what` is put behind them.
    """
    values = [f"{{{{{label}}}}}" for label in labels.split(", ")]
    return " ".join([*values, what]).rstrip()


#: States of KV blocks that no sequence needs: those of all other states are in use.
UNUSED = "free|cached"
#: States that a block has beside one of the others: sums over blocks leave them out.
ADDITIONAL = "quarantined|orphaned"
#: Matches first tokens that came later than predicted.
LATE = 'side="late", model=~"$model"'
#: By file name: the title, and the panels from the top left on.
BOARDS: dict[str, tuple[str, list[Panel]]] = {
    "slo-overview": (
        "Diptych / SLO overview",
        [
            Panel(
                "Goodput, 5 min",
                "percentunit",
                recorded("diptych:goodput:ratio5m", "model, slo_class"),
                "Share of requests that met TTFT and ITL targets, refusals counted as misses.",
                number=True,
            ),
            Panel(
                "Requests per second",
                "reqps",
                (('sum(rate(diptych_requests_total{model=~"$model"}[' + RATE + "]))", "all"),),
                number=True,
            ),
            Panel("In flight", "short", gauge("inflight_requests", "model"), number=True),
            Panel(
                "Goodput by class",
                "percentunit",
                recorded("diptych:goodput:ratio5m", "model, slo_class"),
            ),
            Panel(
                "Requests by the targets they met",
                "reqps",
                rate("goodput_requests_total", "met"),
                bars=True,
            ),
            Panel(
                "Answers by status", "reqps", rate("requests_total", "code"), "499: the client left"
            ),
            Panel("Time to first token", "s", quantiles("request_ttft_seconds")),
            Panel(
                "Time between tokens",
                "s",
                quantiles("request_itl_seconds"),
                "Every gap, the one of the hand-over included.",
            ),
            Panel(
                "First to second token",
                "s",
                quantiles("request_first_gap_seconds"),
                "Where the transfer would show.",
            ),
            Panel(
                "Error budget burn, 1 h",
                "short",
                recorded("diptych:slo:burn1h", "model, slo_class"),
            ),
            Panel(
                "Goodput by tenant",
                "reqps",
                rate("goodput_requests_total", "tenant", 'met="both", model=~"$model"'),
            ),
            Panel(
                "Retries and hand-overs",
                "reqps",
                rate("request_retries_total", "model", what="retries")
                + rate("request_handovers_total", "model", what="hand-overs"),
            ),
        ],
    ),
    "pools": (
        "Diptych / Pools",
        [
            Panel("Replicas", "short", gauge("replicas", "pool, state")),
            Panel("Workers by home and role", "short", gauge("workers", "pool, role")),
            Panel(
                "Orders",
                "ops",
                rate("scale_actions_total", "pool, direction") + rate("flips_total", "from, to"),
            ),
            Panel("Running sequences", "short", gauge("running_requests", "pool, replica")),
            Panel("Waiting sequences", "short", gauge("waiting_requests", "pool, replica")),
            Panel(
                "KV blocks in use",
                "percentunit",
                (
                    (
                        "sum by (pool, replica) "
                        f'(diptych_kv_blocks{{state!~"{UNUSED}|{ADDITIONAL}", {OF_MODEL}}}) / '
                        "sum by (pool, replica) "
                        f'(diptych_kv_blocks{{state!~"{ADDITIONAL}", {OF_MODEL}}})',
                        "{{pool}} {{replica}}",
                    ),
                ),
            ),
            Panel("Step", "s", quantiles("step_duration_seconds", "phase")),
            Panel("Tokens of a step", "short", quantiles("batch_tokens", "pool")),
            Panel("Prompt tokens computed", "short", rate("prefill_tokens_total", "pool")),
            Panel("Preemptions", "ops", rate("preemptions_total", "pool, replica")),
            Panel("Verified guesses", "short", rate("draft_tokens_total", "pool, result")),
        ],
    ),
    "kv-fabric": (
        "Diptych / KV fabric",
        [
            Panel("KV moved", "Bps", rate("kv_transfer_bytes_total", "direction")),
            Panel("KV that arrived, by sender", "Bps", rate("kv_peer_bytes_total", "peer")),
            Panel(
                "Transport that ran",
                "short",
                gauge("kv_peer_transport", "transport"),
                "Pairs of workers. `nixl (tcp)`: UCX fell back to TCP.",
            ),
            Panel("Transfer, write under way", "s", quantiles("kv_transfer_duration_seconds")),
            Panel(
                "Transfer, not hidden by prefill",
                "s",
                quantiles("kv_transfer_exposed_seconds"),
                "What the first-to-second-token gap pays.",
            ),
            Panel("Failures", "ops", rate("kv_transfer_failures_total", "reason"), bars=True),
            Panel("Open transfers", "short", gauge("kv_sessions", "state")),
            Panel("Peers reached", "short", gauge("kv_peers", "pool, replica")),
            Panel(
                "Quarantined and orphaned blocks",
                "short",
                gauge("kv_blocks", "state, replica", f'state=~"quarantined|orphaned", {OF_MODEL}'),
                "Should be 0; quarantined ones wait for a peer that may still write.",
            ),
            Panel(
                "Checksums, share of a core",
                "percentunit",
                rate("kv_transfer_checksum_seconds_total", "pool, replica"),
            ),
        ],
    ),
    "router-quality": (
        "Diptych / Router quality",
        [
            Panel("Decisions", "reqps", rate("routing_decisions_total", "decision"), bars=True),
            Panel("How pairs were found", "reqps", rate("routing_decisions_total", "reason")),
            Panel("Refusals", "reqps", rate("rejected_total", "reason"), bars=True),
            Panel(
                "Waiting requests",
                "short",
                gauge("queue_depth", "model", what="all")
                + gauge("queue_late", "model", what="late"),
                "All, and those that cannot be in time any more.",
            ),
            Panel("Wait for a worker", "s", quantiles("queue_wait_seconds")),
            Panel("Time of a decision", "s", quantiles("routing_duration_seconds")),
            Panel(
                "Prefix hits",
                "percentunit",
                recorded("diptych:prefix_hit:ratio5m", "model", "of prompt tokens"),
            ),
            Panel(
                "First token later than predicted",
                "s",
                quantiles("ttft_prediction_error_seconds", where=LATE),
            ),
            Panel(
                "Predictions by side",
                "reqps",
                rate("ttft_prediction_error_seconds_count", "side"),
                "Both sides should be about as frequent.",
            ),
        ],
    ),
}


def _with_variables(board: build.Dashboard) -> build.Dashboard:
    """Adds the choices at the top of a board: the data source, and one, some or all models."""
    source = build.DatasourceVariable("datasource").label("Data source").type("prometheus")
    model = (
        build.QueryVariable("model")
        .label("Model")
        .datasource(SOURCE)
        .query("label_values(diptych_build_info, model)")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .include_all(True)
        .all_value(".*")
        .multi(True)
    )
    return board.with_variable(source).with_variable(model)


def _panel_builder(panel: Panel, place: int) -> stat.Panel | timeseries.Panel:
    """Returns the builder of one panel; `place` counts from the top left, row by row."""
    builder: Any = stat.Panel() if panel.number else timeseries.Panel()
    builder = builder.title(panel.title).unit(panel.unit)
    builder = builder.datasource(SOURCE).description(panel.about)
    row, column = divmod(place, GRID_WIDTH // WIDTH)
    builder = builder.grid_pos(GridPos(h=HEIGHT, w=WIDTH, x=column * WIDTH, y=row * HEIGHT))
    if not panel.number:
        opacity = 40 if panel.bars else 10
        style = GraphDrawStyle.BARS if panel.bars else GraphDrawStyle.LINE
        builder = builder.min(0).fill_opacity(opacity).draw_style(style)
    for index, (query, legend) in enumerate(panel.queries):  # Grafana's names for queries: A, B, ..
        letter = chr(ord("A") + index)
        target = prometheus.Dataquery().expr(query).legend_format(legend).ref_id(letter)
        builder = builder.with_target(target)
    return builder


def dashboard_json(name: str) -> str:
    """Returns one dashboard as JSON; `name` is a key of `BOARDS`."""
    title, panels = BOARDS[name]
    board = build.Dashboard(title).uid(f"diptych-{name}").tags(["diptych"]).refresh("30s")
    board = _with_variables(board.time("now-1h", "now").tooltip(DashboardCursorSync.CROSSHAIR))
    for place, panel in enumerate(panels):
        board = board.with_panel(_panel_builder(panel, place))
    return JSONEncoder(sort_keys=True, indent=2).encode(board.build()) + "\n"


def generated() -> dict[Path, str]:
    """Returns every file of the folder and its text."""
    return {FOLDER / f"{name}.json": dashboard_json(name) for name in BOARDS}


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__)
        return 2
    check_only = arguments == ["--check"]
    files = generated()
    superfluous = [path for path in FOLDER.glob("*.json") if path not in files]
    changed = [
        path for path, text in files.items() if not path.exists() or path.read_text() != text
    ]
    for path in (*superfluous, *changed):
        print(f"{'not current' if check_only else 'wrote'}: {path.name}")
    if check_only:
        return 1 if superfluous or changed else 0

    for path in superfluous:
        path.unlink()
    for path in changed:
        path.write_text(files[path])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
