"""The check for cycles: operations that depend on themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from logstore.testing.cycles import circular, way
from logstore.testing.history_findings import Finding
from logstore.testing.operations import (
    Operation,
    Poll,
)

if TYPE_CHECKING:
    from logstore.testing.history_checks import Checker


def cycles(checker: Checker) -> Iterator[Finding]:
    """Find operations that depend on themselves, by writes after writes and reads of writes."""
    writes: dict[Operation, dict[Operation, str]] = defaultdict(dict)
    every: dict[Operation, dict[Operation, str]] = defaultdict(dict)
    for name, partition in checker.partitions.items():
        before: Operation | None = None
        for offset in checker.positions[name]:
            for value in partition.at[offset]:
                writers = partition.writers.get(value, ())
                if len(writers) != 1 or writers[0].outcome == "fail":
                    continue
                if before is not None and before is not writers[0]:
                    what = f"{name!r} offset {offset} after the other's"
                    writes[before].setdefault(writers[0], what)
                    every[before].setdefault(writers[0], what)
                before = writers[0]
    for operation in checker.history.operations:
        if operation.outcome == "fail":
            continue
        for act in operation.acts:
            if isinstance(act, Poll):
                for read in act.reads:
                    writers = checker.partitions[read.partition].writers.get(read.value, ())
                    if len(writers) == 1 and writers[0] is not operation:
                        what = f"{read.partition!r} offset {read.offset} read"
                        every[writers[0]].setdefault(operation, what)
    for part in circular(writes):
        source = part[0]
        target = next(target for target in writes[source] if target in part)
        yield circle("G0", [source, *way(writes, target, source)], writes)
    for part in circular(every):
        members = set(part)
        for source in part:
            reader = next(
                (t for t in every[source] if t in members and t not in writes.get(source, ())),
                None,
            )
            if reader is not None:
                yield circle("G1c", [source, *way(every, reader, source)], every)
                break


def circle(
    kind: str, path: list[Operation], edges: dict[Operation, dict[Operation, str]]
) -> Finding:
    steps = [f"#{a.number} before #{b.number} ({edges[a][b]})" for a, b in pairwise(path)]
    return Finding(kind, "; ".join(steps), tuple(path[:-1]))
