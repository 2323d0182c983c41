"""A study as text, and as one HTML file with its plots inside.

A study runs policies of the router on one trace in the simulator. G90 (G99) is the largest offered
rate per GPU at which 90 % (99 %) of the requests meet their targets. TTFT is the time to the first
token, TPOT the mean gap between two tokens, GAP1 the first gap.
"""

from __future__ import annotations

import html
import io
from math import nan
from typing import TYPE_CHECKING, Literal

from .documents import OWN_POLICY, Agreement, PolicyEntry, RunFigures, StudyDocument

if TYPE_CHECKING:  # of plots only: matplotlib is slow to import
    from matplotlib.axes import Axes

COLUMNS = (
    "POLICY",
    "VARIANT",
    "SPLIT",
    "G90",
    "G99",
    "G99 SPLIT",
    "OF BOUND",
    "G99 OF BOUND",
    "MET",
    "RATE",
    "REFUSED",
    "TTFT P50",
    "TTFT P95",
    "TTFT P99",
    "OFFERED P95",
    "OFFERED P99",
    "TPOT P99",
    "GAP1 P99",
    "HIT",
    "LOCAL",
)
TENANTS_SHOWN = 8  #: in the text, which says "lowest eight"
NO_FIGURE = "-"  #: of what was not measured, or not searched
REFUSED_FIGURE = "refused"  #: of a percentile that falls on a request without an answer
Latency = Literal["ttft", "tpot", "first_gap"]  #: keys of `RunFigures` with percentiles


def study_text(study: StudyDocument) -> str:
    """Return a table with a row for each policy, and what else the study found.

    Rates are per second and GPU, times in ms. OF BOUND is G90 by the simulated bound; MET, and
    all to the right of RATE, are figures of a run at that rate. TTFT, TPOT and GAP1 are of the
    served requests; OFFERED is the TTFT over all requests, with refused ones behind all others.
    """
    bounds = [
        f"{name.replace('_', ' G')} {value:.3f}" for name, value in study["bound_per_gpu"].items()
    ]
    lines = [
        f"trace {study['trace']}, {study['requests']} requests; {study['model']} on "
        f"{_fleet_text(study)}; {study['slo']}; {study['seeds']} seeds, "
        f"{study['dispatch']}",
        study["engine"],
        *study["fit_warnings"],
        f"bound, requests/s/GPU: {'  '.join(bounds)}",
    ]
    rows = [list(COLUMNS), *(_row(entry) for entry in study["policies"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        lines.append("  ".join(cells))

    lines += _decile_lines(study["policies"], widths[0])
    lines += _tenant_lines(study["policies"])
    lines += _interval_lines(study["policies"])
    lines += _expense_lines(study["policies"])
    if "live" in study:
        live = study["live"]
        lines.append(f"live: {live['attainment']:.3f} met, {live['points_apart']:.1f} points apart")
    if "agreement" in study:
        lines += _agreement_lines(study["agreement"])
    lines.append(
        f"{study['requests_simulated']:,} requests simulated in {study['seconds']} s: "
        f"{study['requests_per_s_simulated']:,} requests/s"
    )
    return "\n".join(lines)


def _interval_lines(policies: list[PolicyEntry]) -> list[str]:
    """Return between which rates G90 and G99 lie, of policies for which they were searched."""
    lines: list[str] = []
    for entry in policies:
        if "g90_interval" in entry and "g99_interval" in entry:
            g90 = " to ".join(f"{rate:.3f}" for rate in entry["g90_interval"])
            g99 = " to ".join(f"{rate:.3f}" for rate in entry["g99_interval"])
            lines.append(f"  {entry['name']} {entry['variant']}: G90 {g90}, G99 {g99}")
    return ["between which rates, of each seed by itself:", *lines] if lines else []


def _expense_lines(policies: list[PolicyEntry]) -> list[str]:
    """Return what an answered token takes and costs, of policies for which that is known."""
    lines: list[str] = []
    for entry in policies:
        if "joules_per_token" in entry:
            text = f"  {entry['name']} {entry['variant']}: {entry['joules_per_token']:.3g} J"
            if "price_per_million_tokens" in entry:
                text += f", {entry['price_per_million_tokens']:.3g} for a million"
            lines.append(text)
    title = "a token of an answer in time at RATE, with GPUs at their full power:"
    return [title, *lines] if lines else []


def _decile_lines(policies: list[PolicyEntry], name_width: int) -> list[str]:
    lines = ["met by prompt length, shortest tenth first (at RATE):"]
    for entry in policies:
        if "at_rate" in entry:
            tenths = " ".join(f"{share:.3f}" for share in entry["at_rate"]["deciles"])
            lines.append(f"  {entry['name'].ljust(name_width)} {entry['variant']:14} {tenths}")
    return lines


def _tenant_lines(policies: list[PolicyEntry]) -> list[str]:
    """Return the tenants with the lowest attainment, of policies with several tenants."""
    lines: list[str] = []
    for entry in policies:
        if "at_rate" not in entry or len(entry["at_rate"]["tenants"]) < 2:
            continue
        tenants = sorted(entry["at_rate"]["tenants"].items(), key=lambda item: item[1])
        shares = [f"{tenant} {share:.3f}" for tenant, share in tenants[:TENANTS_SHOWN]]
        lines.append(f"  {entry['name']}: " + "  ".join(shares))
    return ["met by tenant (lowest eight):", *lines] if lines else []


def _agreement_lines(agreement: Agreement) -> list[str]:
    lines = [
        f"both fidelities, {agreement['policy']} {agreement['split']}, "
        f"{agreement['requests']} requests:"
    ]
    for name, figures in (
        ("event_skipping", agreement["event_skipping"]),
        ("step_exact", agreement["step_exact"]),
    ):
        lines.append(
            f"  {name:14} met {figures['attainment']:.3f}  "
            f"TTFT p50 {figures['ttft_p50'] * 1e3:.0f} ms  "
            f"TPOT p50 {figures['tpot_p50'] * 1e3:.2f} ms  "
            f"{figures['requests_per_s']:,} requests/s"
        )
    return lines


def _row(entry: PolicyEntry) -> list[str]:
    """Return a policy's cells, in the order of `COLUMNS`."""
    cells = [
        entry["name"],
        entry["variant"],
        entry["split"],
        _number(entry["g90_per_gpu"]),
        _number(entry["g99_per_gpu"]),
        entry["g99_split"] or NO_FIGURE,
        _percent(entry["bound_share"]),
        _percent(entry.get("g99_bound_share")),
    ]
    rate = _number(entry["rate_per_gpu"])
    if "at_rate" not in entry:  # not even the lowest rate was held: there are no figures
        missing = [NO_FIGURE] * (len(COLUMNS) - len(cells) - 2)
        return [*cells, NO_FIGURE, rate, *missing]
    figures = entry["at_rate"]
    return [
        *cells,
        _number(figures["attainment"]),
        rate,
        str(figures["refused"]),
        _milliseconds(figures, "ttft", "p50"),
        _milliseconds(figures, "ttft", "p95"),
        _milliseconds(figures, "ttft", "p99"),
        _offered_milliseconds(figures, "p95"),
        _offered_milliseconds(figures, "p99"),
        _milliseconds(figures, "tpot", "p99"),
        _milliseconds(figures, "first_gap", "p99"),
        _percent(figures["prefix_hit"]),
        _percent(figures["local"]),
    ]


def _number(value: float | None) -> str:
    return NO_FIGURE if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return NO_FIGURE if value is None else f"{value:.0%}"


def _milliseconds(figures: RunFigures, latency: Latency, rank: str) -> str:
    seconds = figures[latency].get(rank)
    return NO_FIGURE if seconds is None else f"{seconds * 1e3:.0f}"


def _offered_milliseconds(figures: RunFigures, rank: str) -> str:
    """Return a percentile over all offered requests; it may fall on one that was refused."""
    seconds = figures["ttft_offered"].get(rank)
    return REFUSED_FIGURE if seconds is None else f"{seconds * 1e3:.0f}"


# ---- html ----------------------------------------------------------------------------------------

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; color: #1c2733; }
table { border-collapse: collapse; font-size: 12.5px; display: block; overflow-x: auto; }
td, th { padding: .25rem .55rem; text-align: right; border-bottom: 1px solid #dde3ea; }
td:first-child, th:first-child { text-align: left; } th { color: #5b6b7b; font-weight: 600; }
tr.ours td { font-weight: 600; background: #eef5ff; } svg { max-width: 100%; height: auto; }
p { max-width: 60rem; }
"""
LIGHT = "#9db8d9"  #: of G90
DARK = "#2f6db5"  #: of G99
#: Percentiles with their colours; the bars are drawn one over another, the longest first.
RANK_COLORS = (("p99", "#d7e3f4"), ("p90", "#8fb3e0"), ("p50", DARK))


def _fleet_text(study: StudyDocument) -> str:
    """Return the fleet, what is below its workers' pools, and into how many cells it is divided."""
    text = study["fleet"]
    if study["tiers"]:
        text += f" with tiers {study['tiers']}"
    if study["cells"] > 1:
        text += f" in {study['cells']} cells"
    return text


def study_page(study: StudyDocument) -> str:
    """Return self-contained HTML: the table, and plots as inline SVG.

    Equal studies give equal pages.
    """
    title = html.escape(f"{study['trace']}: {study['model']} on {_fleet_text(study)}")
    head = "".join(f"<th>{column}</th>" for column in COLUMNS)
    body = "".join(_table_row(entry) for entry in study["policies"])
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{title}</title>"
        f"<style>{STYLE}</style><h1>{title}</h1>"
        f"<p>{study['requests']} requests, {html.escape(study['slo'])}, {study['seeds']} seeds, "
        f"{study['dispatch']}; {html.escape(study['engine'])}. A request is met if its first token and its gaps keep the targets, "
        "the gap between first and second token included; refusals are misses. OFFERED is the time to the first token over all requests, "
        "with refused ones behind all others. G90 and G99: the "
        "largest offered rate per GPU at which 90 % and 99 % are met. The bound is a fluid linear "
        "program that no policy beats on the simulated hardware.</p>"
        f"{_plots(study)}<table><tr>{head}</tr>{body}</table></html>"
    )


def _table_row(entry: PolicyEntry) -> str:
    css_class = "ours" if entry["name"] == OWN_POLICY else ""
    cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in _row(entry))
    return f"<tr class='{css_class}'>{cells}</tr>"


def _plots(study: StudyDocument) -> str:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "diptych"  # equal study, equal file
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8.5), layout="constrained")
    axes = figure.subplots(2, 2)
    _plot_goodput(axes[0][0], study)
    _plot_deciles(axes[0][1], study)
    _plot_percentiles(axes[1][0], study, "ttft", "first token, s")
    _plot_percentiles(axes[1][1], study, "tpot", "mean gap, s")
    image = io.StringIO()
    figure.savefig(image, format="svg", metadata={"Date": None})
    # HTML takes the <svg> element without the XML declaration and the document type before it.
    return image.getvalue().split("?>", 1)[-1].split('dtd">', 1)[-1]


def _label(entry: PolicyEntry) -> str:
    variant = "policy" if entry["variant"] == "policy-only" else entry["variant"]
    return f"{entry['name']} ({variant})"


def _plot_goodput(axes: Axes, study: StudyDocument) -> None:
    """Draw G90 and G99 beside their bounds; where none was searched, the attainment."""
    searched = [entry for entry in study["policies"] if entry["g90_per_gpu"] is not None]
    if not searched:
        labels = [_label(entry) for entry in study["policies"]]
        axes.set_title("attainment")
        axes.barh(labels, [entry["at_rate"]["attainment"] for entry in study["policies"]])
        axes.invert_yaxis()
        return

    axes.set_title("goodput, requests/s/GPU")
    places = range(len(searched))
    g90s = [entry["g90_per_gpu"] or nan for entry in searched]
    g99s = [entry["g99_per_gpu"] or nan for entry in searched]
    axes.barh([place - 0.2 for place in places], g90s, 0.38, label="G90", color=LIGHT)
    axes.barh([place + 0.2 for place in places], g99s, 0.38, label="G99", color=DARK)
    bounds = study["bound_per_gpu"]
    axes.axvline(bounds["simulated_90"], ls="--", color=LIGHT, label="bound G90")
    axes.axvline(bounds["simulated_99"], ls="--", color=DARK, label="bound G99")
    axes.set_yticks(list(places), [_label(entry) for entry in searched], fontsize=7)
    axes.invert_yaxis()
    axes.legend(fontsize=7)


def _plot_deciles(axes: Axes, study: StudyDocument) -> None:
    axes.set_title("met by prompt length (at RATE)")
    for entry in study["policies"]:
        if "at_rate" in entry:
            width = 2.5 if entry["name"] == OWN_POLICY else 1.0
            deciles = entry["at_rate"]["deciles"]  # fewer than ten of fewer requests
            axes.plot(range(1, len(deciles) + 1), deciles, lw=width, label=_label(entry))
    axes.set_xlabel("tenth of the prompts, shortest first")
    axes.set_ylim(0, 1.02)
    axes.legend(fontsize=6, ncols=2)


def _plot_percentiles(axes: Axes, study: StudyDocument, latency: Latency, title: str) -> None:
    axes.set_title(f"{title} (p50, p90, p99)")
    measured = [
        entry for entry in study["policies"] if "at_rate" in entry and entry["at_rate"][latency]
    ]
    places = range(len(measured))
    for rank, color in RANK_COLORS:
        seconds = [entry["at_rate"][latency][rank] for entry in measured]
        axes.barh(places, seconds, 0.7, label=rank, color=color)
    axes.set_yticks(places, [_label(entry) for entry in measured], fontsize=7)
    axes.invert_yaxis()
    axes.legend(fontsize=7)
