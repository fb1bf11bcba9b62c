"""The names that a module will have, told from its text: nothing is imported for it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

_MAKERS = frozenset({"globals", "locals", "vars", "setattr", "exec", "eval", "modules"})
"""Names by which a module's text can make names that do not stand in it."""


def names_of(text: str) -> frozenset[str] | None:
    """Names that a module binds at its top level; None where it may have others.

    Those of a star import, of a module's ``__getattr__``, of ``global`` and of :data:`_MAKERS` are not in its text.

    Args:
        text: of the module.

    Raises:
        SyntaxError: the text is no Python.
    """
    tree = ast.parse(text)
    if any(map(_may_make_names, ast.walk(tree))):
        return None
    return frozenset(_bound(tree.body))


def _may_make_names(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return any(one.name == "*" for one in node.names)
    if isinstance(node, ast.FunctionDef):
        return node.name == "__getattr__"
    if isinstance(node, (ast.Name, ast.Attribute)):
        return (node.id if isinstance(node, ast.Name) else node.attr) in _MAKERS
    return isinstance(node, ast.Global)


def _bound(statements: list[ast.stmt]) -> Iterator[str]:
    """Names that statements bind in their own scope, whichever of their branches is taken."""
    todo: list[ast.AST] = list(statements)
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (one.asname or one.name.partition(".")[0] for one in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name:
            yield node.name
        elif isinstance(node, ast.MatchMapping) and node.rest:
            yield node.rest
        todo += ast.iter_child_nodes(node)
