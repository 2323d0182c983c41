"""The `diptych` command. Importing it imports neither ray nor torch: commands do, when they run."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from . import (
    batch,
    bench,
    bench_gateway,
    bench_live,
    bench_planner,
    bench_policies,
    bench_transfer,
    chat,
    config,
    doctor,
    explain,
    install_engine,
    keys,
    loadtest,
    model,
    render,
    roles,
    run,
    scale,
    serve,
    simulate,
    status,
    top,
)

#: Each command is a function of a sibling file, mostly the file of its name; `bench`, `config`,
#: `keys`, `loadtest` and `model` have commands of their own below them.
app = typer.Typer(
    name="diptych",
    help="Serves open-weight LLMs from a cluster that separates prefill from decode.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(serve.serve)
app.command()(install_engine.install_engine)
app.command()(chat.chat)
app.command()(run.run)
app.command()(batch.batch)
app.command()(status.status)
app.command()(top.top)
app.command()(doctor.doctor)
app.command()(scale.scale)
app.command()(roles.drain)
app.command()(roles.undrain)
app.command()(roles.flip)
app.command()(explain.explain)
app.command()(explain.replay)
app.command()(simulate.simulate)
app.command()(simulate.plan)
bench.app.command()(bench_transfer.transfer)
bench.app.command()(bench_gateway.gateway)
bench.app.command()(bench_planner.planner)
bench.app.command()(bench_policies.policies)
bench.app.command()(bench_live.live)
app.command()(render.render)
app.add_typer(bench.app, name="bench")
app.add_typer(config.app, name="config")
app.add_typer(keys.app, name="keys")
app.add_typer(model.app, name="model")
app.add_typer(loadtest.app, name="loadtest")


@app.callback(invoke_without_command=True)
def _root(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if show_version:
        typer.echo(f"diptych {version('diptych')}")
        raise typer.Exit


def main() -> None:
    """Run the command that the arguments name.

    Exit codes: 0 ok, 1 failed, 2 usage, 3 degraded, 4 a gate missed, 130 after ^C.
    """
    app()
