"""The shape of the house, read from the source.

A room of `logstore/` imports only from rooms that stand before it in ROOMS; the core in `native/`
likewise, and it knows nothing of Python; the Spark connector sees public names only.

The checks are functions of source text, so that the second half of this file can hand them
planted violations: a check that cannot fail proves nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Lowest first: a room may import those before it.
ROOMS = (
    *("closeable", "errors", "config", "clock", "waking", "timer", "fields"),
    *("_native", "_files", "filesystem", "reserve", "codecs", "record", "batch"),
    *("index", "summary", "digest", "failed_sync", "problem"),
    *("segment", "checkpoint", "twin", "epochs", "root"),
    *("producer_ids", "producer_state", "producers"),
    *("incoming", "retention", "swap", "split", "recovery"),
    *("commit", "scan", "writer", "encoder"),
    *("view", "beside", "leadership", "stable", "inspection"),
    *("readable", "writable", "appendable", "rewritable", "partition"),
    *("serialization", "interceptors"),
    *("compaction", "verify", "mending", "partitioner"),
    *("topic", "root_checkpoints", "store", "maintenance"),
    *("internal_topics", "offsets"),
    *("transactions", "groups", "opening", "replication", "kafka", "times", "where", "testing"),
    *("cli", "__main__"),
)
# `logstore/__init__.py` gathers the public names: it may import any room, and only these, which
# stand outside the engine, may import it.
FACADE = "logstore"
MAY_USE_FACADE = frozenset({"testing", "cli"})

CORE_ROOMS = (
    *("status", "format", "crc32c", "murmur2", "io", "watch", "memory", "lz4_frame"),
    *("batch", "run", "columns", "index", "segment", "ahead", "offset_map", "cleaner"),
)

# ---- Python: who imports whom ---------------------------------------------------------------


def room_of(module: str) -> str:
    """`logstore.kafka.frames` -> `kafka`; `logstore` -> `logstore`, the façade."""
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
    """(line, absolute module) of every import of logstore, wherever in the file it stands.

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
                    yield node.lineno, f"{FACADE}.{alias.name}" if alias.name in ROOMS else FACADE
            elif target.startswith(f"{FACADE}."):
                yield node.lineno, target


def layering_faults(source: str, module: str, *, is_package: bool = False) -> list[str]:
    room = room_of(module)
    if room == FACADE:
        return []
    if room not in ROOMS:
        return [f"{module}: `{room}` has no place in ROOMS"]
    faults = []
    for line, target in imports_of(source, module, is_package=is_package):
        other = room_of(target)
        if other == room:
            continue
        if other == FACADE:
            if room not in MAY_USE_FACADE:
                faults.append(f"{module}:{line}: imports the façade; name the room instead")
        elif other not in ROOMS:
            faults.append(f"{module}:{line}: imports `{other}`, which has no place in ROOMS")
        elif ROOMS.index(other) > ROOMS.index(room):
            faults.append(f"{module}:{line}: `{room}` imports `{other}`, a room above it")
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
    room = name.rsplit(".", 1)[0]
    if room not in CORE_ROOMS:
        return [*faults, f"{name}: `{room}` has no place in CORE_ROOMS"]
    for match in INCLUDE.finditer(source):
        quote, header = match.groups()
        where = f"{name}:{line_of(source, match.start())}"
        other = header.rsplit(".", 1)[0]
        if quote == "<":
            continue
        if other not in CORE_ROOMS:
            faults.append(f'{where}: "{header}" is not a header of the core')
        elif CORE_ROOMS.index(other) > CORE_ROOMS.index(room):
            faults.append(f'{where}: `{room}` includes "{header}", a room above it')
    return faults


def python_h_faults(source: str, name: str) -> list[str]:
    """Of a C file anywhere but in native/python."""
    return [
        f"{name}:{line_of(source, match.start())}: includes Python.h outside native/python"
        for match in INCLUDE.finditer(source)
        if match.group(2) == "Python.h"
    ]


# ---- the Spark connector: public names only -------------------------------------------------


def public_names_of(facade_source: str) -> set[str]:
    for node in ast.parse(facade_source).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets):
            assert isinstance(node, ast.Assign | ast.AnnAssign)
            assert node.value is not None
            return set(ast.literal_eval(node.value))
    raise AssertionError("logstore/__init__.py has no literal __all__")


def connector_faults(source: str, name: str, public: set[str]) -> list[str]:
    faults = []
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith(f"{FACADE}."):
                    faults.append(f"{name}:{node.lineno}: `{alias.name}` is inside the house")
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            if (node.module or "").startswith(f"{FACADE}."):
                faults.append(f"{name}:{node.lineno}: `{node.module}` is inside the house")
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
                faults.append(f"{name}:{node.lineno}: `.{node.attr}` is private to someone else")
    return faults


# ---- the house as it stands -----------------------------------------------------------------


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


def test_no_room_imports_a_room_above_it() -> None:
    files = python_files("logstore")
    assert files, "nothing was read"
    faults = []
    for path in files:
        relative = path.relative_to(ROOT).with_suffix("")
        is_package = relative.name == "__init__"
        module = ".".join(relative.parts[:-1] if is_package else relative.parts)
        faults += layering_faults(path.read_text("utf-8"), module, is_package=is_package)
    assert not faults, "\n".join(faults)


def test_every_file_of_the_engine_has_its_place() -> None:
    entries = {
        p.stem if p.is_file() else p.name
        for p in (ROOT / "logstore").iterdir()
        if p.suffix == ".py" or (p.is_dir() and (p / "__init__.py").exists())
    }
    assert entries - {"__init__", "__main__"} <= set(ROOMS)


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
    public = public_names_of((ROOT / "logstore" / "__init__.py").read_text("utf-8"))
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
        ("logstore.segment", "from logstore.partition import Partition"),
        ("logstore.segment", "from .partition import Partition"),
        ("logstore.segment", "from . import partition"),
        ("logstore.segment", "import logstore.partition"),
        ("logstore.segment", "from logstore import partition"),
        ("logstore.segment", "def roll():\n    from logstore.store import Store\n"),
        ("logstore.segment", "try:\n    import logstore.cli\nexcept ImportError:\n    pass"),
        ("logstore.segment", "from logstore import Record"),
        ("logstore.segment", "import logstore"),
        ("logstore.segment", "from logstore.manager import Manager"),
        ("logstore.manager", ""),
        ("logstore.groups.consumer", "from ..kafka import frames"),
        ("logstore.groups.consumer", "from logstore.replication.leader import Leader"),
    ],
)
def test_an_import_that_points_up_is_found(module: str, source: str) -> None:
    assert layering_faults(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("logstore.partition", "from logstore.segment import Segment\nfrom .writer import Writer"),
        ("logstore.groups.consumer", "from .assignors import Range\nfrom ..store import Store"),
        ("logstore.writer", "import os\nimport numpy.typing"),
        ("logstore.cli.main", "import logstore\nfrom logstore import Partition"),
        (
            "logstore.writer",
            "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from logstore.partition import Partition\n",
        ),
        ("logstore", "from logstore.cli import main"),
    ],
)
def test_an_import_that_points_down_is_allowed(module: str, source: str) -> None:
    assert layering_faults(source, module) == []


def test_a_package_resolves_its_relative_imports_from_itself() -> None:
    source = "from ..partition import Partition"
    assert layering_faults(source, "logstore.groups", is_package=True) == []
    assert layering_faults("from ..kafka import x", "logstore.groups", is_package=True)


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


def test_public_names_are_read_from_the_source() -> None:
    assert public_names_of('import x\n__all__ = ["A", "b"]\n') == {"A", "b"}
    assert public_names_of('__all__: list[str] = ["A"]\n') == {"A"}
