"""One run, or two side by side, as text and as one HTML file with plots inside."""

from __future__ import annotations

import html
import io
from typing import Any

from ..simulator.report import STYLE

COLORS = ("#2f6db5", "#d1742c")  #: first and second run
MISS = "#c0392b"
TIMES = (
    ("TTFT", "ttft_ms"),
    ("ITL", "itl_ms"),
    ("second token", "second_token_ms"),
    ("TPOT", "tpot_ms"),
    ("E2E", "e2e_ms"),
)
RANKS = ("mean", "p50", "p90", "p95", "p99", "max")
Document = dict[str, Any]


# ---- text ----------------------------------------------------------------------------------------


def headline(run: Document) -> str:
    one = run["summary"]
    share = "-" if one["goodput"] is None else f"{one['goodput']:.1%}"
    return (
        f"goodput {share} of {one['requests']} requests, {one['good_per_s']:.2f} of "
        f"{one['offered_per_s']:.2f} offered a second, {one['tokens_per_s']:.0f} tokens/s"
    )


def setting(run: Document) -> str:
    config, where = run["config"], run["endpoint"]
    load = config["load"]
    rate = f"{config['users']} users" if load == "chat" else f"{config['rate'] or 'recorded'}/s"
    return (
        f"{load} {rate}, {run['span_s']:g} s, {config['slo']}; {where['model']} at {where['url']} "
        f"({where['protocol']}), seed {config['seed']}"
    )


def text(run: Document) -> str:
    """The run in a terminal."""
    one = run["summary"]
    lines = [setting(run), headline(run)]
    missed = [f"{count} {reason}" for reason, count in one["missed"].items()]
    if missed:
        lines.append("missed: " + ", ".join(missed))
    if one["errors"]:
        lines.append("errors: " + ", ".join(f"{n} {name}" for name, n in one["errors"].items()))
    lines += _aligned([["ms", *RANKS], *(_time(name, one[key]) for name, key in TIMES)])
    if len(run["stages"]) > 1:
        lines += _aligned(stage_rows(run))
    if "knee" in run:
        found = [f"{name.upper()} {_rate(value)}" for name, value in run["knee"].items()]
        lines.append("knee, requests/s: " + ", ".join(found))
    lines.append(client_line(run))
    lines += [server_line(row) for row in run["server"]]
    lines += [f"warning: {warning}" for warning in run["warnings"]]
    lines += [f"{'held' if g['holds'] else 'MISSED'}: {g['gate']}" for g in run["gates"]]
    return "\n".join(lines)


def _rate(value: float | None) -> str:
    return "below the lowest rate" if value is None else f"{value:.2f}"


def _time(name: str, figures: dict[str, float]) -> list[str]:
    return [name, *(f"{figures[r]:.1f}" if r in figures else "-" for r in RANKS)]


def stage_rows(run: Document) -> list[list[str]]:
    rows = [["stage", "requests", "offered/s", "met/s", "goodput", "TTFT p99", "ITL p99"]]
    for one in run["stages"]:
        rows.append(
            [
                *(one["label"], str(one["requests"])),
                *(f"{one['offered_per_s']:.2f}", f"{one['good_per_s']:.2f}"),
                f"{one['goodput']:.1%}",
                *(f"{one[kind].get('p99', 0):.1f}" for kind in ("ttft_ms", "itl_ms")),
            ]
        )
    return rows


def client_line(run: Document) -> str:
    """What the client added, and what it cannot see."""
    client = run["client"]
    exact = client["calibration"].get("gap_error_us", {})
    read, late = client["read_us"], client["late_ms"]
    parts = [f"client: {client['processes']} processes, busiest at {client['cpu']:.0%} of a core"]
    if late:
        parts.append(f"requests out {late['p50']:.1f} ms late (p99 {late['p99']:.1f})")
    if read:
        parts.append(
            f"data read {read['p50']:.0f} us after the kernel had it (p99 {read['p99']:.0f}), "
            "which is not in the times"
        )
    if exact:
        parts.append(
            f"a gap on loopback is wrong by {exact['p50']:.0f} us (p99 {exact['p99']:.0f})"
        )
    return "; ".join(parts)


def server_line(row: dict[str, Any]) -> str:
    return (
        f"server says {row['figure']} {row['server']:.6g}, client {row['client']:.6g} "
        f"({row['deviation']:+.1%})"
    )


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]))
    return lines


# ---- html ----------------------------------------------------------------------------------------

MORE = """
h1 { font-size: 1.5rem; margin-bottom: .2rem; } .setting { color: #5b6b7b; margin-top: 0; }
.figures { display: flex; flex-wrap: wrap; gap: 1rem; margin: 1rem 0; }
.figures div { background: #f4f7fb; border-radius: 8px; padding: .6rem 1rem; min-width: 7rem; }
.figures b { display: block; font-size: 1.4rem; } .bad { color: #c0392b; } .good { color: #1e7d4f; }
.warning { background: #fdf3e3; padding: .4rem .8rem; border-left: 4px solid #d1742c; }
details { margin: 1rem 0; }
"""


def document(run: Document) -> str:
    """Self-contained HTML of one run."""
    title = f"Load test: {run['config']['load']}, {run['endpoint']['model']}"
    body = [
        f"<h1>{_e(title)}</h1><p class='setting'>{_e(setting(run))}</p>",
        _cards(run),
        *(f"<p class='warning'>{_e(warning)}</p>" for warning in run["warnings"]),
        _plots([run]),
        "<h2>Latencies, ms</h2>",
        _table([["", *RANKS], *(_time(name, run["summary"][key]) for name, key in TIMES)]),
        _stages(run),
        _server(run),
        f"<p>{_e(client_line(run))}.</p>",
        "<p>A request is met if its first token and its gaps keep the targets: their mean, and "
        "their p99 if there are 20 at least; the gap between first and second token is a gap like "
        "any other. What was refused, failed or did not end is a miss.</p>",
        _slowest(run),
        _origin(run),
    ]
    return _page(title, body)


def comparison(first: Document, second: Document, names: tuple[str, str]) -> str:
    """Self-contained HTML of two runs side by side."""
    title = f"Load tests: {names[0]} and {names[1]}"
    settings = "".join(
        f"<p class='setting'><b style='color:{color}'>{_e(name)}</b> {_e(setting(run))}<br>"
        f"{_e(run['started'])}, commit {_e(run['commit'] or '-')}</p>"
        for name, run, color in zip(names, (first, second), COLORS, strict=True)
    )
    body = [
        f"<h1>{_e(title)}</h1>{settings}",
        f"<p class='warning'>differs: {_e('; '.join(differences(first, second)) or 'nothing')}</p>",
        _plots([first, second], names),
        _table(compared(first, second, names)),
    ]
    return _page(title, body)


def differences(first: Document, second: Document) -> list[str]:
    """What else than the server differs between two runs."""
    rest = {"out", "gate", "admin", "metrics"}
    lines = []
    for key in first["config"].keys() | second["config"].keys():
        a, b = first["config"].get(key), second["config"].get(key)
        if a != b and key not in rest:
            lines.append(f"{key}: {a} and {b}")
    if first["machine"] != second["machine"]:
        lines.append("the clients ran on different machines")
    return sorted(lines)


def compared(first: Document, second: Document, names: tuple[str, str]) -> list[list[str]]:
    """Figures of both, and second / first."""
    pairs = [
        (name, first["summary"][key], second["summary"][key])
        for name, key in (
            ("goodput", "goodput"),
            ("met/s", "good_per_s"),
            ("offered/s", "offered_per_s"),
            ("tokens/s", "tokens_per_s"),
        )
    ]
    for name, key in TIMES:
        a, b = first["summary"][key], second["summary"][key]
        pairs += [(f"{name} {rank}, ms", a.get(rank), b.get(rank)) for rank in RANKS[:-1]]
    rows = [["", *names, "ratio"]]
    for name, a, b in pairs:
        ratio = f"{b / a:.3f}" if a and b is not None else "-"
        rows.append([name, *("-" if v is None else f"{v:.4g}" for v in (a, b)), ratio])
    return rows


def compared_text(first: Document, second: Document, names: tuple[str, str]) -> str:
    lines = [f"differs: {line}" for line in differences(first, second)]
    return "\n".join([*lines, *_aligned(compared(first, second, names))])


def _e(value: object) -> str:
    return html.escape(str(value))


def _page(title: str, body: list[str]) -> str:
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{_e(title)}</title>"
        f"<style>{STYLE}{MORE}</style>{''.join(body)}</html>"
    )


def _cards(run: Document) -> str:
    one = run["summary"]
    share = "-" if one["goodput"] is None else f"{one['goodput']:.1%}"
    held = all(gate["holds"] for gate in run["gates"])
    cards = [
        (share, "goodput", ""),
        (f"{one['good_per_s']:.2f}/s", f"met, of {one['offered_per_s']:.2f} offered", ""),
        (f"{one['ttft_ms'].get('p99', 0):.0f} ms", "TTFT p99", ""),
        (f"{one['itl_ms'].get('p99', 0):.1f} ms", "ITL p99", ""),
        (f"{one['tokens_per_s']:.0f}/s", "output tokens", ""),
        (str(sum(one["errors"].values())), "failed requests", "bad" if one["errors"] else ""),
    ]
    if run["gates"]:
        told = ", ".join(gate["gate"] for gate in run["gates"])
        cards.append(("held" if held else "missed", told, "good" if held else "bad"))
    inner = "".join(f"<div><b class='{kind}'>{_e(a)}</b>{_e(b)}</div>" for a, b, kind in cards)
    return f"<div class='figures'>{inner}</div>"


def _table(rows: list[list[str]]) -> str:
    head = "".join(f"<th>{_e(cell)}</th>" for cell in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{_e(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:]
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _stages(run: Document) -> str:
    if len(run["stages"]) < 2:
        return ""
    knee = run.get("knee", {})
    told = ", ".join(f"{name.upper()} {_rate(value)}" for name, value in knee.items())
    note = f"<p>Largest rates with 90 % and 99 % met, requests/s: {_e(told)}.</p>" if knee else ""
    return f"<h2>Stages</h2>{_table(stage_rows(run))}{note}"


def _server(run: Document) -> str:
    if not run["server"]:
        return ""
    rows = [["", "server", "client", "deviation"]]
    rows += [
        [r["figure"], f"{r['server']:.6g}", f"{r['client']:.6g}", f"{r['deviation']:+.1%}"]
        for r in run["server"]
    ]
    return f"<h2>What the server counted</h2>{_table(rows)}"


def _slowest(run: Document) -> str:
    columns = run["columns"]
    place = {name: columns.index(name) for name in columns}

    def badness(row: list[Any]) -> tuple[bool, float]:
        return bool(row[place["error"]]), row[place["ttft_ms"]] or 0.0

    worst = sorted(run["requests"], key=badness, reverse=True)[:10]
    shown = [column for column in columns if column != "stage"]
    rows = [shown, *([_cell(row[place[name]]) for name in shown] for row in worst)]
    return (
        "<details><summary>Slowest requests (a Diptych cluster explains them: "
        f"<code>diptych explain ID</code>)</summary>{_table(rows)}</details>"
    )


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _origin(run: Document) -> str:
    machine = run["machine"]
    versions = ", ".join(f"{name} {value}" for name, value in run["versions"].items())
    config = ", ".join(f"{key}={value}" for key, value in run["config"].items() if value != "")
    return (
        f"<p class='setting'>{_e(run['started'])}; client on {_e(machine['cpu'])}, "
        f"{machine['cores']} cores, {machine['memory_gib']} GiB, {_e(machine['system'])}; "
        f"commit {_e(run['commit'] or '-')}; {_e(versions)}.<br>{_e(config)}</p>"
    )


# ---- plots ---------------------------------------------------------------------------------------


def _plots(runs: list[Document], names: tuple[str, ...] = ("",)) -> str:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "diptych"  # equal runs, equal file
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), layout="constrained")
    axes = figure.subplots(2, 3).flatten()
    targets = _targets(runs[0])
    _shares(axes[0], runs, names, ["ttft_ms"], "time to first token", targets["ttft"])
    kinds = ["itl_ms", "second_token_ms"]
    _shares(axes[1], runs, names, kinds, "gaps between tokens", targets["itl"])
    _offered(axes[2], runs, names)
    _lengths(axes[3], runs, names)
    _time_axis(axes[4], runs, names)
    _requests(axes[5], runs, names, targets["ttft"])
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue().split("?>", 1)[-1].split('dtd">', 1)[-1]


def _targets(run: Document) -> dict[str, float]:
    """In ms."""
    from .plan import Plan

    slo = Plan(slo=run["config"]["slo"]).targets
    return {"ttft": slo.ttft_s * 1e3, "itl": slo.itl_s * 1e3}


def _shares(axis, runs, names, kinds, title, target) -> None:
    """Cumulative; a second kind is dashed."""
    for run, name, color in zip(runs, names, COLORS, strict=False):
        for kind, style in zip(kinds, ("-", "--"), strict=False):
            values = run["distributions"][kind]
            label = kind.removesuffix("_ms").replace("_", " ").replace("itl", "every gap")
            label = label.replace("ttft", "first token")
            if values:
                shares = run["distributions"]["quantiles"]
                shown = [max(value, 0.05) for value in values]
                axis.plot(
                    shown, shares, style, color=color, lw=1.6, label=f"{name} {label}".strip()
                )
    axis.axvline(target, color=MISS, lw=1, ls=":", label=f"target {target:g} ms")
    axis.set(title=title, xscale="log", xlabel="ms", ylabel="share of them", ylim=(0, 1.02))
    _decimal(axis.xaxis)
    axis.legend(fontsize=7, loc="lower right")
    axis.grid(alpha=0.25)


CROWDED = 1000  #: largest by smallest: beyond, labels would overlap


def _decimal(axis) -> None:
    """1, 2, 5, 10 .. as they are spoken."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    steps = (1.0, 2.0, 5.0) if high / low < CROWDED else (1.0,)
    axis.set_major_locator(LogLocator(subs=steps, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _offered(axis, runs, names) -> None:
    """Stages where there are several, else pieces of the timeline."""
    most = 0.0
    for run, name, color in zip(runs, names, COLORS, strict=False):
        staged = len(run["stages"]) > 1
        points = run["stages"] if staged else run["timeline"]
        pairs = sorted((p["offered_per_s"], p["good_per_s"]) for p in points if p["offered_per_s"])
        if pairs:
            xs, ys = zip(*pairs, strict=True)
            axis.plot(xs, ys, "o-" if staged else "o", color=color, ms=4, label=name or "met")
            most = max(most, *xs)
    axis.plot([0, most], [0, most], color="#9aa7b5", lw=1, ls="--", label="all met")
    axis.set(title="goodput against offered rate", xlabel="offered, requests/s", ylabel="met, /s")
    axis.legend(fontsize=7)
    axis.grid(alpha=0.25)


def _lengths(axis, runs, names) -> None:
    width = 0.8 / len(runs)
    for number, (run, name, color) in enumerate(zip(runs, names, COLORS, strict=False)):
        rows = run["deciles"]
        places = [place + (number - (len(runs) - 1) / 2) * width for place in range(len(rows))]
        axis.bar(places, [row["goodput"] for row in rows], width * 0.95, color=color, label=name)
    rows = runs[0]["deciles"]
    labels = [f"≤{row['longest']}" for row in rows]
    axis.set_xticks(range(len(rows)), labels, fontsize=7, rotation=45)
    axis.set(title="met by prompt length, tenths", xlabel="prompt tokens", ylim=(0, 1.02))
    if len(runs) > 1:
        axis.legend(fontsize=7, loc="lower left")


def _time_axis(axis, runs, names) -> None:
    for run, name, color in zip(runs, names, COLORS, strict=False):
        at = [row["at_s"] for row in run["timeline"]]
        offered = [row["offered_per_s"] for row in run["timeline"]]
        met = [row["good_per_s"] for row in run["timeline"]]
        axis.step(at, offered, where="post", color=color, lw=1, ls="--", label=f"{name} offered/s")
        axis.step(at, met, where="post", color=color, lw=1.8, label=f"{name} met/s")
        running = [row["running"] for row in run["timeline"]]
        axis.step(
            at, running, where="post", color=color, lw=0.8, alpha=0.5, label=f"{name} running"
        )
    axis.set(title="timeline", xlabel="s since the start", ylim=(0, None))
    axis.legend(fontsize=7)
    axis.grid(alpha=0.25)


SHOWN = 1500  #: points of a scatter plot


def _requests(axis, runs, names, target) -> None:
    """TTFT of each request by its arrival; missed ones (for any reason) are red."""
    for run, name, color in zip(runs, names, COLORS, strict=False):
        place = {name: number for number, name in enumerate(run["columns"])}
        served = [row for row in run["requests"] if row[place["ttft_ms"]] is not None]
        rows = served[:: max(1, len(served) // SHOWN)]
        for met, shade in ((True, color), (False, MISS)):
            chosen = [row for row in rows if (not row[place["missed"]]) == met]
            if chosen:
                axis.scatter(
                    [row[place["at_s"]] for row in chosen],
                    [max(0.1, row[place["ttft_ms"]]) for row in chosen],
                    s=7,
                    color=shade,
                    label=f"{name} {'met' if met else 'missed'}".strip(),
                )
    axis.axhline(target, color=MISS, lw=1, ls=":")
    axis.set(title="first token of each request", xlabel="s since the start", ylabel="ms")
    axis.set_yscale("log")
    _decimal(axis.yaxis)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7)
