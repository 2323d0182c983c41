"""Which fields of messages, and of the parts of their content, a chat template reads (pure).

A template is a tree of Jinja's nodes, in which names are followed from `messages` on: through loops,
indices, variables and the parameters of macros. Nothing is rendered. What is found may be more than
a rendering reads; what a template reads in other ways is not found.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from jinja2 import nodes

#: So often all bindings of a template are gone through. Three times are enough for those of the
#: models that people run; a stranger's could be made to need one for each of its names.
ROUNDS_MAX = 16
FIRST_AND_LAST = ("first", "last")  #: The filters that give one element of a list.


class _Kind(Enum):
    """What the value of an expression may be."""

    MESSAGES = auto()
    MESSAGE = auto()
    CONTENT = auto()  #: Of a message: a text, or a list of parts.
    PART = auto()  #: Of a content.


_ELEMENT_KINDS = {_Kind.MESSAGES: _Kind.MESSAGE, _Kind.CONTENT: _Kind.PART}
_Kinds = set[_Kind]


@dataclass(frozen=True, slots=True)
class TemplateFields:
    """The names of the fields that a template looks up."""

    of_messages: frozenset[str] = frozenset()
    of_parts: frozenset[str] = frozenset()  #: Empty for a template that takes texts only.


def template_fields_of(tree: nodes.Template) -> TemplateFields:
    """Return the fields that a template reads, as `x.name`, `x["name"]` or `x.get("name")`."""
    kinds_by_name = _kinds_by_name(tree)
    names: dict[_Kind, set[str]] = defaultdict(set)
    called_ids = {id(call.node) for call in tree.find_all(nodes.Call)}
    for node in tree.find_all((nodes.Getattr, nodes.Getitem, nodes.Call)):
        if id(node) in called_ids:
            continue  # a method
        field = _looked_up_field(node)
        if field is not None:
            for kind in _kinds_of(field.owner, kinds_by_name):
                names[kind].add(field.name)
    part_names = names[_Kind.PART]
    if "text" not in part_names:
        part_names = set()  # Mistral's look for calls in a content, and cannot take parts
    return TemplateFields(frozenset(names[_Kind.MESSAGE]), frozenset(part_names))


@dataclass(frozen=True, slots=True)
class _Field:
    """An expression that looks up a field by its name."""

    owner: nodes.Node
    name: str


def _looked_up_field(node: nodes.Node) -> _Field | None:
    """Return the field that an expression looks up; None if it looks up none."""
    match node:
        case nodes.Getattr():
            return _Field(node.node, node.attr)
        case nodes.Getitem(arg=nodes.Const(value=str() as name)):
            return _Field(node.node, name)
        case nodes.Call(
            node=nodes.Getattr(attr="get") as method, args=[nodes.Const(value=str() as name), *_]
        ):
            return _Field(method.node, name)
        case _:
            return None


def _kinds_by_name(tree: nodes.Template) -> dict[str, _Kinds]:
    """Return what variables and parameters of macros may hold; those of no kind are left out."""
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    bindings = list(_bindings(tree, macros))
    kinds_by_name: dict[str, _Kinds] = {"messages": {_Kind.MESSAGES}}
    # A name may be bound to one that the source binds later: repeat until nothing is new.
    for _ in range(ROUNDS_MAX):
        is_complete = True
        for binding in bindings:
            kinds = _kinds_of(binding.value, kinds_by_name)
            if binding.is_loop:
                kinds = _element_kinds(kinds)
            known_kinds = kinds_by_name.get(binding.name, set())
            if not kinds <= known_kinds:
                kinds_by_name[binding.name] = known_kinds | kinds
                is_complete = False
        if is_complete:
            break
    return kinds_by_name


@dataclass(frozen=True, slots=True)
class _Binding:
    """A value that a name may get."""

    name: str
    value: nodes.Node
    is_loop: bool = False  #: True if the name gets the elements of the value.


def _bindings(tree: nodes.Template, macros: dict[str, nodes.Macro]) -> Iterator[_Binding]:
    """Yield what variables, loops and calls of macros bind to names."""
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name):
            yield _Binding(assignment.target.name, assignment.node)
        elif isinstance(assignment.target, nodes.NSRef):
            yield _Binding(f"{assignment.target.name}.{assignment.target.attr}", assignment.node)
    for loop in tree.find_all(nodes.For):
        if isinstance(loop.target, nodes.Name):
            yield _Binding(loop.target.name, loop.iter, is_loop=True)
    for call in tree.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name not in macros:
            continue
        parameters = macros[call.node.name].args
        for parameter, argument in zip(parameters, call.args, strict=False):
            yield _Binding(parameter.name, argument)
        for keyword in call.kwargs:
            yield _Binding(keyword.key, keyword.value)


def _element_kinds(kinds: _Kinds) -> _Kinds:
    """Return what the elements of a value may be."""
    return {_ELEMENT_KINDS[kind] for kind in kinds if kind in _ELEMENT_KINDS}


def _kinds_of(node: nodes.Node | None, kinds_by_name: dict[str, _Kinds]) -> _Kinds:
    """Return what the value of an expression may be; empty if that is of no interest."""
    match node:
        case nodes.Name():
            return kinds_by_name.get(node.name, set())
        case nodes.Filter():
            kinds = _kinds_of(node.node, kinds_by_name)
            return _element_kinds(kinds) if node.name in FIRST_AND_LAST else kinds
        case nodes.Getitem(arg=nodes.Slice()):
            return _kinds_of(node.node, kinds_by_name)
        case nodes.CondExpr():
            return _kinds_of(node.expr1, kinds_by_name) | _kinds_of(node.expr2, kinds_by_name)
        case nodes.Or() | nodes.And() | nodes.Add():
            return _kinds_of(node.left, kinds_by_name) | _kinds_of(node.right, kinds_by_name)
        case nodes.Getattr(node=nodes.Name(name=space)) if f"{space}.{node.attr}" in kinds_by_name:
            return kinds_by_name[f"{space}.{node.attr}"]
        case nodes.Getattr() | nodes.Getitem() | nodes.Call():
            field = _looked_up_field(node)
            if field is not None:
                return _kinds_of_field(field, kinds_by_name)
            if isinstance(node, nodes.Getitem):
                return _element_kinds(_kinds_of(node.node, kinds_by_name))
            return set()
        case _:
            return set()


def _kinds_of_field(field: _Field, kinds_by_name: dict[str, _Kinds]) -> _Kinds:
    """Return what a field of an object may be: only a message's content is of interest."""
    is_content = field.name == "content" and _Kind.MESSAGE in _kinds_of(field.owner, kinds_by_name)
    return {_Kind.CONTENT} if is_content else set()
