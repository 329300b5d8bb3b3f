"""The direction of imports, read from the source.

A package of `logstore/` imports only from the layers before its own in LAYERS, and no package has
a cycle inside.  The C core in `native/core` includes only downwards and never Python.h.  The Spark
connector uses public names only.

The checks are functions of source text, so that the second half of this file can hand them
planted violations: a check that cannot fail proves nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import logstore

ROOT = Path(__file__).resolve().parent.parent.parent

# Lowest first.  A package imports only from the layers before its own; the packages of one layer
# do not import each other.  The first layer is the modules of `logstore/` itself that every package
# may use: they import each other, without a cycle.
LEAVES = (
    *("_native", "errors", "config", "clock", "closeable", "record"),
    *("partitioner", "serialization", "interceptors", "where", "times", "timers", "waking"),
    *("shared_syncs", "work_errors"),
)
LAYERS: tuple[tuple[str, ...], ...] = (
    LEAVES,
    ("files",),
    ("format",),
    ("log",),
    ("root", "recovery"),
    ("checking",),
    ("partition",),
    ("store",),
    ("upkeep", "coordinators"),
    ("replication",),
    ("producer", "consumer", "kafka"),
    ("workers", "notes"),
    ("delays",),
    ("queues",),
    ("opening",),
    ("testing", "cli"),
    ("__main__",),
)
LAYER_OF = {package: number for number, layer in enumerate(LAYERS) for package in layer}
# `logstore/__init__.py` names the modules of the public names: only these, which use the engine as
# a user does, may import it.
FACADE = "logstore"
MAY_USE_FACADE = frozenset({"testing", "cli"})

CORE_UNITS = (
    *("status", "format", "crc32c", "murmur2", "io", "io_path", "io_recorder", "memory", "bytes"),
    "lz4_frame",
    *("batch", "batch_check", "batch_keep", "aborted", "uniform_run", "columns", "index"),
    *("segment", "read_ahead", "offset_map", "cleaner", "frame_cursor", "produce_frame"),
    "fetch_frame",
)

# ---- Python: imports between packages -------------------------------------------------------


def package_of(module: str) -> str:
    """`logstore.log.segment` -> `log`; `logstore.errors` -> `errors`; `logstore` -> `logstore`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else FACADE


def type_only_nodes(tree: ast.Module) -> set[ast.AST]:
    """Everything under `if TYPE_CHECKING:`: read by the type checker, never executed."""
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If):
            name = getattr(node.test, "id", None) or getattr(node.test, "attr", None)
            if name == "TYPE_CHECKING":
                found.update(inner for child in node.body for inner in ast.walk(child))
    return found


def imports_of(source: str, module: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of every import of logstore, also inside of functions.

    `from logstore import segment` counts as `logstore.segment`; `from logstore import Record`
    as the façade.
    """
    tree = ast.parse(source)
    ignored = type_only_nodes(tree)
    for node in ast.walk(tree):
        if node in ignored:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == FACADE:
                    yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            target = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                package = package[: len(package) - (node.level - 1)]
                target = ".".join([*package, target] if target else package)
            if target == FACADE:
                for alias in node.names:
                    inner = alias.name in LAYER_OF
                    yield node.lineno, f"{FACADE}.{alias.name}" if inner else FACADE
            elif target.startswith(f"{FACADE}."):
                for alias in node.names:
                    yield node.lineno, f"{target}.{alias.name}"


def layering_faults(source: str, module: str, *, is_package: bool = False) -> list[str]:
    package = package_of(module)
    if package == FACADE:
        return []
    if package not in LAYER_OF:
        return [f"{module}: `{package}` has no place in LAYERS"]
    faults = []
    for line, target in imports_of(source, module, is_package=is_package):
        other = package_of(target)
        if other == package or (package in LEAVES and other in LEAVES):
            continue
        if other == FACADE:
            if package not in MAY_USE_FACADE:
                faults.append(f"{module}:{line}: imports `logstore`; name the module instead")
        elif other not in LAYER_OF:
            faults.append(f"{module}:{line}: imports `{other}`, which has no place in LAYERS")
        elif LAYER_OF[other] >= LAYER_OF[package]:
            faults.append(f"{module}:{line}: `{package}` imports `{other}`, which is not below it")
    return faults


def cycles(imports: dict[str, set[str]]) -> list[str]:
    """The modules that import themselves, through others or directly."""
    faults = []
    for module in imports:
        seen: set[str] = set()
        waiting = [module]
        while waiting:
            for other in imports.get(waiting.pop(), ()):
                if other == module:
                    faults.append(f"{module}: imports itself by way of others")
                    waiting.clear()
                    break
                if other not in seen:
                    seen.add(other)
                    waiting.append(other)
    return faults


# ---- C: the wall between core and binding ---------------------------------------------------

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(["<])([^">]+)[">]', re.MULTILINE)
PYTHON_TOKEN = re.compile(r"\bPython\.h\b|\b_?Py[A-Z_]\w*|\bPY_[A-Z]\w*")


def line_of(source: str, position: int) -> int:
    return source.count("\n", 0, position) + 1


def core_faults(source: str, name: str) -> list[str]:
    """Of one file of native/core: no Python, no include that points up or out."""
    faults = [
        f"{name}:{line_of(source, match.start())}: the core mentions `{match.group()}`"
        for match in PYTHON_TOKEN.finditer(source)
    ]
    unit = name.rsplit(".", 1)[0]
    if unit not in CORE_UNITS:
        return [*faults, f"{name}: `{unit}` has no place in CORE_UNITS"]
    for match in INCLUDE.finditer(source):
        quote, header = match.groups()
        where = f"{name}:{line_of(source, match.start())}"
        other = header.rsplit(".", 1)[0]
        if quote == "<":
            continue
        if other not in CORE_UNITS:
            faults.append(f'{where}: "{header}" is not a header of the core')
        elif CORE_UNITS.index(other) > CORE_UNITS.index(unit):
            faults.append(f'{where}: `{unit}` includes "{header}", a unit above it')
    return faults


def python_h_faults(source: str, name: str) -> list[str]:
    """Of a C file anywhere but in native/python."""
    return [
        f"{name}:{line_of(source, match.start())}: includes Python.h outside native/python"
        for match in INCLUDE.finditer(source)
        if match.group(2) == "Python.h"
    ]


# ---- the Spark connector: public names only -------------------------------------------------


def connector_faults(source: str, name: str, public: set[str]) -> list[str]:
    faults = []
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith(f"{FACADE}."):
                    faults.append(f"{name}:{node.lineno}: `{alias.name}` is not public")
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            if (node.module or "").startswith(f"{FACADE}."):
                faults.append(f"{name}:{node.lineno}: `{node.module}` is not public")
            elif node.module == FACADE:
                faults += [
                    f"{name}:{node.lineno}: `{alias.name}` is not in logstore.__all__"
                    for alias in node.names
                    if alias.name not in public
                ]
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else None
            private = node.attr.startswith("_") and not node.attr.endswith("__")
            if owner == FACADE and node.attr not in public | {"__version__"}:
                faults.append(f"{name}:{node.lineno}: logstore.{node.attr} is not public")
            elif private and owner not in {"self", "cls"}:
                faults.append(f"{name}:{node.lineno}: `.{node.attr}` is private to another class")
    return faults


# ---- the tree as it is -----------------------------------------------------------------


def python_files(folder: str) -> list[Path]:
    return sorted(p for suffix in ("*.py", "*.pyi") for p in (ROOT / folder).rglob(suffix))


def c_files(folder: Path) -> list[Path]:
    suffixes = {".c", ".h", ".cc", ".cpp", ".hpp", ".pyx"}
    skipped = {"build", "dist", "target"}
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix in suffixes
        and not any(p in skipped or p.startswith(".") for p in path.relative_to(folder).parts[:-1])
    )


def module_of(path: Path) -> tuple[str, bool]:
    relative = path.relative_to(ROOT).with_suffix("")
    is_package = relative.name == "__init__"
    return ".".join(relative.parts[:-1] if is_package else relative.parts), is_package


def test_no_package_imports_a_package_that_is_not_below_it() -> None:
    files = python_files("logstore")
    assert files, "nothing was read"
    faults = []
    for path in files:
        module, is_package = module_of(path)
        faults += layering_faults(path.read_text("utf-8"), module, is_package=is_package)
    assert not faults, "\n".join(faults)


def test_no_package_has_a_cycle_inside() -> None:
    files = {module_of(path): path for path in python_files("logstore") if path.suffix == ".py"}
    modules = {module for module, _ in files}
    imports: dict[str, set[str]] = {}
    for (module, is_package), path in files.items():
        if module == FACADE:
            continue
        targets = imports[module] = set()
        source = path.read_text("utf-8")
        for _, target in imports_of(source, module, is_package=is_package):
            found = target if target in modules else target.rpartition(".")[0]
            if found in modules and found != FACADE:
                targets.add(found)
    assert not cycles(imports)


def test_every_file_of_the_engine_has_its_place() -> None:
    entries = {
        p.stem if p.is_file() else p.name
        for p in (ROOT / "logstore").iterdir()
        if p.suffix == ".py" or (p.is_dir() and (p / "__init__.py").exists())
    }
    assert entries - {"__init__"} <= set(LAYER_OF)


def imports_at_once(path: Path) -> Iterator[str]:
    """The modules that are imported when `path` is, those for type checkers left out."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            yield str(node.module)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names)


def test_an_engine_package_has_an_empty_init() -> None:
    """A name that `__init__` imports would be imported by every module of the package."""
    for layer in LAYERS[1:-2]:
        for package in layer:
            path = ROOT / "logstore" / package / "__init__.py"
            if package == "kafka":  # has public names, which it imports when they are used
                assert set(imports_at_once(path)) <= {"__future__", "typing"}
            elif path.exists():
                (docstring,) = ast.parse(path.read_text("utf-8")).body
                assert isinstance(docstring, ast.Expr)


def test_the_core_knows_no_python_and_includes_only_downwards() -> None:
    files = c_files(ROOT / "native" / "core")
    assert files, "nothing was read"
    faults = [fault for p in files for fault in core_faults(p.read_text("utf-8"), p.name)]
    assert not faults, "\n".join(faults)


def test_only_the_binding_includes_python_h() -> None:
    binding = ROOT / "native" / "python"
    faults = [
        fault
        for p in c_files(ROOT)
        if binding not in p.parents
        for fault in python_h_faults(p.read_text("utf-8"), str(p.relative_to(ROOT)))
    ]
    assert not faults, "\n".join(faults)


def test_the_spark_connector_uses_public_names_only() -> None:
    public = set(logstore.__all__)
    faults = [
        fault
        for p in python_files("spark_connector")
        if "tests" not in p.parts
        for fault in connector_faults(p.read_text("utf-8"), p.name, public)
    ]
    assert not faults, "\n".join(faults)


# ---- the checks can fail --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("logstore.log.segment", "from logstore.partition.partition import Partition"),
        ("logstore.log.segment", "from ..partition.partition import Partition"),
        ("logstore.log.segment", "from .. import partition"),
        ("logstore.log.segment", "import logstore.partition"),
        ("logstore.log.segment", "from logstore import partition"),
        ("logstore.log.segment", "def roll():\n    from logstore.store.store import Store\n"),
        ("logstore.log.segment", "try:\n    import logstore.cli\nexcept ImportError:\n    pass"),
        ("logstore.log.segment", "from logstore import Record"),
        ("logstore.log.segment", "import logstore"),
        ("logstore.log.segment", "from logstore.manager import Manager"),
        ("logstore.manager", ""),
        ("logstore.errors", "from logstore.files.names import segment_name"),
        ("logstore.root.catalogue", "from logstore.recovery.loader import load"),
        ("logstore.coordinators.lag", "from logstore.consumer.consumer import Consumer"),
        ("logstore.consumer.consumer", "from ..producer import lane"),
    ],
)
def test_an_import_that_points_up_or_to_a_sibling_is_found(module: str, source: str) -> None:
    assert layering_faults(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "logstore.partition.partition",
            "from logstore.log.segment import Segment\nfrom .writer import Writer",
        ),
        ("logstore.consumer.consumer", "from .assignors import Range\nfrom ..store import store"),
        ("logstore.partition.writer", "import os\nimport numpy.typing"),
        ("logstore.cli.main", "import logstore\nfrom logstore import Partition"),
        (
            "logstore.record",
            "from logstore import _native\nfrom logstore.errors import ClosedError",
        ),
        (
            "logstore.log.segment",
            "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from logstore.partition.partition import Partition\n",
        ),
        ("logstore", "from logstore.cli import main"),
    ],
)
def test_an_import_that_points_down_is_allowed(module: str, source: str) -> None:
    assert layering_faults(source, module) == []


def test_a_package_resolves_its_relative_imports_from_itself() -> None:
    source = "from ..log import segment"
    assert layering_faults(source, "logstore.partition", is_package=True) == []
    assert layering_faults("from ..store import x", "logstore.partition", is_package=True)


def test_a_cycle_is_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) != []
    assert cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize(
    "source",
    [
        "#include <Python.h>",
        "# include <Python.h>",
        "PyObject *o;",
        "Py_ssize_t n;",
        "_Py_Dealloc(o);",
        '#include "../python/module.h"',
        '#include "module.h"',
        '#include "segment.h"',
    ],
)
def test_a_core_file_that_looks_up_is_found(source: str) -> None:
    assert core_faults(source, "batch.c")


def test_a_core_file_that_looks_down_is_allowed() -> None:
    source = '#include "batch.h"\n#include <string.h>\n#include "format.h"\n/* as Python does */'
    assert core_faults(source, "batch.c") == []
    assert core_faults("", "manager.c")


def test_python_h_outside_the_binding_is_found() -> None:
    assert python_h_faults("#include <stdio.h>\n#include <Python.h>\n", "native/tests/x.c")
    assert python_h_faults("/* Python.h is not for us */", "native/tests/x.c") == []


@pytest.mark.parametrize(
    "source",
    [
        "from logstore.partition import Partition",
        "import logstore._native",
        "from logstore import _native",
        "from logstore import Segments",
        "import logstore\nlogstore._native.open()",
        "def f(log):\n    return log._segments",
    ],
)
def test_a_connector_that_looks_inside_is_found(source: str) -> None:
    assert connector_faults(source, "x.py", {"Partition"})


def test_a_connector_with_public_names_is_allowed() -> None:
    source = (
        "import logstore\nfrom logstore import Partition\nfrom ._plan import Plan\n"
        "class Reader:\n    def open(self):\n        self._log = logstore.Partition.open('x')\n"
    )
    assert connector_faults(source, "x.py", {"Partition"}) == []


def test_no_file_is_long() -> None:
    """A file that grows beyond this has two nouns: split it."""
    long = {
        path.relative_to(ROOT).as_posix(): count
        for path in (ROOT / "logstore").rglob("*.py")
        if (count := len(path.read_text("utf-8").splitlines())) > 600
    }
    assert long == {}


def test_no_engine_package_has_many_files() -> None:
    """A stranger looks through a package; `kafka` and `testing` are more than one noun each."""
    many = {
        package: len(files)
        for package in LAYER_OF
        if (ROOT / "logstore" / package).is_dir() and package not in ("kafka", "testing", "cli")
        if len(files := [*(ROOT / "logstore" / package).glob("[!_]*.py")]) > 13
    }
    assert many == {}
