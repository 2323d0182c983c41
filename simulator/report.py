"""A study as text, and as one HTML file with plots inside."""

from __future__ import annotations

import html
import io
from math import nan

COLUMNS = (
    *("POLICY", "VARIANT", "SPLIT", "G90", "G99", "G99 SPLIT", "OF BOUND", "G99 OF BOUND"),
    *("MET", "RATE", "REFUSED", "TTFT P50", "TTFT P99", "TPOT P99", "GAP1 P99", "HIT", "LOCAL"),
)


def text(study: dict) -> str:
    """One row a policy; rates per second and GPU, times in ms. OF BOUND: of the simulated one."""
    bounds = "  ".join(f"{k.replace('_', ' G')} {v:.3f}" for k, v in study["bound_per_gpu"].items())
    lines = [
        f"trace {study['trace']}, {study['requests']} requests; {study['model']} on "
        f"{study['fleet']}; {study['slo']}; {study['seeds']} seeds, {study['dispatch']}",
        f"bound, requests/s/GPU: {bounds}",
    ]
    rows = [list(COLUMNS), *(_row(entry) for entry in study["policies"])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]))
    lines.append("met by prompt length, shortest tenth first (at RATE):")
    for entry in study["policies"]:
        if "at_rate" in entry:
            tenths = " ".join(f"{share:.3f}" for share in entry["at_rate"]["deciles"])
            lines.append(f"  {entry['name'].ljust(widths[0])} {entry['variant']:11} {tenths}")
    lines += _tenants(study["policies"])
    if "live" in study:
        live = study["live"]
        lines.append(f"live: {live['attainment']:.3f} met, {live['points_apart']:.1f} points apart")
    if "agreement" in study:
        lines += _agreement(study["agreement"])
    lines.append(
        f"{study['requests_simulated']:,} requests simulated in {study['seconds']} s: "
        f"{study['requests_per_s_simulated']:,} requests/s"
    )
    return "\n".join(lines)


def _agreement(found: dict) -> list[str]:
    lines = [f"both fidelities, {found['policy']} {found['split']}, {found['requests']} requests:"]
    for name in ("event_skipping", "step_exact"):
        one = found[name]
        lines.append(
            f"  {name:14} met {one['attainment']:.3f}  TTFT p50 {one['ttft_p50'] * 1e3:.0f} ms  "
            f"TPOT p50 {one['tpot_p50'] * 1e3:.2f} ms  {one['requests_per_s']:,} requests/s"
        )
    return lines


def _tenants(policies: list[dict]) -> list[str]:
    named = [p for p in policies if len(p.get("at_rate", {}).get("tenants", {})) > 1]
    lines = ["met by tenant (lowest eight):"] if named else []
    for entry in named:
        worst = sorted(entry["at_rate"]["tenants"].items(), key=lambda item: item[1])[:8]
        lines.append(f"  {entry['name']}: " + "  ".join(f"{name} {v:.3f}" for name, v in worst))
    return lines


def _row(entry: dict) -> list[str]:
    at = entry.get("at_rate", {})

    def number(value: float | None, form: str = ".3f") -> str:
        return "-" if value is None else format(value, form)

    def ms(kind: str, rank: str) -> str:
        value = at.get(kind, {}).get(rank)
        return "-" if value is None else f"{value * 1e3:.0f}"

    return [
        entry["name"],
        entry["variant"],
        entry["split"],
        number(entry["g90_per_gpu"]),
        number(entry["g99_per_gpu"]),
        entry["g99_split"] or "-",
        number(entry["bound_share"], ".0%"),
        number(entry.get("g99_bound_share"), ".0%"),
        number(at.get("attainment")),
        number(entry["rate_per_gpu"]),
        str(at.get("refused", "-")),
        ms("ttft", "p50"),
        ms("ttft", "p99"),
        ms("tpot", "p99"),
        ms("first_gap", "p99"),
        number(at.get("prefix_hit"), ".0%"),
        number(at.get("local"), ".0%"),
    ]


# ---- html ----------------------------------------------------------------------------------------

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; color: #1c2733; }
table { border-collapse: collapse; font-size: 12.5px; display: block; overflow-x: auto; }
td, th { padding: .25rem .55rem; text-align: right; border-bottom: 1px solid #dde3ea; }
td:first-child, th:first-child { text-align: left; } th { color: #5b6b7b; font-weight: 600; }
tr.ours td { font-weight: 600; background: #eef5ff; } svg { max-width: 100%; height: auto; }
p { max-width: 60rem; }
"""


def document(study: dict) -> str:
    """Self-contained HTML: table, plots as inline SVG."""
    head = "".join(f"<th>{column}</th>" for column in COLUMNS)
    body = "".join(
        f"<tr class='{'ours' if entry['name'] == 'diptych' else ''}'>"
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in _row(entry))
        + "</tr>"
        for entry in study["policies"]
    )
    title = f"{study['trace']}: {study['model']} on {study['fleet']}"
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(title)}</title>"
        f"<style>{STYLE}</style><h1>{html.escape(title)}</h1>"
        f"<p>{study['requests']} requests, {html.escape(study['slo'])}, {study['seeds']} seeds, "
        f"{study['dispatch']}. A request is met if its first token and its gaps keep the targets, "
        "the gap between first and second token included; refusals are misses. G90 and G99: the "
        "largest offered rate per GPU at which 90 % and 99 % are met. The bound is a fluid linear "
        "program that no policy beats on the simulated hardware.</p>"
        f"{_plots(study)}<table><tr>{head}</tr>{body}</table></html>"
    )


def _plots(study: dict) -> str:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "diptych"  # equal study, equal file
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8.5), layout="constrained")
    axes = figure.subplots(2, 2)
    _goodput(axes[0][0], study)
    _deciles(axes[0][1], study)
    _percentiles(axes[1][0], study, "ttft", "first token, s")
    _percentiles(axes[1][1], study, "tpot", "mean gap, s")
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue().split("?>", 1)[-1].split('dtd">', 1)[-1]


def _label(entry: dict) -> str:
    return f"{entry['name']} ({'full' if entry['variant'] == 'full' else 'policy'})"


def _goodput(axis, study: dict) -> None:
    found = [entry for entry in study["policies"] if entry["g90_per_gpu"] is not None]
    axis.set_title("goodput, requests/s/GPU" if found else "attainment")
    if not found:
        names = [_label(entry) for entry in study["policies"]]
        axis.barh(names, [entry["at_rate"]["attainment"] for entry in study["policies"]])
        axis.invert_yaxis()
        return
    places = range(len(found))
    for offset, key, color in ((-0.2, "g90_per_gpu", "#9db8d9"), (0.2, "g99_per_gpu", "#2f6db5")):
        values = [entry[key] or nan for entry in found]
        axis.barh([p + offset for p in places], values, 0.38, label=key[:3].upper(), color=color)
    for key, color in (("simulated_90", "#9db8d9"), ("simulated_99", "#2f6db5")):
        axis.axvline(study["bound_per_gpu"][key], ls="--", color=color, label=f"bound G{key[-2:]}")
    axis.set_yticks(list(places), [_label(entry) for entry in found], fontsize=7)
    axis.invert_yaxis()
    axis.legend(fontsize=7)


def _deciles(axis, study: dict) -> None:
    axis.set_title("met by prompt length (at RATE)")
    for entry in study["policies"]:
        if "at_rate" in entry:
            width = 2.5 if entry["name"] == "diptych" else 1.0
            axis.plot(range(1, 11), entry["at_rate"]["deciles"], lw=width, label=_label(entry))
    axis.set_xlabel("tenth of the prompts, shortest first")
    axis.set_ylim(0, 1.02)
    axis.legend(fontsize=6, ncols=2)


def _percentiles(axis, study: dict, kind: str, title: str) -> None:
    axis.set_title(f"{title} (p50, p90, p99)")
    named = [entry for entry in study["policies"] if entry.get("at_rate", {}).get(kind)]
    for rank, color in (("p99", "#d7e3f4"), ("p90", "#8fb3e0"), ("p50", "#2f6db5")):
        values = [entry["at_rate"][kind][rank] for entry in named]
        axis.barh(range(len(named)), values, 0.7, label=rank, color=color)
    axis.set_yticks(range(len(named)), [_label(entry) for entry in named], fontsize=7)
    axis.invert_yaxis()
    axis.legend(fontsize=7)
