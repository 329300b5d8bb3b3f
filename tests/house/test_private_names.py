"""No package of `logstore/` uses a private name of another package.

A name with one underscore is private to its package: an attribute ``thing._name`` is an offence if
another package defines ``_name`` and the package of the file does not.  This is an approximation:
a private name that both packages define is not seen.  Objects of the C extension are allowed by
their names, and so are the methods of a NamedTuple.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import logstore

ROOT = Path(logstore.__file__).parent

NAMED_TUPLE = frozenset({"_asdict", "_make", "_replace", "_fields"})
# Of batches and lanes, which are objects of the C extension.
NATIVE = frozenset({"_close", "_drop", "_native", "_records", "_seal", "_size_bytes", "_stamp"})


def package_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else path.stem


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined_in(tree: ast.AST) -> Iterator[str]:
    """The private names of functions, of class attributes, and of attributes of self and cls."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.ClassDef):
            for statement in node.body:
                targets: list[ast.expr] = []
                if isinstance(statement, ast.Assign):
                    targets = statement.targets
                elif isinstance(statement, ast.AnnAssign):
                    targets = [statement.target]
                for target in targets:
                    yield from (n.id for n in ast.walk(target) if isinstance(n, ast.Name))


def used_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of each private attribute of something else than self, cls and super()."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = node.value
            if isinstance(owner, ast.Name) and owner.id in ("self", "cls"):
                continue
            if isinstance(owner, ast.Call) and getattr(owner.func, "id", "") == "super":
                continue
            yield node.lineno, node.attr


def offences(sources: Mapping[str, list[tuple[str, str]]]) -> list[tuple[str, str, str]]:
    """(package, name, place) of each offence.  `sources`: per package, (file, source) of each."""
    trees = {
        package: [(name, ast.parse(source)) for name, source in files]
        for package, files in sources.items()
    }
    defined: dict[str, set[str]] = defaultdict(set)
    for package, files in trees.items():
        for _, tree in files:
            defined[package].update(filter(is_private, defined_in(tree)))
    found = []
    for package, files in trees.items():
        elsewhere = set().union(*(names for other, names in defined.items() if other != package))
        foreign = elsewhere - defined[package] - NAMED_TUPLE - NATIVE
        for name, tree in files:
            found += [(package, used, f"{name}:{line}") for line, used in used_in(tree)
                      if used in foreign]  # fmt: skip
    return found


def test_no_package_uses_a_private_name_of_another() -> None:
    sources: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        name = str(path.relative_to(ROOT))
        sources[package_of(path)].append((name, path.read_text("utf-8")))
    assert not offences(sources), "use a public name, or give the object one"


THING = """
class Thing:
    _c = 1
    def __init__(self): self._a = 1
    def _b(self): ...
"""


@pytest.mark.parametrize("planted", ["thing._a", "thing._b()", "self.thing._c", "make()._a = 2"])
def test_a_planted_use_is_found(planted: str) -> None:
    user = f"def use(self, thing):\n    {planted}\n"
    assert [place for *_, place in offences({"a": [("a.py", THING)], "b": [("b.py", user)]})] == [
        "b.py:2"
    ]
    assert not offences({"a": [("a.py", THING), ("b.py", user)]})


def test_names_of_its_own_and_of_named_tuples_are_allowed() -> None:
    user = (
        "class Own:\n    def _a(self): self._b = super()._b()\ndef use(o): o._a(); o._replace()\n"
    )
    assert not offences({"a": [("a.py", THING)], "b": [("b.py", user)]})
