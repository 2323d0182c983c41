"""What the pages say of the tree is there: files, functions, classes, links, and the counts of the walks."""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from diptych.cluster.cli import app

from .live.test_sockets import CHANNELS
from .measures import Function, only_forwards, product_files
from .page_commands.find import page_paths

ROOT = Path(__file__).parent.parent
ARCHITECTURE = ROOT / "docs/architecture.md"
WALKS = ROOT / "docs/walks.md"
RENAMED = ROOT / "docs/renamed.md"
WRITTEN_BY_A_RUN = {ROOT / "docs/compatibility.md"}
SOURCES = (".py", ".cpp", ".c", ".h", ".proto", ".yaml", ".sh", ".js", ".toml", ".tpl")
PRODUCT = ("cluster", "engine", "kv_transfer", "simulator", "router", "loadtests", "protos")
ROLES = ("prefill_worker", "decode_worker")
WIDEST_LINE = 120
#: a file for each command; the planner's benches stand in the planner's README
FOLDERS_WITHOUT_A_MAP = {"cluster/cli", "cluster/bench"}
#: files that a reader has, or the world; not of this repository
FOREIGN_PATHS = {
    "cluster.yaml",
    "keys.yaml",
    "generation_config.json",
    "config.json",
    "ray.io_rayservices.yaml",
    "gateway.networking.k8s.io_httproutes.yaml",
    "anthropic/",
    "helm-chart/kuberay-operator/crds/",
    "config/crd/standard/",
}

FILE_IN_QUOTES = re.compile(r"`([\w./-]+\.(?:py|cpp|c|h|proto|sh|md|yaml|json|js|css))`")
FOLDER_IN_QUOTES = re.compile(r"`([\w./-]+/)`")
CLASS_IN_QUOTES = re.compile(r"`([A-Z]\w*[a-z]\w*)((?:\.\w+)*)(?:\([^`]*\))?`")
#: fences, indented lines and what stands in backquotes
CODE = re.compile(r"```\w*\n.*?```|^    [^\n]*$|`[^`]+`", re.DOTALL | re.MULTILINE)
COMMAND_LINE = re.compile(r"(?:^ *|[`/])diptych ([a-z][^`\n]*)", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
#: "12. `path.py` `Class.method`, `function`: what they do"
STEP = re.compile(r"^(\d+)\. `([\w/]+\.py)` ((?:`[\w.]+`(?:, )?)+): \S", re.MULTILINE)
WALK_END = re.compile(r"^Files passed: (\d+), in (\d+) steps\.$", re.MULTILINE)


@cache
def tracked_files() -> list[str]:
    """Return the paths that git knows, and those of new files that it does not ignore."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for path in listed.splitlines() if (ROOT / path).exists()]


def all_pages() -> list[Path]:
    """Return all pages that speak of the tree as it is."""
    return [ROOT / path for path in page_paths()]


@cache
def text_of(path: str) -> str:
    """Return a tracked file as its text."""
    return (ROOT / path).read_text()


@cache
def syntax_tree(path: str) -> ast.Module:
    """Return a Python file as its statements."""
    return ast.parse(text_of(path))


@cache
def words_of_sources() -> frozenset[str]:
    """Return every word of every source file."""
    paths = [
        path for path in tracked_files() if path.endswith(SOURCES) and path != "tests/test_docs.py"
    ]
    return frozenset(word for path in paths for word in re.findall(r"\w+", text_of(path)))


@cache
def words_of_class(name: str) -> frozenset[str]:
    """Return the words in the Python classes of that name; of all sources, where there is none."""
    sources = []
    for path in tracked_files():
        # Most files have no such class: to parse them all takes ten seconds.
        if not path.endswith(".py") or f"class {name}" not in text_of(path):
            continue
        lines = text_of(path).splitlines()
        for node in ast.walk(syntax_tree(path)):
            if isinstance(node, ast.ClassDef) and node.name == name:
                sources.append("\n".join(lines[node.lineno - 1 : node.end_lineno]))
    if not sources:
        return words_of_sources()
    return frozenset(re.findall(r"\w+", "\n".join(sources)))


@cache
def functions_of(path: str) -> frozenset[str]:
    """Return the functions, classes and values of a file; a method as `Class.method`."""
    names = set()
    for node in syntax_tree(path).body:
        if isinstance(node, Function | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, Function)]
            names |= {f"{node.name}.{method.name}" for method in methods}
    return frozenset(names)


@cache
def whole_command() -> Any:
    """Return `diptych` with all its commands and options."""
    return typer.main.get_command(app)


def file_is_there(path: str, page: Path) -> bool:
    """Tell whether a page's path is one of the repository, of the page's folder, or ends one there or in tests."""
    if (ROOT / path).exists() or (page.parent / path).exists():
        return True
    if path in FOREIGN_PATHS or path.startswith(("/", "build/")):
        return True
    folder = page.parent.relative_to(ROOT).as_posix()
    folders = (f"{folder}/", "tests/") if page != ARCHITECTURE else ("cluster/gateway/apis/",)
    return any(
        known.endswith(f"/{path}") and known.startswith(folders) for known in tracked_files()
    )


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", all_pages(), ids=page_name)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    paths = FILE_IN_QUOTES.findall(text)
    assert [path for path in paths if not file_is_there(path, page)] == []
    folders = set(FOLDER_IN_QUOTES.findall(text)) - FOREIGN_PATHS
    assert [path for path in folders if not folder_is_there(path, page)] == []
    links = [link for link in LINK.findall(text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def folder_is_there(path: str, page: Path) -> bool:
    return path.startswith("/") or any(
        (start / path).is_dir() for start in (ROOT, page.parent, ROOT / "tests")
    )


@pytest.mark.parametrize("page", all_pages(), ids=page_name)
def test_every_class_that_a_page_names_is_there(page: Path) -> None:
    for name, attributes in CLASS_IN_QUOTES.findall(page.read_text()):
        if attributes:
            words = words_of_class(name)
            assert [part for part in attributes[1:].split(".") if part not in words] == [], name
        elif re.search("[a-z].*[A-Z]", name):
            assert name in words_of_sources()


@pytest.mark.parametrize("page", sorted({*all_pages()} - WRITTEN_BY_A_RUN), ids=page_name)
def test_no_line_of_a_page_is_wider_than_120_characters(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert [line for line in lines if len(line) > WIDEST_LINE and not line.startswith("|")] == []


@pytest.mark.parametrize("page", all_pages(), ids=page_name)
def test_the_commands_of_a_page_and_their_options_are_there(page: Path) -> None:
    code = "\n".join(CODE.findall(page.read_text().replace("\\\n", "")))
    for words in (line.split() for line in COMMAND_LINE.findall(code)):
        command = whole_command()
        while hasattr(command, "commands") and words and re.fullmatch("[a-z]+", words[0]):
            command = command.commands[words.pop(0)]
        flags = {
            flag
            for parameter in command.params
            for flag in (*parameter.opts, *parameter.secondary_opts)
        }
        asked = {
            word.strip("[],;.").split("=")[0] for word in words if re.match(r"\[?--[a-z]", word)
        }
        assert not asked - flags - {"--help", "--version"}, words


@pytest.mark.parametrize("page", all_pages(), ids=page_name)
def test_every_program_that_a_page_runs_is_there(page: Path) -> None:
    code = "\n".join(CODE.findall(page.read_text()))
    modules = [module.replace(".", "/") for module in re.findall(r"-m diptych\.([\w.]+)", code)]
    programs = [path for path in modules if not (ROOT / path).is_dir()]
    assert [path for path in programs if not (ROOT / f"{path}.py").exists()] == []
    scripts = re.findall(r"(?:python|pytest) ([\w/]+\.py)\b", code)
    assert [path for path in scripts if not (ROOT / path).exists() and path != "setup.py"] == []


def test_every_module_stands_in_the_map_of_its_folder() -> None:
    unmapped = []
    for path in map(Path, tracked_files()):
        folder = path.parent
        if path.suffix != ".py" or path.name.startswith("_") or "_pb2" in path.name:
            continue
        if path.parts[0] == "tests" or folder.as_posix() in FOLDERS_WITHOUT_A_MAP:
            continue
        while not (ROOT / folder / "README.md").exists():
            folder = folder.parent
        page = (ROOT / folder / "README.md").read_text()
        if not re.search(rf"[`/]{re.escape(path.name)}`", page):
            unmapped.append(path.as_posix())
    assert unmapped == []


def test_the_table_of_changes_has_a_row_for_what_people_change() -> None:
    table = ARCHITECTURE.read_text().partition("## To change X, open Y")[2]
    rows = [line for line in table.splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) >= 25


def test_the_new_names_of_what_was_renamed_are_there() -> None:
    files, _, names = RENAMED.read_text().partition("## Names")
    new_paths = [
        row.split("|")[2].strip(" `") for row in files.splitlines() if row.startswith("| `")
    ]
    assert len(new_paths) > 50
    assert [path for path in new_paths if not (ROOT / path).exists()] == []
    rows = [row for row in names.splitlines() if row.startswith("| `")]
    for row in rows:
        path, _, now = (cell.strip(" `") for cell in row.strip("|").split("|"))
        assert re.search(rf"\b{re.escape(now.split('.')[-1])}\b", (ROOT / path).read_text()), row


def walks() -> list[str]:
    """Return the sections of the walks, each with its heading."""
    return WALKS.read_text().split("\n## ")[1:]


@pytest.mark.parametrize("walk", walks(), ids=lambda walk: walk.splitlines()[0])
def test_a_walk_names_functions_that_are_there_and_counts_its_files(walk: str) -> None:
    steps = STEP.findall(walk)
    numbered_lines = re.findall(r"^\d+\. ", walk, re.MULTILINE)
    assert len(steps) == len(numbered_lines)
    assert [int(number) for number, _, _ in steps] == list(range(1, len(steps) + 1))
    for _, path, names in steps:
        missing = set(re.findall(r"`([\w.]+)`", names)) - functions_of(path)
        assert not missing, path
    counts = WALK_END.search(walk)
    assert counts
    assert [int(count) for count in counts.groups()] == [
        len({path for _, path, _ in steps}),
        len(steps),
    ]


def test_no_generator_only_forwards() -> None:
    forwarding = [
        f"{path}: {node.name}"
        for folder in (*PRODUCT, *ROLES)
        for path in product_files(folder)
        if "yield" in path.read_text()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, Function) and only_forwards(node)
    ]
    assert forwarding == []


def test_the_table_of_sockets_is_the_one_that_a_running_cluster_is_compared_with() -> None:
    """`tests/live/test_sockets.py` compares it with what listens."""
    page = (ROOT / "docs/security.md").read_text()
    section = page.partition("## Sockets")[2].partition("## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert rows == [channel.row() for channel in CHANNELS]
