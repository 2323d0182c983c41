"""The plots of a report, as one SVG element for its HTML page. Equal runs with equal names give equal text.

A run is the document of `result.assemble`, as it stands in a JSON file; `outcomes.py` says what its
parts have. Those that are plotted:

    distributions  `quantiles`, shares from 0 to 1, and for each kind of latency the values in ms that
                   so many stay within; empty where nothing was served
    stages         of a load whose rate changes by steps: requests offered and met, per second
    timeline       the same for equal stretches of time from `at_s` on, counted where requests arrive;
                   and `running`, the mean number of served requests under way (a failed one has no end)
    deciles        tenths of the requests by prompt length, the shortest first, fewer for fewer than
                   ten requests: the longest prompt, and the share of these requests that were met
    requests       a row for each, with the values that `columns` names; `missed` says what was missed,
                   and is empty where nothing was

A request is met if it was answered without an error and kept its targets: of TTFT (time to the first
token) and of ITL (a limit for the mean of its gaps between tokens, and from 20 gaps on for their 99th
percentile too); else it is missed. Goodput is how many
requests were met, as a rate or as a share of those that were offered.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from math import ceil
from typing import Any, NamedTuple

from .plan import LoadPlan

COLORS = ("#2f6db5", "#d1742c")  #: first and second run
MISS = "#c0392b"  #: the color of targets, and of missed requests
DIAGONAL = "#9aa7b5"  #: the color of the line on which all offered requests are met
#: From this ratio of an axis's two ends on, only powers of ten are labelled: more would overlap.
CROWDED_RATIO = 1000
SCATTER_LIMIT = 1500  #: points of a run in the scatter plot, at most
#: Axes of latencies are logarithmic, where 0 has no place: smaller values are drawn at these, so that a
#: few of them do not make an axis long. The first is for the plots of shares, the second for points.
SMALLEST_SHARE_MS = 0.05
SMALLEST_POINT_MS = 0.1
Document = dict[str, Any]


class PlottedRun(NamedTuple):
    """A run, and how it is told from another one in the same plots."""

    run: Document
    name: str  #: empty where there is one run
    color: str

    def label(self, text: str) -> str:
        """Returns the label of a curve, with the run's name before it if it has one."""
        return f"{self.name} {text}".strip()


def plots_svg(runs: list[Document], names: tuple[str, ...] = ("",)) -> str:
    """Returns the plots of one run, or of two in one picture, as an SVG element.

    `names` has a name for each run. The targets that are drawn are the first run's. Raises ValueError
    for more runs than names.
    """
    import matplotlib  # here, as it takes a second and most commands draw nothing

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "diptych"  # equal runs, equal file
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    from matplotlib.figure import Figure

    if len(runs) > len(names):
        raise ValueError(f"{len(runs)} runs have {len(names)} names")
    plotted = [
        PlottedRun(run, name, color) for run, name, color in zip(runs, names, COLORS, strict=False)
    ]
    # `isolated` says how long prompts take alone, as in `20ms + 150ms/1k` (per 1,000 tokens). A target
    # like `max(1s, 3x)` has multiples of that; a run without such a target may not say it.
    targets = LoadPlan(
        slo=runs[0]["config"]["slo"], isolated=runs[0]["config"].get("isolated", "")
    ).targets
    # Of a TTFT target that depends on the prompt, `ttft_s` is what every prompt has at least: 1 s of
    # `max(1s, 3x)`. An ITL target never depends on it.
    ttft_ms = targets.ttft_s * 1e3
    itl_ms = targets.itl_s * 1e3
    figure = Figure(figsize=(12, 7), layout="constrained")
    axes = figure.subplots(2, 3).flatten()
    ttft_kinds = {"ttft_ms": "first token"}
    _plot_shares(axes[0], plotted, ttft_kinds, "time to first token", target_ms=ttft_ms)
    # The gap before the second token is one of `itl_ms`, and is drawn by itself too: the hand-over to
    # a decode worker lies in it.
    gap_kinds = {"itl_ms": "every gap", "second_token_ms": "second token"}
    _plot_shares(axes[1], plotted, gap_kinds, "gaps between tokens", target_ms=itl_ms)
    _plot_goodput_by_rate(axes[2], plotted)
    _plot_goodput_by_length(axes[3], plotted)
    _plot_timeline(axes[4], plotted)
    _plot_requests(axes[5], plotted, ttft_ms)

    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None})
    return _svg_element(written.getvalue())


def _svg_element(text: str) -> str:
    """Removes the XML declaration and the document type, which have no place inside HTML."""
    without_declaration = text.split("?>", 1)[-1]
    return without_declaration.split('dtd">', 1)[-1]


def _plot_shares(
    axis: Any, plotted: list[PlottedRun], kinds: dict[str, str], title: str, target_ms: float
) -> None:
    """Draws cumulative shares of each kind (key and label) of latency; a second kind is dashed."""
    for each in plotted:
        distributions = each.run["distributions"]
        for (kind, label), style in zip(kinds.items(), ("-", "--"), strict=False):
            values_ms = [max(value, SMALLEST_SHARE_MS) for value in distributions[kind]]
            if values_ms:
                shares = distributions["quantiles"]
                axis.plot(
                    values_ms, shares, style, color=each.color, lw=1.6, label=each.label(label)
                )
    axis.axvline(target_ms, color=MISS, lw=1, ls=":", label=f"target {target_ms:g} ms")
    axis.set(title=title, xscale="log", xlabel="ms", ylabel="share of all values", ylim=(0, 1.02))
    _label_decimally(axis.xaxis)
    axis.legend(fontsize=7, loc="lower right")
    axis.grid(alpha=0.25)


def _label_decimally(scale: Any) -> None:
    """Labels a logarithmic x or y axis at 1, 2, 5, 10 .., or a long one at 1, 10, 100 .., without exponents."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = scale.get_view_interval()
    steps = (1.0, 2.0, 5.0) if high / low < CROWDED_RATIO else (1.0,)
    scale.set_major_locator(LogLocator(subs=steps, numticks=12))
    scale.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.10g}"))
    scale.set_minor_formatter(NullFormatter())


def _plot_goodput_by_rate(axis: Any, plotted: list[PlottedRun]) -> None:
    """Draws the rate of met requests against the offered rate.

    There is a point for each stage of a run with several, else for each row of its timeline; without
    those in which no request was offered.
    """
    highest_rate = 0.0
    for each in plotted:
        has_stages = len(each.run["stages"]) > 1
        rows = each.run["stages"] if has_stages else each.run["timeline"]
        points = sorted(
            (row["offered_per_s"], row["good_per_s"]) for row in rows if row["offered_per_s"]
        )
        if points:
            offered, met = zip(*points, strict=True)
            style = "o-" if has_stages else "o"
            axis.plot(offered, met, style, color=each.color, ms=4, label=each.name or "met")
            highest_rate = max(highest_rate, *offered)
    diagonal = [0, highest_rate]
    axis.plot(diagonal, diagonal, color=DIAGONAL, lw=1, ls="--", label="all met")
    axis.set(title="goodput against offered rate", xlabel="offered, requests/s", ylabel="met, /s")
    axis.legend(fontsize=7)
    axis.grid(alpha=0.25)


def _plot_goodput_by_length(axis: Any, plotted: list[PlottedRun]) -> None:
    """Draws for each tenth by prompt length which share of its requests were met.

    Bars of two runs stand side by side. Each run has tenths of its own; the labels are the longest
    prompts of the first run's, so the plot compares runs of the same requests.
    """
    width = 0.8 / len(plotted)
    for number, each in enumerate(plotted):
        rows = each.run["deciles"]
        offset = (number - (len(plotted) - 1) / 2) * width
        places = [place + offset for place in range(len(rows))]
        heights = [row["goodput"] for row in rows]
        axis.bar(places, heights, width * 0.95, color=each.color, label=each.name)
    rows = plotted[0].run["deciles"]
    labels = [f"≤{row['longest']}" for row in rows]
    axis.set_xticks(range(len(rows)), labels, fontsize=7, rotation=45)
    axis.set(title="met by prompt length, tenths", xlabel="prompt tokens", ylim=(0, 1.02))
    if len(plotted) > 1:
        axis.legend(fontsize=7, loc="lower left")


def _plot_timeline(axis: Any, plotted: list[PlottedRun]) -> None:
    """Draws rates offered and met, and how many requests ran, over the time of the run."""
    curves: dict[str, dict[str, Any]] = {
        "offered_per_s": {"lw": 1, "ls": "--"},
        "good_per_s": {"lw": 1.8},
        "running": {"lw": 0.8, "alpha": 0.5},
    }
    labels = {"offered_per_s": "offered/s", "good_per_s": "met/s", "running": "running"}
    for each in plotted:
        timeline = each.run["timeline"]
        times_s = [row["at_s"] for row in timeline]
        for key, style in curves.items():
            values = [row[key] for row in timeline]
            label = each.label(labels[key])
            axis.step(times_s, values, where="post", color=each.color, label=label, **style)
    axis.set(title="timeline", xlabel="s since the start", ylim=(0, None))
    axis.legend(fontsize=7)
    axis.grid(alpha=0.25)


def _plot_requests(axis: Any, plotted: list[PlottedRun], target_ms: float) -> None:
    """Draws the TTFT of requests by their arrivals; those that were missed are red."""
    for each in plotted:
        for points, color, label in _request_points(each):
            if points:
                times_s, ttfts_ms = zip(*points, strict=True)
                axis.scatter(times_s, ttfts_ms, s=7, color=color, label=each.label(label))
    axis.axhline(target_ms, color=MISS, lw=1, ls=":")
    axis.set(title="first token of each request", xlabel="s since the start", ylabel="ms")
    axis.set_yscale("log")
    _label_decimally(axis.yaxis)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7)


class RequestPoints(NamedTuple):
    """Points of one color in the plot of requests."""

    points: list[tuple[float, float]]  #: seconds since the start, and TTFT in ms
    color: str
    label: str


def _request_points(each: PlottedRun) -> Iterator[RequestPoints]:
    """Yields the requests that were met, then those that were missed.

    Of more than `SCATTER_LIMIT` requests, every n-th is drawn. Those without a first token are not.
    """
    columns = each.run["columns"]
    at_column = columns.index("at_s")
    ttft_column = columns.index("ttft_ms")
    missed_column = columns.index("missed")
    served = [row for row in each.run["requests"] if row[ttft_column] is not None]
    drawn = served[:: max(1, ceil(len(served) / SCATTER_LIMIT))]

    def points_of(rows: list[list[Any]]) -> list[tuple[float, float]]:
        return [(row[at_column], max(SMALLEST_POINT_MS, row[ttft_column])) for row in rows]

    met = [row for row in drawn if not row[missed_column]]
    missed = [row for row in drawn if row[missed_column]]
    yield RequestPoints(points_of(met), each.color, "met")
    yield RequestPoints(points_of(missed), MISS, "missed")
