"""What the name of an image stands for. The box has no images: this machine is the image.

A pod sees this machine's own file system, writes into a layer of its own, and finds here and there
what a real image would have brought: a home directory, and programs in /usr/local/bin.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from . import settings

HOMES = Path("/home")
PYTHON_PROGRAMS = ("ray", "serve", "diptych", "python")


@dataclass(frozen=True, slots=True)
class Image:
    """An image, as far as the box needs one."""

    names: tuple[str, ...]  #: Patterns of the names that stand for it.
    user: int
    home: str = "/"
    #: Files and folders of this machine that are hidden in a pod, and shown read-only in this image.
    shown: dict[str, Path] = field(default_factory=dict)
    copied: dict[str, Path] = field(default_factory=dict)  #: Files that the user gets as its own.
    programs: dict[str, str] = field(default_factory=dict)  #: Their texts by path.
    environment: dict[str, str] = field(default_factory=dict)


def _python_image(names: tuple[str, ...], home: str) -> Image:
    environment_folder = settings.python_folder()
    python_home = Path(sys.base_prefix)
    programs = {
        f"/usr/local/bin/{name}": f'#!/bin/sh\nexec {environment_folder}/bin/{name} "$@"\n'
        for name in PYTHON_PROGRAMS
    }
    drain = settings.REPOSITORY / "deploy/docker/drain.sh"
    programs["/usr/local/bin/diptych-drain"] = drain.read_text()
    # Compiled once here, not once in each pod: that took a minute of both cores for each fleet.
    kernels = (Path.home() / ".cache/diptych").glob("kernels-*.so")
    shown = [settings.REPOSITORY, environment_folder, python_home]
    environment = {"HOME": home, "PYTHONUNBUFFERED": "1"}
    if "PYTHONPATH" in os.environ:
        environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
    return Image(
        names=names,
        user=1000,
        home=home,
        shown={str(path): path for path in shown},
        copied={f"{home}/.cache/diptych/{kernel.name}": kernel for kernel in kernels},
        programs=programs,
        environment=environment,
    )


def all_images() -> list[Image]:
    """Return the images of the box."""
    images = [
        _python_image(("diptych:*", "*/diptych:*"), str(HOMES / "diptych")),
        _python_image(("rayproject/ray:*",), str(HOMES / "ray")),
        Image(names=("redis:*",), user=999),  # Debian's redis-server, as it is installed here
    ]
    operator = settings.operator_program()
    if operator is not None:
        shown = {"/manager": operator}
        images.append(Image(names=("*kuberay/operator:*",), user=65532, shown=shown))
    return images


def find_image(images: list[Image], name: str) -> Image | None:
    for image in images:
        if any(fnmatch(name, pattern) for pattern in image.names):
            return image
    return None
