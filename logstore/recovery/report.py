"""RecoveryReport: what opening a partition found, cut and kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from logstore.log.producer_files import DiscardedSnapshot

__all__ = ["Damage", "RecoveryProgress", "RecoveryReport", "TornTail"]


# Called with (bytes checked so far, bytes to check in all).
RecoveryProgress = Callable[[int, int], None]


class TornTail(NamedTuple):
    """Bytes that were cut off because the append they belong to never finished."""

    path: Path
    position: int
    size_bytes: int
    offset: int  # the next offset of the log
    kept_as: Path | None  # None: nothing but zeros
    reason: str


class Damage(NamedTuple):
    """Bytes that cannot be what was written.  Still in place; reading these offsets raises."""

    path: Path
    position: int
    end_position: int
    offsets: range
    reason: str


@dataclasses.dataclass(slots=True)
class RecoveryReport:
    """What opening found and did.  ``partition.recovery``."""

    clean: bool = True
    bytes_checked: int = 0
    segments_checked: int = 0
    torn: list[TornTail] = dataclasses.field(default_factory=list)
    damage: list[Damage] = dataclasses.field(default_factory=list)
    indexes_rebuilt: list[Path] = dataclasses.field(default_factory=list)
    removed: list[Path] = dataclasses.field(default_factory=list)
    set_aside: list[Path] = dataclasses.field(default_factory=list)
    rewritten: list[Path] = dataclasses.field(default_factory=list)  # after a failed fsync
    truncation_finished: bool = False
    swap_finished: bool = False  # rewritten segments have replaced old ones
    snapshots_discarded: list[DiscardedSnapshot] = dataclasses.field(default_factory=list)
    # Whether records that this log has acknowledged to others, as one of several replicas, may be
    # gone.  With durability "os": it was not closed cleanly, and was written in an earlier boot of
    # the machine, or an fsync failed.  At any level: damage, or a segment that was set aside.
    # Stays until `ActiveLog.clear_lossy`.
    lossy: bool = False

    def __str__(self) -> str:
        if self.clean:
            return "closed cleanly: nothing to check"
        cut = sum(tail.size_bytes for tail in self.torn)
        lost = sum(len(damage.offsets) for damage in self.damage)
        return (
            f"checked {self.bytes_checked} bytes in {self.segments_checked} segments; "
            f"cut {cut} torn bytes; {len(self.damage)} damaged stretches hide {lost} offsets; "
            f"rebuilt {len(self.indexes_rebuilt)} indexes"
        )
