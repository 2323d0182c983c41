"""Prints what pip is configured with as the variables that uv reads, a `NAME=value` a line.

uv does not read pip's configuration. On a machine whose packages come from a mirror, an index of the
company or a folder, it would ask the public index, or find nothing. Run it with the Python whose pip is
meant. Variables of uv's own that are set already win, and are not printed.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys

#: pip's setting -> uv's variable, and what separates several values in it
UV_VARIABLES = {
    "index-url": ("UV_INDEX_URL", " "),
    "extra-index-url": ("UV_EXTRA_INDEX_URL", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "no-index": ("UV_NO_INDEX", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "proxy": ("ALL_PROXY", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
}


def uv_variables(listed: str) -> dict[str, str]:
    """Return uv's variables for what `pip config list` printed.

    Each line is `section.name='value'`; the section of an environment variable is `:env:`, and such a
    variable wins, as it does for pip. Lines of other sections than `global`, `install` and `:env:`
    concern other commands than `pip install`.
    """
    of_files: dict[str, str] = {}
    of_environment: dict[str, str] = {}
    for line in listed.splitlines():
        key, equals, literal = line.partition("=")
        section, _, name = key.rpartition(".")
        if not equals or name not in UV_VARIABLES:
            continue
        variable, separator = UV_VARIABLES[name]
        value = separator.join(str(ast.literal_eval(literal)).split())
        if section == ":env:":
            of_environment[variable] = value
        elif section in ("global", "install"):
            of_files[variable] = value
    return of_files | of_environment


def main() -> None:
    """Print the variables."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for variable, value in uv_variables(done.stdout).items():
        if variable not in os.environ:
            print(f"{variable}={value}")


if __name__ == "__main__":
    main()
