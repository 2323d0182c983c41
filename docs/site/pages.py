"""Makes MkDocs build the site from the pages of the whole repository; `mkdocs.yml` names this hook.

MkDocs takes its pages from one folder. Here every page keeps its place: the site has the README of
each folder, the pages of `docs/`, and those that `reference.py` makes from the code. Links between
pages mean the same as on a code host, so nothing is written twice:

- a link to a folder leads to the folder's README;
- a link to a file that is no page leads to a copy of the file;
- lists may be indented as CommonMark has it, which MkDocs' Markdown does not take.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from posixpath import dirname, join, normpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
DOCS = "docs/"  #: It is left out of the site's addresses.
STYLE = "docs/site/wide.css"
IGNORED_FOLDERS = {"build", "dist", "node_modules", "__pycache__"}
#: `[text](target)` or `[text](target#anchor)`, where the target is a path.
LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")
LIST_ITEM = re.compile(r"(?:[-*]|\d+\.) +")
FENCE = "```"
INDENT = 4  #: of what belongs to a list's item, as MkDocs' Markdown wants it


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the theme's files, all pages, and the files that pages link to."""
    docs_folder = f"{config.docs_dir}{os.sep}"
    for file in list(files):
        if file.abs_src_path and file.abs_src_path.startswith(docs_folder):
            files.remove(file)
    sys.path.insert(0, str(Path(__file__).parent))
    import reference  # the code is imported only when a site is built

    contents = {path: (ROOT / path).read_text() for path in page_paths()}
    for path in contents:
        add_file(files, File.generated(config, path, abs_src_path=str(ROOT / path)))
    for path, content in reference.pages().items():
        add_file(files, File.generated(config, path, content=content))
    add_file(files, File.generated(config, STYLE, abs_src_path=str(ROOT / STYLE)))
    linked = {path for page, text in contents.items() for path in linked_files(page, text)}
    for path in sorted(linked - set(contents)):
        add_file(files, File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def add_file(files: Files, file: File) -> None:
    """Add a file; pages of `docs/` are at the top of the site."""
    file.dest_uri = file.dest_uri.removeprefix(DOCS)
    files.append(file)


def page_paths() -> list[str]:
    """Return the paths of the repository's Markdown pages, in order."""
    paths: list[str] = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = sorted(
            name for name in folders if name not in IGNORED_FOLDERS and not name.startswith(".")
        )
        relative = Path(folder).relative_to(ROOT)
        paths += [(relative / name).as_posix() for name in sorted(names) if name.endswith(".md")]
    return paths


def linked_files(page: str, markdown: str) -> set[str]:
    """Return the files of the repository to which a page links."""
    targets = {normpath(join(dirname(page), target)) for target, _ in LINK.findall(markdown)}
    return {target for target in targets if (ROOT / target).is_file()}


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page's text as MkDocs' Markdown understands it."""
    return indent_lists(link_folders(markdown, page.file.src_uri))


def link_folders(markdown: str, page: str) -> str:
    """Return the text with links to folders as links to their READMEs."""

    def linked(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        path = normpath(join(dirname(page), target))
        if not (ROOT / path / "README.md").is_file():
            return match[0]
        return f"]({target.rstrip('/')}/README.md{anchor})"

    return LINK.sub(linked, markdown)


def indent_lists(markdown: str) -> str:
    """Return the text with what belongs to a list's item indented by `INDENT`.

    A list that begins right behind a paragraph gets an empty line in front.
    """
    lines: list[str] = []
    content_indent = 0  #: of the item in which the line is; 0: it is in no list
    fenced = False
    for line in markdown.splitlines():
        stripped = line.lstrip(" ")
        indent = len(line) - len(stripped)
        after_empty_line = not lines or not lines[-1]
        item = None if fenced else LIST_ITEM.match(line)
        if item:
            if not content_indent and not after_empty_line:
                lines.append("")
            content_indent = len(item[0])
        elif content_indent and stripped:
            if indent >= content_indent:
                line = " " * (INDENT + indent - content_indent) + stripped
            elif after_empty_line:
                content_indent = 0
        if stripped.startswith(FENCE):
            fenced = not fenced
        lines.append(line)
    return "\n".join(lines) + "\n"
