"""At least one line in twenty of `logstore/` has a comment; blank lines do not count.

A comment states what the code cannot: the lock that is held, the order of writes, what a crash
between two lines leaves, the owner of a descriptor.  A comment that repeats the code is worse than
none, so the share is a floor and not a goal.
"""

from __future__ import annotations

import io
import tokenize
from pathlib import Path

import logstore

ROOT = Path(logstore.__file__).parent
LEAST = 0.05


def counted(source: str) -> tuple[int, int]:
    """Return how many lines have a comment, and how many are not blank."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    commented = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    return len(commented), sum(1 for line in source.splitlines() if line.strip())


def test_enough_lines_have_a_comment() -> None:
    counts = [counted(path.read_text("utf-8")) for path in sorted(ROOT.rglob("*.py"))]
    commented, lines = (sum(column) for column in zip(*counts, strict=True))
    assert commented >= LEAST * lines, f"{commented} of {lines} lines: {commented / lines:.2%}"


def test_comments_are_counted_and_strings_are_not() -> None:
    source = 'a = "# no"  # yes\n\n# yes\n"""\n# no\n"""\nb = [\n    1,  # yes\n]\n'
    assert counted(source) == (3, 8)
