"""`diptych bench policies`: our policy beside others' in virtual time, on named cells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .common import check_output, fail, save
from .progress import step_progress
from .simulate import JobsOption, OutputOption


def policies(
    traces: Annotated[
        Path,
        typer.Option(help="Folder of the public traces; their names: bench/policies/cells.py."),
    ],
    folder: Annotated[
        Path, typer.Option(help="For results; what is there is not searched again.")
    ] = Path("build/policies"),
    cells: Annotated[
        str, typer.Option(help="twelve, more, all, or names of cells: conversation-2s-50ms,...")
    ] = "twelve",
    policy: Annotated[
        list[str] | None, typer.Option(help="A rival; may be given several times. Default: all.")
    ] = None,
    variant: Annotated[
        str,
        typer.Option(
            help="full: rivals as their authors ship them; policy-only: all but the policy is ours; "
            "deadline-order: that too, and workers compute prompts by deadline."
        ),
    ] = "full",
    seeds: Annotated[int, typer.Option(min=1, help="Loads drawn of each trace.")] = 3,
    jobs: JobsOption = None,
    output: OutputOption = "table",
) -> None:
    """Find the best rate of our policy and of others, each on its best split; say who is ahead."""
    check_output(output)
    from ...loadtests.machine import describe
    from ...simulator import SimulationError, entry
    from ...simulator.case import Variant
    from ...simulator.documents import OWN_POLICY
    from ...simulator.study import parse_policies
    from ..bench.policies import table
    from ..bench.policies.cells import GROUPS, chosen_cells
    from ..bench.policies.searches import EARLY_REJECT, PolicySearch, run_searches

    if variant not in tuple(Variant):
        fail(f"--variant {variant}: expected one of {', '.join(Variant)}", 2)
    try:
        wanted_cells = chosen_cells(cells)
    except ValueError as error:
        fail(f"--cells: {error}", 2)
    try:
        names = parse_policies(policy or ["all"])
        rivals = [name for name in names if name != OWN_POLICY]
        # Under our own policy the variant changes nothing: all tables share its searches.
        searches = [
            PolicySearch(cell, traces, name, chosen_variant, seeds)
            for cell in wanted_cells
            for name, chosen_variant in [
                (OWN_POLICY, str(Variant.POLICY_ONLY)),
                (OWN_POLICY, EARLY_REJECT),
                *((rival, variant) for rival in rivals),
            ]
        ]
        with step_progress("searching") as report:
            results = run_searches(
                searches,
                folder,
                jobs=jobs or entry.available_cores(),
                commit=describe()["commit"] or "",
                report=report,
            )
    except SimulationError as error:
        fail(str(error), 2)
    except KeyboardInterrupt:
        fail("interrupted; the same command goes on where it ended", 130)
    comparisons = table.compare(results)
    document = table.document(comparisons, variant)
    page = table.markdown(comparisons, variant)
    typer.echo(json.dumps(document, indent=2) if output == "json" else page.rstrip())
    if cells in GROUPS and not policy:  # a whole table: its pages are not those of a part of it
        save(folder / f"{cells}.{variant}.json", json.dumps(document, indent=2))
        save(folder / f"{cells}.{variant}.md", page)
