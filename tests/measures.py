"""Prints how the code reads, in figures: `python tests/measures.py [FOLDER ...]`.

The figures are signs, not limits: nothing fails on them. A limit that is enforced is met by packing, so
whether a file is good is found by somebody who reads it. Generated files and tests do not count.

Tokens exclude comments, docstrings, newlines and indents; lines are those that hold a token. The length of
names is the mean over all name tokens that are no keywords. A tuple assignment has tuples on both sides.
"""

from __future__ import annotations

import ast
import io
import keyword
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("cluster", "engine", "kv_transfer", "simulator", "router", "loadtests")
OTHER_FOLDERS = ("protos", "prefill_worker", "decode_worker", "deploy")

#: words that name nothing by themselves
VAGUE_NAMES = frozenset(
    [
        "told",
        "asked",
        "given",
        "seen",
        "known",
        "most",
        "least",
        "one",
        "around",
        "few",
        "due",
        "over",
        "fresh",
        "gone",
        "mine",
        "whole",
        "news",
        "wanted",
    ]
)
UNCOUNTED_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
POSITIONAL_LIMIT = 4  #: a call with more positional arguments is counted
COMPLEXITY_LIMIT = 15  #: a function with more branches is counted

Function = ast.FunctionDef | ast.AsyncFunctionDef
BRANCHING_NODES = (
    ast.If,
    ast.IfExp,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.comprehension,
    ast.match_case,
    ast.Assert,
)


@dataclass(slots=True)
class Measures:
    """Counts over some files; the properties turn them into the columns of the table."""

    tokens: int = 0
    lines: int = 0
    names: int = 0
    name_letters: int = 0
    assignments: int = 0
    tuple_assignments: int = 0
    ternaries: int = 0
    long_calls: int = 0
    splats: int = 0
    vague_names: int = 0
    complex_functions: int = 0
    forwarding_generators: int = 0
    class_names: list[str] = field(default_factory=list)
    function_tokens: list[int] = field(default_factory=list)

    def add(self, other: Measures) -> None:
        """Add the counts of `other` to these."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def measure(source: str) -> Measures:
    """Return the counts of one file's text. Raises SyntaxError."""
    tree = ast.parse(source)
    measures = Measures()
    docstring_lines = set(docstring_line_numbers(tree))
    token_lines: Counter[int] = Counter()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in UNCOUNTED_TOKENS:
            continue
        if token.type == tokenize.STRING and token.start[0] in docstring_lines:
            continue
        token_lines[token.start[0]] += 1
        if token.type == tokenize.NAME and not keyword.iskeyword(token.string):
            measures.names += 1
            measures.name_letters += len(token.string)
            measures.vague_names += token.string.strip("_") in VAGUE_NAMES
    measures.tokens = token_lines.total()
    measures.lines = len(token_lines)
    for node in ast.walk(tree):
        count_node(node, measures)
        if isinstance(node, Function):
            count_function(node, token_lines, measures)
    return measures


def docstring_line_numbers(tree: ast.Module) -> Iterator[int]:
    """Yield the lines on which docstrings of the module, its classes and functions begin."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | Function) or not node.body:
            continue
        match node.body[0]:
            case ast.Expr(value=ast.Constant(value=str(), lineno=line)):
                yield line


def count_node(node: ast.AST, measures: Measures) -> None:
    """Count what one syntax node adds."""
    match node:
        case ast.Assign(targets=targets, value=value):
            measures.assignments += 1
            both_sides = any(isinstance(target, ast.Tuple) for target in targets)
            measures.tuple_assignments += both_sides and isinstance(value, ast.Tuple)
        case ast.IfExp():
            measures.ternaries += 1
        case ast.Call(args=arguments):
            measures.long_calls += len(arguments) > POSITIONAL_LIMIT
            measures.splats += any(isinstance(argument, ast.Starred) for argument in arguments)
        case ast.ClassDef(name=name):
            measures.class_names.append(name)


def count_function(node: Function, token_lines: Counter[int], measures: Measures) -> None:
    """Count the size, the branches and the kind of one function."""
    lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
    measures.function_tokens.append(sum(token_lines[line] for line in lines))
    measures.complex_functions += complexity(node) > COMPLEXITY_LIMIT
    measures.forwarding_generators += only_forwards(node)


def complexity(function: Function) -> int:
    """Return McCabe's number: one more than the branches of the function."""
    branches = 1
    for node in ast.walk(function):
        if isinstance(node, BRANCHING_NODES):
            branches += 1
        elif isinstance(node, ast.BoolOp):
            branches += len(node.values) - 1
    return branches


def only_forwards(function: Function) -> bool:
    """Tell whether the function's loop only yields what another generator yields."""
    for node in ast.walk(function):
        if not isinstance(node, ast.For | ast.AsyncFor) or len(node.body) != 1:
            continue
        match node.body[0], node.target:
            case ast.Expr(value=ast.Yield(value=ast.Name(id=name))), ast.Name(id=item):
                if name == item:
                    return True
    return False


def product_files(folder: str) -> list[Path]:
    """Return the Python files of a folder that git knows, without generated ones."""
    command = ["git", "ls-files", "-co", "--exclude-standard", f"{folder}/*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in listed.splitlines() if "_pb2" not in name]
    return [path for path in paths if path.exists()]


def measure_folders(folders: Iterable[str]) -> Measures:
    """Return the counts over all files of some folders."""
    total = Measures()
    for folder in folders:
        for path in product_files(folder):
            total.add(measure(path.read_text()))
    return total


def row(label: str, measures: Measures, shared_names: set[str]) -> str:
    """Return one line of the table."""
    shared = sum(name in shared_names for name in set(measures.class_names))
    sizes = sorted(measures.function_tokens) or [0]
    columns = (
        f"{measures.tokens:>8,}",
        f"{measures.tokens / max(measures.lines, 1):>6.1f}",
        f"{measures.name_letters / max(measures.names, 1):>5.1f}",
        f"{100 * measures.tuple_assignments / max(measures.assignments, 1):>7.1f}",
        f"{1000 * measures.ternaries / max(measures.lines, 1):>10.0f}",
        f"{measures.long_calls:>6}",
        f"{measures.splats:>6}",
        f"{shared:>6}",
        f"{measures.vague_names:>6,}",
        f"{sizes[int(0.95 * len(sizes))]:>5}",
        f"{sizes[-1]:>5}",
        f"{measures.complex_functions:>8}",
        f"{measures.forwarding_generators:>8}",
    )
    return f"{label:<14}" + " ".join(columns)


def main(folders: list[str]) -> None:
    """Print the table for the folders, or for the whole product when none is named."""
    groups = {folder: [folder] for folder in folders or FOLDERS}
    if not folders:
        groups["other four"] = list(OTHER_FOLDERS)
    measured = {label: measure_folders(group) for label, group in groups.items()}
    total = Measures()
    for measures in measured.values():
        total.add(measures)
    times = Counter(total.class_names)
    shared_names = {name for name, count in times.items() if count > 1}
    print(
        "folder          tokens  /line  name tuples% ternary/1k pos>4 splats shared  vague"
        "   p95   max complex forwards"
    )
    for label, measures in measured.items():
        print(row(label, measures, shared_names))
    print(row("all", total, shared_names))


if __name__ == "__main__":
    main(sys.argv[1:])
