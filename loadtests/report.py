"""One run, or two side by side, as text and as one HTML file with plots inside.

A run is the document of `result.assemble`, as it stands in a JSON file. A request is met if it kept
its targets of TTFT (time to the first token) and ITL (gaps between tokens). Goodput is the share of
requests that were met. TPOT is the mean time of a token after the first, E2E the time to the last.
"""

from __future__ import annotations

import html
from typing import Any

from ..simulator.report import STYLE
from .plots import COLORS, plots_svg

#: Rows of the tables: the name shown, and the key in a run's summary.
LATENCIES = (
    ("TTFT", "ttft_ms"),
    ("TTFT, all offered", "ttft_offered_ms"),
    ("ITL", "itl_ms"),
    ("second token", "second_token_ms"),
    ("TPOT", "tpot_ms"),
    ("E2E", "e2e_ms"),
)
RATES = (
    ("goodput", "goodput"),
    ("met/s", "good_per_s"),
    ("offered/s", "offered_per_s"),
    ("tokens/s", "tokens_per_s"),
)
RANKS = ("mean", "p50", "p90", "p95", "p99", "max")
STAGE_HEADER = ["stage", "requests", "offered/s", "met/s", "goodput", "TTFT p99", "ITL p99"]
SLOWEST_LIMIT = 10  #: requests in the table of the slowest
Document = dict[str, Any]
Table = list[list[str]]


# ---- text ----------------------------------------------------------------------------------------


def headline(run: Document) -> str:
    """Returns the run's figures in one line."""
    summary = run["summary"]
    return (
        f"goodput {_goodput(summary)} of {summary['requests']} requests, "
        f"{summary['good_per_s']:.2f} of {summary['offered_per_s']:.2f} offered a second, "
        f"{summary['tokens_per_s']:.0f} tokens/s"
    )


def _goodput(summary: dict[str, Any]) -> str:
    share = summary["goodput"]
    return "-" if share is None else f"{share:.1%}"


def setting(run: Document) -> str:
    """Returns what was offered, and to whom."""
    config = run["config"]
    endpoint = run["endpoint"]
    if config["load"] == "chat":
        rate = f"{config['users']} users"
    else:
        rate = f"{config['rate'] or 'recorded'}/s"
    return (
        f"{config['load']} {rate}, {run['span_s']:g} s, {config['slo']}; "
        f"{endpoint['model']} at {endpoint['url']} ({endpoint['protocol']}), "
        f"seed {config['seed']}"
    )


def text(run: Document) -> str:
    """Returns the report of a run as text for a terminal."""
    summary = run["summary"]
    lines = [setting(run), headline(run)]
    if summary["missed"]:
        lines.append("missed: " + _counts(summary["missed"]))
    if summary["errors"]:
        lines.append("errors: " + _counts(summary["errors"]))
    lines += _aligned(_latency_table(run, "ms"))
    if len(run["stages"]) > 1:
        lines += _aligned(stage_table(run))
    if "knee" in run:
        lines.append("knee, requests/s: " + _knee(run["knee"]))
    lines.append(client_line(run))
    lines += [server_line(row) for row in run["server"]]
    lines += [f"warning: {warning}" for warning in run["warnings"]]
    for gate in run["gates"]:
        verdict = "held" if gate["holds"] else "MISSED"
        lines.append(f"{verdict}: {gate['gate']}")
    return "\n".join(lines)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _knee(knee: dict[str, float | None]) -> str:
    """Returns the largest rates of a ramp with 90 % (G90) and 99 % (G99) of the requests met."""
    return ", ".join(f"{name.upper()} {_rate(rate)}" for name, rate in knee.items())


def _rate(value: float | None) -> str:
    return "below the lowest rate" if value is None else f"{value:.2f}"


def _latency_table(run: Document, corner: str) -> Table:
    """Returns a row for each latency, in ms; `corner` is the text in the top left cell."""
    rows = [[corner, *RANKS]]
    for name, key in LATENCIES:
        figures = run["summary"].get(key)
        if figures is None:  # the run is of an older version
            continue
        rows.append([name, *(_latency_cell(figures, rank) for rank in RANKS)])
    return rows


def _latency_cell(figures: dict[str, float | None], rank: str) -> str:
    """Returns a figure in ms; of all offered requests a percentile may fall on a failed one."""
    if rank not in figures:
        return "-"
    value = figures[rank]
    return "failed" if value is None else f"{value:.1f}"


def stage_table(run: Document) -> Table:
    """Returns a row for each stage of a ramp: a time with one rate. Latencies are in ms."""
    rows = [STAGE_HEADER]
    for stage in run["stages"]:
        rows.append(
            [
                stage["label"],
                str(stage["requests"]),
                f"{stage['offered_per_s']:.2f}",
                f"{stage['good_per_s']:.2f}",
                f"{stage['goodput']:.1%}",
                _latency_cell(stage["ttft_ms"], "p99"),
                _latency_cell(stage["itl_ms"], "p99"),
            ]
        )
    return rows


def client_line(run: Document) -> str:
    """Returns what the client added to the figures, and what it cannot see."""
    client = run["client"]
    gap_error_us = client["calibration"].get("gap_error_us", {})
    read_us = client["read_us"]
    late_ms = client["late_ms"]
    parts = [f"client: {client['processes']} processes, busiest at {client['cpu']:.0%} of a core"]
    if late_ms:
        parts.append(f"requests out {late_ms['p50']:.1f} ms late (p99 {late_ms['p99']:.1f})")
    if read_us:
        parts.append(
            f"data read {read_us['p50']:.0f} us after the kernel had it "
            f"(p99 {read_us['p99']:.0f}), which is not in the times"
        )
    if gap_error_us:
        parts.append(
            f"a gap on loopback is wrong by {gap_error_us['p50']:.0f} us "
            f"(p99 {gap_error_us['p99']:.0f})"
        )
    return "; ".join(parts)


def server_line(row: dict[str, Any]) -> str:
    """Returns one figure as the server and the client counted it; they should agree."""
    return (
        f"server says {row['figure']} {row['server']:.6g}, client {row['client']:.6g} "
        f"({row['deviation']:+.1%})"
    )


def _aligned(rows: Table) -> list[str]:
    """Returns lines of text: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for row in rows:
        name = row[0].ljust(widths[0])
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([name, *cells]))
    return lines


# ---- html ----------------------------------------------------------------------------------------

OWN_STYLE = """
h1 { font-size: 1.5rem; margin-bottom: .2rem; } .setting { color: #5b6b7b; margin-top: 0; }
.figures { display: flex; flex-wrap: wrap; gap: 1rem; margin: 1rem 0; }
.figures div { background: #f4f7fb; border-radius: 8px; padding: .6rem 1rem; min-width: 7rem; }
.figures b { display: block; font-size: 1.4rem; } .bad { color: #c0392b; } .good { color: #1e7d4f; }
.warning { background: #fdf3e3; padding: .4rem .8rem; border-left: 4px solid #d1742c; }
details { margin: 1rem 0; }
"""


def document(run: Document) -> str:
    """Returns the report of one run as self-contained HTML."""
    title = f"Load test: {run['config']['load']}, {run['endpoint']['model']}"
    body = [
        f"<h1>{_escape(title)}</h1><p class='setting'>{_escape(setting(run))}</p>",
        _figures(run),
        *(f"<p class='warning'>{_escape(warning)}</p>" for warning in run["warnings"]),
        plots_svg([run]),
        "<h2>Latencies, ms</h2>",
        _table(_latency_table(run, "")),
        _stages(run),
        _server(run),
        f"<p>{_escape(client_line(run))}.</p>",
        "<p>A request is met if its first token and its gaps keep the targets: their mean, and "
        "their p99 if there are 20 at least; the gap between first and second token is a gap like "
        "any other. What was refused, failed or did not end is a miss.</p>",
        _slowest(run),
        _origin(run),
    ]
    return _page(title, body)


def comparison(first: Document, second: Document, names: tuple[str, str]) -> str:
    """Returns the reports of two runs side by side as self-contained HTML.

    `names` are what the runs are called in it.
    """
    title = f"Load tests: {names[0]} and {names[1]}"
    settings = "".join(
        f"<p class='setting'><b style='color:{color}'>{_escape(name)}</b> "
        f"{_escape(setting(run))}<br>"
        f"{_escape(run['started'])}, commit {_escape(run['commit'] or '-')}</p>"
        for name, run, color in zip(names, (first, second), COLORS, strict=True)
    )
    differing = "; ".join(differences(first, second)) or "nothing"
    body = [
        f"<h1>{_escape(title)}</h1>{settings}",
        f"<p class='warning'>differs: {_escape(differing)}</p>",
        *(
            f"<p class='warning'>{_escape(line)}</p>"
            for line in _warning_lines(first, second, names)
        ),
        plots_svg([first, second], names),
        _table(compared(first, second, names)),
    ]
    return _page(title, body)


def differences(first: Document, second: Document) -> list[str]:
    """Returns what differs between two runs in their load and their clients.

    A comparison of two servers is fair if that is nothing.
    """
    without_effect = {"out", "gate", "admin", "metrics"}
    lines: list[str] = []
    for key in (first["config"].keys() | second["config"].keys()) - without_effect:
        first_value = first["config"].get(key)
        second_value = second["config"].get(key)
        if first_value != second_value:
            lines.append(f"{key}: {first_value} and {second_value}")
    for key in ("ignore_eos", "usage"):
        first_value = first["endpoint"].get(key)
        second_value = second["endpoint"].get(key)
        if first_value != second_value:
            lines.append(f"the endpoint takes {key}: {first_value} and {second_value}")
    for key, meaning in (("skipped", "requests left out"), ("ended_s", "stopped after, s")):
        first_value = first.get(key) or "-"
        second_value = second.get(key) or "-"
        if first_value != second_value:
            lines.append(f"{meaning}: {first_value} and {second_value}")
    if first["machine"] != second["machine"]:
        lines.append("the clients ran on different machines")
    return sorted(lines)


def _warning_lines(first: Document, second: Document, names: tuple[str, str]) -> list[str]:
    """Returns what a reader must know of either run before believing its figures."""
    return [
        f"warning, {name}: {warning}"
        for name, run in zip(names, (first, second), strict=True)
        for warning in run.get("warnings", [])
    ]


def compared(first: Document, second: Document, names: tuple[str, str]) -> Table:
    """Returns the figures of both runs, and the second over the first."""
    rows = [["", *names, "ratio"]]
    for name, key in RATES:
        rows.append(_compared_row(name, first["summary"][key], second["summary"][key]))
    for name, key in LATENCIES:
        first_figures = first["summary"].get(key, {})
        second_figures = second["summary"].get(key, {})
        for rank in RANKS[:-1]:
            figure = f"{name} {rank}, ms"
            rows.append(_compared_row(figure, first_figures.get(rank), second_figures.get(rank)))
    return rows


def _compared_row(name: str, first: float | None, second: float | None) -> list[str]:
    cells = ["-" if value is None else f"{value:.4g}" for value in (first, second)]
    ratio = f"{second / first:.3f}" if first and second is not None else "-"
    return [name, *cells, ratio]


def compared_text(first: Document, second: Document, names: tuple[str, str]) -> str:
    """Returns the comparison of two runs as text for a terminal."""
    lines = [f"differs: {line}" for line in differences(first, second)]
    lines += _warning_lines(first, second, names)
    return "\n".join([*lines, *_aligned(compared(first, second, names))])


def _escape(value: object) -> str:
    return html.escape(str(value))


def _page(title: str, body: list[str]) -> str:
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{_escape(title)}</title>"
        f"<style>{STYLE}{OWN_STYLE}</style>{''.join(body)}</html>"
    )


def _figures(run: Document) -> str:
    """Returns the figures at the top of the page."""
    summary = run["summary"]
    failed = sum(summary["errors"].values())
    cards = [
        _card(_goodput(summary), "goodput"),
        _card(f"{summary['good_per_s']:.2f}/s", f"met, of {summary['offered_per_s']:.2f} offered"),
        _card(_latency_card(summary["ttft_ms"], 0), "TTFT p99"),
        _card(_latency_card(summary["itl_ms"], 1), "ITL p99"),
        _card(f"{summary['tokens_per_s']:.0f}/s", "output tokens"),
        _card(str(failed), "failed requests", "bad" if failed else ""),
    ]
    if run["gates"]:
        gates = ", ".join(gate["gate"] for gate in run["gates"])
        if all(gate["holds"] for gate in run["gates"]):
            cards.append(_card("held", gates, "good"))
        else:
            cards.append(_card("missed", gates, "bad"))
    return f"<div class='figures'>{''.join(cards)}</div>"


def _card(value: str, label: str, style_class: str = "") -> str:
    return f"<div><b class='{style_class}'>{_escape(value)}</b>{_escape(label)}</div>"


def _latency_card(figures: dict[str, float | None], digits: int) -> str:
    """Returns the 99th percentile in ms, or a dash where no request has the time."""
    p99 = figures.get("p99")
    return "-" if p99 is None else f"{p99:.{digits}f} ms"


def _table(rows: Table) -> str:
    header = "".join(f"<th>{_escape(cell)}</th>" for cell in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{_escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:]
    )
    return f"<table><tr>{header}</tr>{body}</table>"


def _stages(run: Document) -> str:
    if len(run["stages"]) < 2:
        return ""
    note = ""
    if run.get("knee"):
        rates = _escape(_knee(run["knee"]))
        note = f"<p>Largest rates with 90 % and 99 % met, requests/s: {rates}.</p>"
    return f"<h2>Stages</h2>{_table(stage_table(run))}{note}"


def _server(run: Document) -> str:
    if not run["server"]:
        return ""
    rows = [["", "server", "client", "deviation"]]
    for row in run["server"]:
        server = f"{row['server']:.6g}"
        client = f"{row['client']:.6g}"
        rows.append([row["figure"], server, client, f"{row['deviation']:+.1%}"])
    return f"<h2>What the server counted</h2>{_table(rows)}"


def _slowest(run: Document) -> str:
    """Returns a folded table: failed requests first, then those with the latest first token."""
    columns = run["columns"]
    error_column = columns.index("error")
    ttft_column = columns.index("ttft_ms")

    def badness(row: list[Any]) -> tuple[bool, float]:
        return bool(row[error_column]), row[ttft_column] or 0.0

    slowest = sorted(run["requests"], key=badness, reverse=True)[:SLOWEST_LIMIT]
    shown = [index for index, column in enumerate(columns) if column != "stage"]
    rows = [[columns[index] for index in shown]]
    rows += [[_cell(row[index]) for index in shown] for row in slowest]
    return (
        "<details><summary>Slowest requests (a Diptych cluster explains them: "
        f"<code>diptych explain ID</code>)</summary>{_table(rows)}</details>"
    )


def _cell(value: float | str | None) -> str:
    if value is None:
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _origin(run: Document) -> str:
    """Returns when, where and with what the run was made, and all its options."""
    machine = run["machine"]
    versions = ", ".join(f"{name} {value}" for name, value in run["versions"].items())
    config = ", ".join(f"{key}={value}" for key, value in run["config"].items() if value != "")
    return (
        f"<p class='setting'>{_escape(run['started'])}; client on {_escape(machine['cpu'])}, "
        f"{machine['cores']} cores, {machine['memory_gib']} GiB, {_escape(machine['system'])}; "
        f"commit {_escape(run['commit'] or '-')}; {_escape(versions)}.<br>{_escape(config)}</p>"
    )
