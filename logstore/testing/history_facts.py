"""PartitionHistory: the facts of a history about one partition; and the order of operations."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from logstore.testing.operations import (
    COMMITTED,
    Operation,
    Send,
    Snapshot,
)

Stretch = tuple[int, int, Operation]


@dataclass(slots=True)
class PartitionHistory:
    sends: list[tuple[Operation, Send]] = field(default_factory=list)
    # Operations that may have written a value, one entry per send; and those that did not.
    writers: dict[Hashable, list[Operation]] = field(default_factory=dict)
    refused: dict[Hashable, list[Operation]] = field(default_factory=dict)
    # offset -> value -> operations that acknowledged or read it.
    at: dict[int, dict[Hashable, Operation]] = field(default_factory=dict)
    read: set[tuple[int, Hashable]] = field(default_factory=set)
    values_seen: set[Hashable] = field(default_factory=set)
    # offset -> the first read_committed operation that read a value there.
    seen_committed: dict[int, Operation] = field(default_factory=dict)
    # Offsets that a read_committed reader must not skip.
    certain: set[int] = field(default_factory=set)
    # (first, last, operation): a reader read from `first` to a value at `last`.
    stretches: list[Stretch] = field(default_factory=list)
    stretches_committed: list[Stretch] = field(default_factory=list)
    snapshots: list[tuple[Operation, Snapshot]] = field(default_factory=list)

    def claim(self, offset: int, value: Hashable, operation: Operation) -> None:
        values = self.at.get(offset)
        if values is None:
            self.at[offset] = {value: operation}
        elif value not in values:
            values[value] = operation

    def is_aborted(self, offset: int, value: Hashable) -> bool:
        """Return whether a record that only uncommitted readers saw is known to be aborted."""
        known = completion(self.at[offset][value])
        if any(s.isolation == COMMITTED and o.invoked > known for o, s in self.snapshots):
            return True  # the snapshot has all committed records, and not this one
        writers = self.writers.get(value, [])
        return bool(writers) and all(operation.outcome == "fail" for operation in writers)

    def came_through(self, first: int, last: int, operation: Operation, isolation: str) -> None:
        self.stretches.append((first, last, operation))
        if isolation == COMMITTED:
            self.stretches_committed.append((first, last, operation))


def completion(operation: Operation) -> int:
    return operation.invoked if operation.completed is None else operation.completed


def commit_asked(writer: Operation) -> int:
    """Return the place in the history from which a transaction may be visible."""
    return writer.invoked if writer.prepared is None else writer.prepared


def was_reset(
    commits: list[tuple[Operation, int, bool]], since: Operation, until: Operation, offset: int
) -> bool:
    """Return whether a reset to `offset` or below may be between two operations."""
    return any(
        reset
        and to <= offset
        and completion_or_never(operation) > since.invoked
        and operation.invoked < completion(until)
        for operation, to, reset in commits
    )


def explains(commits: list[tuple[Operation, int, bool]], reader: Operation, offset: int) -> bool:
    """Return whether a commit of `offset` may be the newest that the reader could see."""
    return any(
        to == offset
        and operation.invoked < completion(reader)
        and not any(
            other.outcome == "ok"
            and other.invoked > completion_or_never(operation)
            and completion(other) < reader.invoked
            for other, _, _ in commits
        )
        for operation, to, _ in commits
    )


def completion_or_never(operation: Operation) -> int:
    """Return the place of completion; beyond all places if it is not ``ok``."""
    return completion(operation) if operation.outcome == "ok" else 1 << 62


def place(
    at: dict[tuple[Hashable, Hashable], tuple[int, Operation, bool]],
    consumer: Hashable,
    positions: Iterable[tuple[Hashable, int]],
    operation: Operation,
) -> None:
    for name, offset in positions:
        at[(consumer, name)] = (offset, operation, False)


def merged(stretches: list[Stretch]) -> list[Stretch]:
    """Return the ranges sorted, with touching ones merged."""
    merged: list[Stretch] = []
    for first, last, operation in sorted(stretches, key=lambda stretch: stretch[:2]):
        if merged and first <= merged[-1][1]:
            if last > merged[-1][1]:
                merged[-1] = (merged[-1][0], last, operation)
        else:
            merged.append((first, last, operation))
    return merged


def reader_past(covered: list[Stretch], offset: int) -> Operation | None:
    """Return an operation that read across an offset, or a value at it; else None."""
    slot = bisect_right(covered, offset, key=lambda stretch: stretch[0]) - 1
    return covered[slot][2] if slot >= 0 and covered[slot][1] >= offset else None


def listed(offsets: Sequence[int]) -> str:
    shown = ", ".join(map(str, offsets[:5]))
    return shown + (f" and {len(offsets) - 5} more" if len(offsets) > 5 else "")


def times(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")
