"""Finds the commands that the pages give: lines of blocks of code, and code in backquotes that has arguments."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: pages that speak of other times than now
HISTORIES = {"CHANGELOG.md", "docs/renamed.md"}
FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
LANGUAGES = {"sh", ""}  #: of the blocks that hold commands
INDENTED = re.compile(r"(?<=\n\n)(?:    [^\n]*\n)+")  #: a block of code without a fence
IN_QUOTES = re.compile(r"`([^`]+)`")
#: how a command begins, after settings of its environment
PROGRAM = re.compile(
    r"""^(?:export\ )?(?:[A-Z_]+=\S*\ )*
    (?:\.venv/bin/\S+|make|diptych|python3?|pytest|\S+/bin/(?:pip|python)|\$VLLM|curl|helm|kubectl|docker|kind|crane|pip
    |promtool|openssl|apt-get|kill|ps|time|\.|deploy/install\.sh|examples/\S+\.sh)(?:\ |$)""",
    re.VERBOSE,
)
#: `diptych status [-w]` and `diptych config show\|validate` are grammar, `diptych serve ...` a mention
GRAMMAR = re.compile(r"\[-|\\\||\.\.\.")
#: `diptych status`, `diptych bench live`, `kubectl drain` in a sentence are names of commands
NAME_ALONE = re.compile(r"^(?:diptych|helm|kubectl|pip|promtool|curl)(?: [a-z][\w-]*){0,2}$")
#: a setting of the shell for the lines below it
SETTING = re.compile(r"^export [A-Z_]+=")


def page_paths() -> list[str]:
    """Return all pages that speak of the tree as it is, from its root."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return [path for path in listed if path not in HISTORIES and (ROOT / path).exists()]


def one_line(command: str) -> str:
    """Return a command without its comment, in one line with single spaces."""
    without_comment = re.sub(r"(?:^|\s)#\s.*$", "", command)
    return " ".join(without_comment.split())


def commands_of(text: str) -> list[str]:
    """Return the commands of a page's Markdown in their order, each once and in one line."""
    found = []
    without_fences = FENCED.sub("", text)
    blocks = [block for language, block in FENCED.findall(text) if language in LANGUAGES]
    for block in blocks + INDENTED.findall(without_fences):
        lines = map(one_line, re.sub(r"\\\n", " ", block).splitlines())
        found += [line for line in lines if PROGRAM.match(line) or SETTING.match(line)]
    for quoted in IN_QUOTES.findall(without_fences):
        command = one_line(quoted)
        is_command = SETTING.match(command) or (PROGRAM.match(command) and " " in command)
        if is_command and not GRAMMAR.search(command) and not NAME_ALONE.match(command):
            found.append(command)
    return list(dict.fromkeys(found))


def all_commands() -> dict[str, list[str]]:
    """Return every command of the pages, with the pages that give it."""
    pages: dict[str, list[str]] = {}
    for path in page_paths():
        for command in commands_of((ROOT / path).read_text()):
            pages.setdefault(command, []).append(path)
    return pages
