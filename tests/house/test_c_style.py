"""The length of the C functions, read from the source.

The check is a function of source text, so that the last tests can hand it planted violations: a
check that cannot fail proves nothing.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
FUNCTION_LINES_MAX = 80

# A body begins with a brace in the first column after a line that ends with a parenthesis, and ends
# with the next brace in the first column.
FUNCTION = re.compile(r"^(?P<head>[A-Za-z_][^;{}]*\))\n\{\n.*?^\}$", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"(\w+)\(")


def long_functions(source: str, name: str) -> list[str]:
    """The functions of more than FUNCTION_LINES_MAX lines, from the name to the last brace."""
    faults = []
    for match in FUNCTION.finditer(source):
        lines = match.group().count("\n") + 1
        if lines > FUNCTION_LINES_MAX:
            function = NAME.search(match["head"])
            line = source.count("\n", 0, match.start()) + 1
            faults.append(
                f"{name}:{line}: {function[1] if function else '?'}() has {lines} lines, "
                f"more than {FUNCTION_LINES_MAX}"
            )
    return faults


def c_files() -> list[Path]:
    return sorted(p for p in (ROOT / "native").rglob("*.[ch]"))


def test_no_c_function_is_too_long() -> None:
    faults = [
        fault
        for path in c_files()
        for fault in long_functions(path.read_text("utf-8"), str(path.relative_to(ROOT)))
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("name", ["ls_scan_get", "ls_cleaner_batch", "native_batch_below"])
def test_the_functions_of_the_tree_are_found(name: str) -> None:
    sources = [path.read_text("utf-8") for path in c_files()]
    heads = [match["head"] for source in sources for match in FUNCTION.finditer(source)]
    assert any(re.search(rf"\b{name}\(", head) for head in heads)


def function_of(lines: int) -> str:
    body = "    step();\n" * (lines - 4)
    return f"static int longer(int a,\n                  int b)\n{{\n{body}}}\n"


@pytest.mark.parametrize("before", ["", "/* A comment. */\n", '#include "x.h"\n\nint a;\n'])
def test_a_function_that_is_too_long_is_found(before: str) -> None:
    source = before + function_of(FUNCTION_LINES_MAX + 1)
    (fault,) = long_functions(source, "x.c")
    assert fault.startswith("x.c:")
    assert f"longer() has {FUNCTION_LINES_MAX + 1} lines" in fault


def test_a_function_of_the_greatest_length_is_allowed() -> None:
    two = function_of(FUNCTION_LINES_MAX) + "\n" + function_of(FUNCTION_LINES_MAX)
    assert long_functions(two, "x.c") == []
