"""The size of a campaign: a test that repeats one question many times.

LOGSTORE_CAMPAIGN=small is the default and what `make test` runs; `.ci/run` asks for ci, and
`make campaigns` for full.  A campaign carries the mark `campaign`.
"""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")

SIZES = ("small", "ci", "full")
SIZE = os.environ.get("LOGSTORE_CAMPAIGN", "small")
if SIZE not in SIZES:
    raise ValueError(f"LOGSTORE_CAMPAIGN must be one of {', '.join(SIZES)}, not {SIZE!r}")


def sized(small: T, ci: T, full: T) -> T:
    """Return the argument that is for the size in force."""
    return dict(zip(SIZES, (small, ci, full), strict=True))[SIZE]
