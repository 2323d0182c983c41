"""How far a long command is, on stderr: a bar on a terminal, lines elsewhere.

Nothing of it goes to stdout, where results go. rich is imported on a terminal alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, Task

#: A line that says how many steps follow it, a line for each: "48 layouts of 3 fleets".
STEPS_LINE = re.compile(r"(\d+) layouts of \d+ fleets")


def print_line(line: str) -> None:
    """Print progress on stderr, at once."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def step_progress(title: str) -> Iterator[Callable[[str], None]]:
    """Yield what prints the lines of a long work; on a terminal a bar moves on below them.

    The bar says for how long the work has run. Once a line has said how many steps follow
    (`STEPS_LINE`), each line is a step, and the bar says how long the others will take.
    """
    if not sys.stderr.isatty():
        yield print_line
        return
    with _bar() as bar:
        task = bar.add_task(title, total=None)

        def report(line: str) -> None:
            bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
            steps = STEPS_LINE.match(line)
            if steps:
                bar.update(task, total=int(steps[1]))
            elif bar.tasks[0].total is not None:
                bar.advance(task)

        yield report


@contextmanager
def count_progress(title: str, total: int, line_every: int) -> Iterator[Callable[[], None]]:
    """Yield what is called for each of `total` things that is done.

    On a terminal a bar moves on; elsewhere each `line_every` things are a line.
    """
    done = 0
    if not sys.stderr.isatty():

        def count() -> None:
            nonlocal done
            done += 1
            if done % line_every == 0 or done == total:
                print_line(f"{title}: {done} of {total}")

        yield count
        return
    with _bar() as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)


def _bar() -> Progress:
    """Return a bar on stderr, which vanishes when the work is done."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        ProgressColumn,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.text import Text

    class TimeLeftColumn(ProgressColumn):
        """The time that is left, as far as it can be known."""

        def render(self, task: Task) -> Text:
            return Text(time_left(task.total, task.completed, task.elapsed))

    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TimeElapsedColumn(),
        TimeLeftColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def time_left(total: float | None, completed: float, elapsed_s: float | None) -> str:
    """Return how long the rest takes if it goes on as it went; empty while that is unknown."""
    if not total or not completed or not elapsed_s:
        return ""
    if completed >= total:
        return "ending"
    left_s = elapsed_s * (total - completed) / completed
    minutes, seconds = divmod(round(left_s), 60)
    return f"about {minutes} min {seconds:02d} s left" if minutes else f"about {seconds} s left"
