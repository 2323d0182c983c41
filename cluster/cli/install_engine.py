"""`diptych install-engine`: makes the environment in which workers compute with vLLM."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .common import fail


class InstallableEngine(StrEnum):
    """Engines that are installed apart from Diptych."""

    VLLM = "vllm"


class EngineDevice(StrEnum):
    """What the engine is to compute on."""

    CPU = "cpu"
    CUDA = "cuda"


def install_engine(
    engine: Annotated[InstallableEngine, typer.Argument(help="The engine.")],
    into: Annotated[
        Path | None,
        typer.Option(help="Folder of the environment. Default: ~/.cache/diptych/engines/vllm."),
    ] = None,
    hardware: Annotated[
        EngineDevice, typer.Option(help="What it computes on. Only cpu serves so far.")
    ] = EngineDevice.CPU,
) -> None:
    """Install an engine into an environment of its own, for `diptych serve --engine`."""
    from ..config import ConfigError
    from ..launch.engine_environment import DEFAULT_FOLDER, install

    began = time.monotonic()

    def report(line: str) -> None:
        typer.echo(f"[{time.monotonic() - began:5.1f} s] {line}")

    folder = into or DEFAULT_FOLDER
    try:
        installed = install(folder, hardware.value, report)
    except ConfigError as error:
        fail(str(error))
    report(f"vLLM {installed} is ready")
    python = ""
    if into is not None:
        python = f" --set engine.python={folder.expanduser() / 'bin' / 'python'}"
    typer.echo(f"\n  try    diptych serve MODEL --engine {engine.value}{python}\n")
