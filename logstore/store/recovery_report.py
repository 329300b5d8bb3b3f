"""StoreRecovery: what opening a store found."""

from __future__ import annotations

import dataclasses

from logstore.recovery.report import RecoveryReport

__all__ = ["StoreRecovery"]


@dataclasses.dataclass(slots=True)
class StoreRecovery:
    """What opening found.  ``store.recovery``.

    `partitions`: the report of each that had to be checked; `failed`: those that could not be
    opened, and why.  Using one of these raises that error; all others can be used.  `unfinished`:
    directories and topics on their way out that could not be removed, and why; they are out of
    sight, and the next open tries again.  `foreign`: a broker has written here since.
    """

    clean: bool = True
    partitions: dict[str, RecoveryReport] = dataclasses.field(default_factory=dict)
    failed: dict[str, BaseException] = dataclasses.field(default_factory=dict)
    removed: list[str] = dataclasses.field(default_factory=list)  # creations and deletions undone
    unfinished: dict[str, OSError] = dataclasses.field(default_factory=dict)
    foreign: bool = False
