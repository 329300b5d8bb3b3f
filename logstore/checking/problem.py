"""Problem: something in a directory that is not as it should be, as `check` reports it.

A problem names the file and the place in it, the offsets it concerns, what that means for whoever
reads the log, and what to do about it.  It changes nothing, and turns into JSON as it is.
"""

from __future__ import annotations

import dataclasses
import enum
from pathlib import Path
from typing import Any

__all__ = ["Problem", "ProblemKind", "Severity"]


class Severity(enum.StrEnum):
    """How much a problem matters."""

    ERROR = "error"  # records are hidden or wrong, or a file is not what was written
    WARNING = "warning"  # nothing is lost; the remedy mends it, often an open for writing
    NOTE = "note"  # worth knowing; nothing is wrong


class ProblemKind(enum.StrEnum):
    """What is wrong.  A kind decides severity, meaning and remedy."""

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


# severity, what it means, what to do
_KINDS = {
    ProblemKind.DAMAGED_BATCH: (
        Severity.ERROR,
        "bytes of the log cannot be what was written: these offsets cannot be read",
        "restore the segment from a copy; or cut the damage out with repair(accept_loss=True)",
    ),
    ProblemKind.MISSING_RECORDS: (
        Severity.ERROR,
        "these offsets should be here and are not: a file, or the end of one, is gone",
        "restore the segment from a copy; nothing else brings them back",
    ),
    ProblemKind.UNREADABLE_FILE: (
        Severity.ERROR,
        "the operating system cannot read the file: says nothing about what is in it",
        "look at the device and the permissions, then check again; nothing is to be cut",
    ),
    ProblemKind.OLD_FORMAT: (
        Severity.ERROR,
        "message format 0 or 1, written by Kafka 0.10 or older: not read here",
        "let a Kafka 3.x broker rewrite the topic in format 2",
    ),
    ProblemKind.UNAVAILABLE_CODEC: (
        Severity.WARNING,
        "the checksums of the batches are right, but their records cannot be decompressed here",
        "make the codec available as the message says, then check again",
    ),
    ProblemKind.TORN_TAIL: (
        Severity.WARNING,
        "an append that was never finished",
        "open the log for writing: the bytes are kept aside and cut",
    ),
    ProblemKind.DIGEST_MISMATCH: (
        Severity.ERROR,
        "every batch is sound by itself, yet the file is not the one that was sealed: a place that "
        "no checksum covers changed, or other software rewrote the segment",
        "compare with a copy; if the file is right, repair() notes its new digest",
    ),
    ProblemKind.DAMAGED_DIGEST: (
        Severity.WARNING,
        "the digest of a sealed segment cannot be read: the log itself is not touched by that",
        "repair() notes it anew",
    ),
    ProblemKind.DAMAGED_INDEX: (
        Severity.ERROR,
        "the offset index leads astray: reading is slower, not wrong",
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
        "the list of aborted transactions is not what the log says",
        "repair() rebuilds it from the log",
    ),
    ProblemKind.DAMAGED_SNAPSHOT: (
        Severity.WARNING,
        "a snapshot of the producers cannot be read: their state comes from the log instead",
        "repair() removes it; opening for writing makes what is needed anew",
    ),
    ProblemKind.DAMAGED_LEADER_EPOCHS: (
        Severity.WARNING,
        "the history of leader epochs cannot be read: it is taken from the batches",
        "repair() removes it; opening for writing makes it anew",
    ),
    ProblemKind.DAMAGED_METADATA: (
        Severity.ERROR,
        "the directory does not say which topic it belongs to, or names another one",
        "repair() writes it from the catalogue; without one, restore the file from a copy",
    ),
    ProblemKind.DAMAGED_STATE: (
        Severity.WARNING,
        "a side file of the partition cannot be read: the next open checks more of the log",
        "repair() removes it; opening for writing makes it anew",
    ),
    ProblemKind.DAMAGED_PLAN: (
        Severity.WARNING,
        "a plan that was never written in full: nothing of it was done",
        "open the log for writing: the plan is dropped",
    ),
    ProblemKind.UNFINISHED_PLAN: (
        Severity.WARNING,
        "a change of files was under way and has not ended",
        "let its writer finish, or open the log for writing: it is finished then",
    ),
    ProblemKind.FAILED_SYNC: (
        Severity.WARNING,
        "an fsync failed here: what lies above the durable mark was perhaps never on the disk",
        "open the log for writing: it is read from the device again and written to a new file",
    ),
    ProblemKind.DAMAGED_IDENTITY: (
        Severity.ERROR,
        "meta.properties does not say whose directory this is",
        "restore it from a copy; repair() sets it aside and makes a new identity",
    ),
    ProblemKind.DAMAGED_CHECKPOINT: (
        Severity.WARNING,
        "a checkpoint of the store cannot be read: it is ignored, and more of the logs is checked",
        "repair() removes it; the next sync writes it anew",
    ),
    ProblemKind.STALE_CHECKPOINT: (
        Severity.NOTE,
        "a checkpoint and its twin differ: a broker has written since, or a crash came in between",
        "nothing: the lower value counts, and the next sync brings them together",
    ),
    ProblemKind.DAMAGED_CATALOGUE: (
        Severity.ERROR,
        "logstore.topics cannot be read: settings of topics are not known",
        "mend it by hand or restore it; repair() sets it aside and goes on with defaults",
    ),
    ProblemKind.MISSING_CATALOGUE: (
        Severity.WARNING,
        "logstore.topics is gone: every topic has the default settings now",
        "close the store and restore the file from a copy; or set the settings again with alter",
    ),
    ProblemKind.MISSING_PARTITION: (
        Severity.ERROR,
        "the catalogue names a partition whose directory is gone",
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
        "a file that an interrupted change left behind, or that belongs to no segment",
        "nothing: opening for writing removes what is its own",
    ),
    ProblemKind.KEPT_ASIDE: (
        Severity.NOTE,
        "bytes that recovery or repair cut off and kept",
        "look at them, then delete the file",
    ),
}
assert set(_KINDS) == set(ProblemKind)


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, and where."""

    kind: ProblemKind
    path: Path
    detail: str  # of this one, with its numbers
    position: int = -1  # byte in the file; -1: the file as a whole
    end_position: int = -1  # where the damaged stretch ends; -1: not known
    offsets: range | None = None  # of the records concerned

    @property
    def severity(self) -> Severity:
        """How much it matters."""
        return _KINDS[self.kind][0]

    @property
    def meaning(self) -> str:
        """What it means for whoever reads the log."""
        return _KINDS[self.kind][1]

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return _KINDS[self.kind][2]

    def as_json(self) -> dict[str, Any]:
        """Everything, in types that JSON has."""
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
