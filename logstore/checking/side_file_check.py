"""Checks of the files next to the segments: state files, leader epochs, plans, snapshots.

Invariant: nothing is written, and a file that disappears between listing and reading is no problem.
Segments and their indexes are checked by `partition_check`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence

from logstore.checking.findings import CheckedView, Findings
from logstore.checking.problem import ProblemKind
from logstore.errors import NotALogError
from logstore.files.directory import Directory
from logstore.files.disk_reserve import RESERVE_NAME
from logstore.files.lock import DirectoryLock, has_writer
from logstore.files.names import SEGMENT_SUFFIXES, TEMPORARY_SUFFIXES, base_offset_of
from logstore.format.index import TransactionIndex
from logstore.log.epochs import LEADER_EPOCHS, parse_leader_epochs
from logstore.log.producer_state import CorruptSnapshotError, ProducerState
from logstore.log.segment import Segment
from logstore.log.state import CleanerCheckpoint, DurableMark, PartitionState, StartMark
from logstore.log.topic_id import PARTITION_METADATA, read_topic_id
from logstore.recovery.failed_sync import FailedSync
from logstore.recovery.swap_plan import SWAP_PLAN, SwapPlan
from logstore.recovery.truncation_plan import TRUNCATION_PLAN, TruncationPlan

__all__ = ["SideFileInspection"]

KEPT = re.compile(r".+\.(torn|cut)-\d+\Z")
SNAPSHOT_SUFFIX = ".snapshot"
_WITHOUT_CONTENTS = (DirectoryLock.NAME, RESERVE_NAME)  # of these only the type matters


class SideFileInspection:
    """One check of the side files of a partition.  `segments` are those checked before."""

    def __init__(self, view: CheckedView, segments: Sequence[Segment], findings: Findings) -> None:
        self._view = view
        self._segments = segments
        self._directory = view.directory
        self._findings = findings

    def run(self) -> None:
        """Add the problems of every file that is no segment's .log, .index or .timeindex."""
        names = self._directory.names()
        self._view.look()
        # The segments are read after the listing: a roll that created one of the listed files has
        # then published its segment, and the file is not taken for a stray one.
        with self._view.lock:
            known = (*self._segments, *self._view.segments)
        bases = {segment.base_offset for segment in known}
        checks = {
            PartitionState.NAME: self._inspect_state,
            DurableMark.NAME: self._inspect_mark,
            CleanerCheckpoint.NAME: self._inspect_cleaner,
            StartMark.NAME: self._inspect_start,
            LEADER_EPOCHS: self._inspect_epochs,
            PARTITION_METADATA: self._inspect_metadata,
            SWAP_PLAN: self._inspect_swap,
            TRUNCATION_PLAN: self._inspect_truncation,
            FailedSync.NAME: self._inspect_failed_sync,
        }
        for name in sorted(names):
            with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                if name in (*checks, *_WITHOUT_CONTENTS) and not self._directory.is_regular(name):
                    self._findings.note(ProblemKind.UNREADABLE_FILE, name, "not a regular file")
                elif name in checks:
                    checks[name]()
                else:
                    self._inspect_named(name, bases)

    def _inspect_named(self, name: str, bases: set[int]) -> None:
        if KEPT.match(name):
            self._findings.note(ProblemKind.KEPT_ASIDE, name, f"{self._directory.size(name)} bytes")
        elif name.endswith(TEMPORARY_SUFFIXES):
            if self._has_writer() or not self._directory.exists(name):
                return  # in use, or removed since it was listed
            self._findings.note(ProblemKind.STRAY_FILE, name, "an unfinished change left it")
        elif name.endswith(SEGMENT_SUFFIXES):
            try:
                base = base_offset_of(name)
            except NotALogError as error:
                self._findings.note(ProblemKind.STRAY_FILE, name, str(error))
                return
            if not self._directory.is_regular(name):
                self._findings.note(ProblemKind.STRAY_FILE, name, "not a regular file")
            elif name.endswith(SNAPSHOT_SUFFIX):
                self._inspect_snapshot(name)
            elif base not in bases and not name.endswith(".log"):
                self._findings.note(
                    ProblemKind.STRAY_FILE, name, "there is no segment of that offset"
                )
            elif name.endswith(".txnindex") and (raw := self._findings.read(name)) is not None:
                self._inspect_transaction_index(name, raw)

    def _has_writer(self) -> bool:
        """Return whether a writer has the partition or the store above it.

        A writer removes temporary files when it opens the partition: those that exist now are its
        own.
        """
        if has_writer(self._directory):
            return True
        try:
            root = Directory(self._directory.path.absolute().parent)
        except OSError:
            return False
        try:
            return has_writer(root)
        finally:
            root.close()

    def _inspect_snapshot(self, name: str) -> None:
        raw = self._findings.read(name)
        if raw is not None:
            try:
                ProducerState.decode(raw)
            except CorruptSnapshotError as error:
                self._findings.note(ProblemKind.DAMAGED_SNAPSHOT, name, str(error))

    def _inspect_state(self) -> None:
        # A concurrent writer replaces the file atomically, so a wrong checksum is damage.
        if PartitionState.read(self._directory) is None:
            self._findings.note(
                ProblemKind.DAMAGED_STATE,
                PartitionState.NAME,
                "the checksum is wrong, or a number is out of range",
            )

    def _inspect_mark(self) -> None:
        # A concurrent writer overwrites the mark in place, so one read may see a torn mark.
        looks = [DurableMark.read(self._directory) for _ in range(2)]
        if max(looks) < 0 and self._findings.read(DurableMark.NAME):
            self._findings.note(
                ProblemKind.DAMAGED_STATE, DurableMark.NAME, "the checksum is wrong"
            )

    def _inspect_cleaner(self) -> None:
        if CleanerCheckpoint.read(self._directory) < 0:
            self._findings.note(
                ProblemKind.DAMAGED_STATE, CleanerCheckpoint.NAME, "the checksum is wrong"
            )

    def _inspect_start(self) -> None:
        if StartMark.read(self._directory) < 0:
            self._findings.note(ProblemKind.DAMAGED_STATE, StartMark.NAME, "the checksum is wrong")

    def _inspect_epochs(self) -> None:
        raw = self._findings.read(LEADER_EPOCHS)
        fault = None if raw is None else parse_leader_epochs(raw)
        if isinstance(fault, str):
            self._findings.note(ProblemKind.DAMAGED_LEADER_EPOCHS, LEADER_EPOCHS, fault)

    def _inspect_metadata(self) -> None:
        try:
            read_topic_id(self._directory)
        except NotALogError as error:
            self._findings.note(ProblemKind.DAMAGED_METADATA, PARTITION_METADATA, str(error))
        except OSError as error:
            self._findings.note(ProblemKind.UNREADABLE_FILE, PARTITION_METADATA, str(error))

    def _inspect_swap(self) -> None:
        plan = SwapPlan.read(self._directory)
        if plan is not None:
            act = f"segments {list(plan.old)} are being replaced by one"
            self._note_plan(SWAP_PLAN, act, range(plan.old[0], plan.old[-1] + 1))
        elif self._directory.exists(SWAP_PLAN):
            self._note_plan(SWAP_PLAN, None)

    def _inspect_truncation(self) -> None:
        plan = TruncationPlan.read(self._directory)
        act = None if plan is None else f"the log is to end at offset {plan.end_offset}"
        self._note_plan(TRUNCATION_PLAN, act)

    def _note_plan(self, name: str, act: str | None, offsets: range | None = None) -> None:
        """Note a plan that was not finished; `act` is None if the file is not a whole plan."""
        if act is None:
            self._findings.note(ProblemKind.DAMAGED_PLAN, name, "it is not whole")
        else:
            self._findings.note(ProblemKind.UNFINISHED_PLAN, name, act, offsets=offsets)

    def _inspect_failed_sync(self) -> None:
        failed = FailedSync.read(self._directory)
        if failed is not None:
            self._findings.note(
                ProblemKind.FAILED_SYNC,
                FailedSync.NAME,
                f"durable up to offset {failed.durable_offset}: {failed.reason}",
            )

    def _inspect_transaction_index(self, name: str, raw: bytes) -> None:
        index = TransactionIndex(base_offset_of(name), raw)
        fault = index.fault() if raw else "the file is empty"
        if fault is not None:
            self._findings.note(ProblemKind.DAMAGED_TRANSACTION_INDEX, name, fault, position=0)
