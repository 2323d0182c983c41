"""Which variables a chat template takes from its caller (pure).

`jinja2.meta.find_undeclared_variables` would say the same, but it generates code, which computes
the template's constants: `'%4000000000d' % 1` would fill the gateway's memory. Here nothing is
computed; the names of a template's tree are followed through its scopes, by Jinja's rules.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jinja2 import nodes
from jinja2.visitor import NodeVisitor

#: Names that Jinja itself binds in the body of a macro, or of a call with a body.
_MACRO_NAMES = frozenset({"caller", "kwargs", "varargs"})


def template_variables_of(tree: nodes.Template, global_names: Iterable[str]) -> set[str]:
    """Return the names that a template may look up among what its caller gives it.

    `global_names` are those that every template of the sandbox has. A name that the template sets
    is returned too if it may be looked up before, or if only a branch of an `if` sets it.
    """
    finder = _VariableFinder()
    finder.read_scope(_Scope([tree], frozenset({"self"})))
    return finder.variables - set(global_names)


@dataclass(frozen=True, slots=True)
class _Scope:
    """A part of a template whose names end with it."""

    children: list[nodes.Node]
    own_names: frozenset[str] = frozenset()  #: Bound before its first child.
    sees_outer_names: bool = True


class _VariableFinder(NodeVisitor):
    """Collects the variables of one scope after another.

    An inner scope is read when the one around it has been read, because it sees all names that are
    bound there, those bound behind it too.
    """

    def __init__(self) -> None:
        self.variables: set[str] = set()  #: Names that may be looked up at the caller.
        self._bound_names: set[str] = set()  #: In the scope that is read, so far, or around it.
        self._inner_scopes: list[_Scope] = []  #: Of the scope that is read; they are read later.

    def read_scope(self, scope: _Scope) -> None:
        """Read a scope, and then those inside of it."""
        outer_names = self._bound_names
        outer_scopes = self._inner_scopes
        self._bound_names = set(scope.own_names)
        if scope.sees_outer_names:
            self._bound_names |= outer_names
        self._inner_scopes = []
        for child in scope.children:
            self.visit(child)
        for inner_scope in self._inner_scopes:
            self.read_scope(inner_scope)
        self._bound_names = outer_names
        self._inner_scopes = outer_scopes

    # ---- what looks names up and binds them ------------------------------------------------------

    def visit_Name(self, node: nodes.Name) -> None:
        if node.ctx != "load":
            self._bound_names.add(node.name)
        elif node.name not in self._bound_names:
            self.variables.add(node.name)

    def visit_NSRef(self, node: nodes.NSRef) -> None:
        if node.name not in self._bound_names:
            self.variables.add(node.name)

    def visit_Assign(self, node: nodes.Assign) -> None:
        self.visit(node.node)
        self.visit(node.target)

    def visit_Import(self, node: nodes.Import) -> None:
        self.generic_visit(node)
        self._bound_names.add(node.target)

    def visit_FromImport(self, node: nodes.FromImport) -> None:
        self.generic_visit(node)
        for name in node.names:
            self._bound_names.add(name[1] if isinstance(name, tuple) else name)

    def visit_If(self, node: nodes.If) -> None:
        self.visit(node.test)
        names_before = self._bound_names
        names_behind = set(names_before)
        for branch in (node.body, node.elif_, node.else_):
            self._bound_names = set(names_before)
            for child in branch:
                self.visit(child)
            names_behind |= self._bound_names
        # Where another branch was taken, a name that only this one sets is the caller's.
        self.variables |= names_behind - names_before
        self._bound_names = names_behind

    # ---- what has a scope of its own -------------------------------------------------------------

    def visit_For(self, node: nodes.For) -> None:
        self.visit(node.iter)
        self._add_scope([node.target, *node.body], {"loop"})
        if node.test is not None:
            self._add_scope([node.target, node.test])
        self._add_scope(node.else_)

    def visit_Macro(self, node: nodes.Macro) -> None:
        self._bound_names.add(node.name)
        self._add_scope([*node.args, *node.defaults, *node.body], _MACRO_NAMES)

    def visit_CallBlock(self, node: nodes.CallBlock) -> None:
        self.visit(node.call)
        self._add_scope([*node.args, *node.defaults, *node.body], _MACRO_NAMES)

    def visit_FilterBlock(self, node: nodes.FilterBlock) -> None:
        self.visit(node.filter)
        self._add_scope(node.body)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> None:
        self.visit(node.target)
        filters = [node.filter] if node.filter is not None else []
        self._add_scope([*node.body, *filters])

    def visit_With(self, node: nodes.With) -> None:
        for value in node.values:
            self.visit(value)
        self._add_scope([*node.targets, *node.body])

    def visit_Scope(self, node: nodes.Scope) -> None:
        self._add_scope(node.body)

    def visit_Block(self, node: nodes.Block) -> None:
        # Jinja renders a block with the caller's variables, wherever it stands.
        scope = _Scope(list(node.body), frozenset({"self", "super"}), sees_outer_names=False)
        self._inner_scopes.append(scope)

    def _add_scope(
        self, children: Iterable[nodes.Node], own_names: Iterable[str] = frozenset()
    ) -> None:
        self._inner_scopes.append(_Scope(list(children), frozenset(own_names)))
