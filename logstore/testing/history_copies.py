"""The check of a copy: each committed value of the source is exactly once in the target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

from logstore.testing.history_facts import (
    times,
)
from logstore.testing.history_findings import Copy, Finding, offset_of
from logstore.testing.operations import (
    Commit,
    Operation,
)

if TYPE_CHECKING:
    from logstore.testing.history_checks import Checker


def check_copy(checker: Checker, copy: Copy) -> Iterator[Finding]:
    """Check that each committed value of the source is exactly once in the target."""
    worked_up_to: dict[Hashable, int] = {}
    for operation in checker.history.operations:
        if operation.outcome == "ok":
            for act in operation.acts:
                if isinstance(act, Commit) and act.group == copy.group:
                    for name, offset in act.offsets:
                        worked_up_to[name] = max(offset, worked_up_to.get(name, 0))
    for name in sorted(copy.source | copy.target, key=repr):
        _require_known(checker, name)
    expected: Counter[Hashable] = Counter()
    possible: Counter[Hashable] = Counter()
    due: dict[Hashable, tuple[Hashable, int, Operation]] = {}
    for name in copy.source:
        if name not in checker.partitions:
            continue
        partition = checker.partitions[name]
        for offset in checker.positions[name]:
            for value, operation in partition.at[offset].items():
                result = value if copy.transform is None else copy.transform(value)
                possible[result] += 1
                if offset not in partition.certain:
                    continue  # possibly aborted: the copy may or may not have it
                expected[result] += 1
                if checker.caught_up or offset < worked_up_to.get(name, 0):
                    due.setdefault(result, (name, offset, operation))
    there: dict[Hashable, list[tuple[Hashable, int, Operation]]] = {}
    perhaps: Counter[Hashable] = Counter()  # read uncommitted: committed, aborted or open
    for name in copy.target:
        if name in checker.partitions:
            partition = checker.partitions[name]
            for offset, value in sorted(partition.read, key=offset_of):
                if offset in partition.certain:
                    claimed = partition.at[offset][value]
                    operation = partition.seen_committed.get(offset, claimed)
                    there.setdefault(value, []).append((name, offset, operation))
                elif not partition.is_aborted(offset, value):
                    perhaps[value] += 1
    for value, places in there.items():
        if len(places) > possible[value]:
            yield Finding(
                "exactly-once-copy",
                f"{value!r} is in the copy {times(len(places))}, and in the source "
                f"{times(possible[value])}",
                tuple(dict.fromkeys(operation for _, _, operation in places)),
                places[-1][0],
                tuple(offset for _, offset, _ in places),
                (value,),
            )
    for value, (name, offset, operation) in due.items():
        if len(there.get(value, ())) + perhaps[value] < expected[value]:
            yield Finding(
                "exactly-once-copy",
                f"{value!r} at offset {offset} of {name!r} is not in the copy",
                (operation,),
                name,
                (offset,),
                (value,),
            )


def _require_known(checker: Checker, name: Hashable) -> None:
    """Raise ValueError if the history cannot show which records of a partition count."""
    partition = checker.partitions.get(name)
    if partition is None or not partition.read or partition.writers or partition.seen_committed:
        return
    raise ValueError(
        f"{name!r} is part of a copy, its sends are not recorded, and it was read uncommitted "
        "only, so aborted and committed records look the same: record its "
        "snapshot with isolation='read_committed'"
    )
