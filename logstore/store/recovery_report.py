"""StoreRecovery: what opening a store found."""

from __future__ import annotations

import dataclasses

from logstore.recovery.report import RecoveryReport

__all__ = ["StoreRecovery"]


@dataclasses.dataclass(slots=True)
class StoreRecovery:
    """What opening found.  ``store.recovery``.

    `partitions`: the report of each partition that had to be checked.  `failed`: the error of each
    partition that could not be opened; its use raises the error again, and the others can be used.
    `unfinished`: the error of each deleted directory or topic that could not be removed; they are
    hidden, and the next open tries again.  `foreign`: a broker has written here since.
    """

    clean: bool = True
    partitions: dict[str, RecoveryReport] = dataclasses.field(default_factory=dict)
    failed: dict[str, BaseException] = dataclasses.field(default_factory=dict)
    removed: list[str] = dataclasses.field(default_factory=list)  # creations and deletions undone
    unfinished: dict[str, OSError] = dataclasses.field(default_factory=dict)
    foreign: bool = False
