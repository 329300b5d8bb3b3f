"""Problem: a fault that `check` found in a directory.

A problem holds the file, the position in it and the offsets of the records it affects.  Its kind
decides severity, meaning for a reader of the log, and remedy.  A problem is immutable, and
`as_json` returns all of it.
"""

from __future__ import annotations

import dataclasses
import enum
from pathlib import Path
from typing import Any

__all__ = ["Problem", "ProblemKind", "Severity"]


class Severity(enum.StrEnum):
    """How serious a problem is."""

    ERROR = "error"  # records are hidden or wrong, or a file is not what was written
    WARNING = "warning"  # no record is lost; the remedy corrects it, often an open for writing
    NOTE = "note"  # for information; nothing is wrong


class ProblemKind(enum.StrEnum):
    """The kinds of problems.  A kind decides severity, meaning and remedy."""

    DAMAGED_BATCH = "damaged-batch"
    MISSING_RECORDS = "missing-records"
    UNREADABLE_FILE = "unreadable-file"
    OLD_FORMAT = "old-format"
    UNAVAILABLE_CODEC = "unavailable-codec"
    TORN_TAIL = "torn-tail"
    DIGEST_MISMATCH = "digest-mismatch"
    DAMAGED_DIGEST = "damaged-digest"
    DAMAGED_INDEX = "damaged-index"
    MISSING_INDEX = "missing-index"
    DAMAGED_TIME_INDEX = "damaged-time-index"
    DAMAGED_TRANSACTION_INDEX = "damaged-transaction-index"
    DAMAGED_SNAPSHOT = "damaged-snapshot"
    DAMAGED_LEADER_EPOCHS = "damaged-leader-epochs"
    DAMAGED_METADATA = "damaged-metadata"
    DAMAGED_STATE = "damaged-state"
    DAMAGED_PLAN = "damaged-plan"
    UNFINISHED_PLAN = "unfinished-plan"
    FAILED_SYNC = "failed-sync"
    DAMAGED_IDENTITY = "damaged-identity"
    DAMAGED_CHECKPOINT = "damaged-checkpoint"
    STALE_CHECKPOINT = "stale-checkpoint"
    DAMAGED_CATALOGUE = "damaged-catalogue"
    MISSING_CATALOGUE = "missing-catalogue"
    MISSING_PARTITION = "missing-partition"
    UNOPENABLE_PARTITION = "unopenable-partition"
    DAMAGED_MARKER = "damaged-marker"
    STRAY_FILE = "stray-file"
    KEPT_ASIDE = "kept-aside"


# For each kind: severity, meaning, remedy.  The two texts are shown to users.
_KINDS = {
    ProblemKind.DAMAGED_BATCH: (
        Severity.ERROR,
        "bytes of the log are damaged: these offsets cannot be read",
        "restore the segment from a copy; or cut the damage out with repair(accept_loss=True)",
    ),
    ProblemKind.MISSING_RECORDS: (
        Severity.ERROR,
        "these offsets are missing: a file, or the end of one, was lost",
        "restore the segment from a copy; nothing else brings them back",
    ),
    ProblemKind.UNREADABLE_FILE: (
        Severity.ERROR,
        "the operating system cannot read the file; its contents may be undamaged",
        "check the device and the permissions, then check again; do not cut anything",
    ),
    ProblemKind.OLD_FORMAT: (
        Severity.ERROR,
        "message format 0 or 1, written by Kafka 0.10 or older: not read here",
        "let a Kafka 3.x broker rewrite the topic in format 2",
    ),
    ProblemKind.UNAVAILABLE_CODEC: (
        Severity.WARNING,
        "the checksums of the batches are right, but their records cannot be decompressed here",
        "make the codec available as described in the message, then check again",
    ),
    ProblemKind.TORN_TAIL: (
        Severity.WARNING,
        "an append that was never finished",
        "open the log for writing: the bytes are kept aside and cut",
    ),
    ProblemKind.DIGEST_MISMATCH: (
        Severity.ERROR,
        "every batch is valid, but the file is not the one that was sealed: bytes that no checksum "
        "covers changed, or other software rewrote the segment",
        "compare with a copy; if the file is right, repair(accept_loss=True) writes a new digest",
    ),
    ProblemKind.DAMAGED_DIGEST: (
        Severity.WARNING,
        "the digest of a sealed segment cannot be read; the log itself is not affected",
        "repair() writes it again",
    ),
    ProblemKind.DAMAGED_INDEX: (
        Severity.ERROR,
        "the offset index has wrong entries: reading is slower, not wrong",
        "repair() rebuilds it from the log",
    ),
    ProblemKind.MISSING_INDEX: (
        Severity.WARNING,
        "an index is missing: it is rebuilt in memory whenever the segment is read",
        "repair() rebuilds it from the log",
    ),
    ProblemKind.DAMAGED_TIME_INDEX: (
        Severity.ERROR,
        "the time index cannot be right: searching by time is slower, not wrong",
        "repair() rebuilds it from the log",
    ),
    ProblemKind.DAMAGED_TRANSACTION_INDEX: (
        Severity.ERROR,
        "the list of aborted transactions differs from the log",
        "repair() rebuilds it from the log",
    ),
    ProblemKind.DAMAGED_SNAPSHOT: (
        Severity.WARNING,
        "a snapshot of the producers cannot be read: their state is read from the log instead",
        "repair() removes it; opening for writing makes it again if it is needed",
    ),
    ProblemKind.DAMAGED_LEADER_EPOCHS: (
        Severity.WARNING,
        "the history of leader epochs cannot be read: it is taken from the batches",
        "repair() removes it; opening for writing makes it again",
    ),
    ProblemKind.DAMAGED_METADATA: (
        Severity.ERROR,
        "partition.metadata does not name the topic of the directory, or names another one",
        "repair() writes it from the catalogue; without one, restore the file from a copy",
    ),
    ProblemKind.DAMAGED_STATE: (
        Severity.WARNING,
        "a side file of the partition cannot be read: the next open checks more of the log",
        "repair() removes it; opening for writing makes it again",
    ),
    ProblemKind.DAMAGED_PLAN: (
        Severity.WARNING,
        "a plan that was never written in full: nothing of it was done",
        "open the log for writing: the plan is dropped",
    ),
    ProblemKind.UNFINISHED_PLAN: (
        Severity.WARNING,
        "a change of files has begun and is not finished",
        "wait for its writer, or open the log for writing, which finishes it",
    ),
    ProblemKind.FAILED_SYNC: (
        Severity.WARNING,
        "an fsync failed here: records above the durable mark may never have reached the disk",
        "open the log for writing: the records are read from the device and written to a new file",
    ),
    ProblemKind.DAMAGED_IDENTITY: (
        Severity.ERROR,
        "meta.properties does not name the node and cluster of the directory",
        "restore it from a copy; repair() sets it aside and makes a new identity",
    ),
    ProblemKind.DAMAGED_CHECKPOINT: (
        Severity.WARNING,
        "a checkpoint of the store cannot be read: it is ignored, and more of the logs is checked",
        "repair() removes it; the next sync writes it again",
    ),
    ProblemKind.STALE_CHECKPOINT: (
        Severity.NOTE,
        "a checkpoint and its twin differ: a broker wrote one, or a crash happened between them",
        "nothing: the lower value is used, and the next sync writes both",
    ),
    ProblemKind.DAMAGED_CATALOGUE: (
        Severity.ERROR,
        "logstore.topics cannot be read: settings of topics are not known",
        "correct it by hand or restore it; repair() sets it aside and uses defaults",
    ),
    ProblemKind.MISSING_CATALOGUE: (
        Severity.WARNING,
        "logstore.topics is gone: every topic has the default settings now",
        "close the store and restore the file from a copy; or set the settings again with alter",
    ),
    ProblemKind.MISSING_PARTITION: (
        Severity.ERROR,
        "the catalogue names a partition whose directory does not exist",
        "restore the directory from a copy, or delete the topic",
    ),
    ProblemKind.UNOPENABLE_PARTITION: (
        Severity.ERROR,
        "the partition cannot be opened",
        "see the message; check the partition alone for more",
    ),
    ProblemKind.DAMAGED_MARKER: (
        Severity.NOTE,
        "the marker of a clean shutdown is not ours: a broker has owned the directory since",
        "nothing: the next open checks the partitions",
    ),
    ProblemKind.STRAY_FILE: (
        Severity.NOTE,
        "a file of an interrupted change, or one that belongs to no segment",
        "nothing: opening for writing removes the files of logstore",
    ),
    ProblemKind.KEPT_ASIDE: (
        Severity.NOTE,
        "bytes that recovery or repair cut off and kept",
        "examine the file, then delete it",
    ),
}
assert set(_KINDS) == set(ProblemKind)


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One fault, with its file and position."""

    kind: ProblemKind
    path: Path
    detail: str  # the fault of this file, with its numbers
    position: int = -1  # byte in the file; -1: the file as a whole
    end_position: int = -1  # end of the damaged bytes; -1: not known
    offsets: range | None = None  # of the affected records

    @property
    def severity(self) -> Severity:
        """Return how serious the problem is."""
        return _KINDS[self.kind][0]

    @property
    def meaning(self) -> str:
        """Return what the problem means for a reader of the log."""
        return _KINDS[self.kind][1]

    @property
    def remedy(self) -> str:
        """Return what to do about the problem."""
        return _KINDS[self.kind][2]

    def as_json(self) -> dict[str, Any]:
        """Return all of the problem, in types of JSON."""
        offsets = None if self.offsets is None else [self.offsets.start, self.offsets.stop]
        return {
            "kind": self.kind.value,
            "severity": self.severity.value,
            "path": str(self.path),
            "position": self.position,
            "end_position": self.end_position,
            "offsets": offsets,
            "detail": self.detail,
            "meaning": self.meaning,
            "remedy": self.remedy,
        }

    def __str__(self) -> str:
        where = f"{self.path}" if self.position < 0 else f"{self.path} at byte {self.position}"
        offsets = self.offsets
        which = f" (offsets {offsets.start} to {offsets.stop - 1})" if offsets else ""
        return f"{self.severity}: {where}: {self.detail}{which}: {self.meaning}; {self.remedy}"
