"""Findings of the history checker, and the copies that it checks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from logstore.testing.operations import (
    Operation,
)

__all__ = ["Copy", "Finding", "HistoryViolation"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One contradiction: its kind, the operations that show it, and a message."""

    kind: str
    message: str
    operations: tuple[Operation, ...]
    partition: Hashable = None
    offsets: tuple[int, ...] = ()
    values: tuple[Hashable, ...] = ()

    def __str__(self) -> str:
        shown = "".join(f"\n    {operation}" for operation in self.operations)
        return f"{self.kind}: {self.message}{shown}"


class HistoryViolation(AssertionError):
    """A history with ``.findings``."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        shown = "\n".join(map(str, findings[:20]))
        more = f"\n... and {len(findings) - 20} more" if len(findings) > 20 else ""
        super().__init__(f"{len(findings)} findings\n{shown}{more}")
        self.findings = list(findings)


@dataclass(frozen=True, slots=True)
class Copy:
    """Partitions whose committed values appear, each once and changed by ``transform``, in others.

    A value of the source that is missing counts when ``group`` has committed an offset after it,
    or when all have caught up.  Reads at either isolation count.  A record that was read
    uncommitted counts twice only if its send was acknowledged or its transaction committed; it
    counts as missing only if no reader has seen it, or if its transaction is known to be aborted.
    """

    source: frozenset[Hashable]
    target: frozenset[Hashable]
    group: Hashable = None
    transform: Callable[[Hashable], Hashable] | None = None


def offset_of(read: tuple[int, Hashable]) -> int:
    return read[0]
