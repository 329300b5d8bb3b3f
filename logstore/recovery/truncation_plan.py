"""TruncationPlan: a truncation in a file, so that the next open finishes it after a crash."""

from __future__ import annotations

import dataclasses
import json
from typing import NamedTuple

from logstore.files.directory import Directory
from logstore.files.names import SEGMENT_SUFFIXES, base_offset_of, segment_name
from logstore.files.small_file import MISREAD, either_copy, twice
from logstore.format.index import TransactionIndex
from logstore.log.epochs import write_leader_epochs
from logstore.log.segment_digest import SegmentDigest
from logstore.log.state import PartitionState, StartMark

TRUNCATION_PLAN = "truncate.plan"


class TruncationPlan(NamedTuple):
    """Everything that is needed to cut the log, so that the next open can finish the cut.

    The batch that contains the cut cannot be shortened in place: the plan has a new batch with the
    records of it that are kept.
    """

    base_offset: int  # the segment that becomes the last
    position: int  # where its file is cut
    batch: bytes  # written there: the kept records of the batch that contains the cut, or b""
    segments: tuple[int, ...]  # bases of later segments, to be deleted
    end_offset: int = 1 << 62  # snapshots and aborted transactions from here on are deleted
    restart: bool = False  # every record is deleted, and an empty log starts at `base_offset`

    def write(self, directory: Directory) -> None:
        head: dict[str, object] = {
            "base": self.base_offset,
            "position": self.position,
            "later": self.segments,
            "end": self.end_offset,
        }
        if self.restart:
            head["restart"] = True
        body = json.dumps(head).encode() + b"\n" + self.batch
        # Twice: the plan may have the only copy of records that must stay.
        directory.replace(TRUNCATION_PLAN, twice(body))

    @classmethod
    def read(cls, directory: Directory) -> TruncationPlan | None:
        """Return the plan; None if it was not written in full: then nothing has been cut."""
        body = either_copy(directory.read(TRUNCATION_PLAN))
        try:
            if body is None:
                return None
            head, _, batch = body.partition(b"\n")
            fields = json.loads(head)
            base, position, later = fields["base"], fields["position"], tuple(fields["later"])
            end, restart = fields.get("end", 1 << 62), fields.get("restart", False)
        except MISREAD:
            return None
        numbers = (base, position, end, *later)
        sound = all(type(number) is int and number >= 0 for number in numbers)
        sound = sound and isinstance(restart, bool)
        return cls(base, position, batch, later, end, restart) if sound else None

    def apply(self, directory: Directory) -> None:
        """Cut the log.  May be called again after a crash at any point."""
        if self.restart:
            self._restart(directory)
            return
        for base in self.segments:
            for suffix in SEGMENT_SUFFIXES:
                directory.unlink(segment_name(base, suffix))
        for name in directory.names():
            if name.endswith(".snapshot") and base_offset_of(name) > self.end_offset:
                directory.unlink(name)
        if not directory.exists(segment_name(self.base_offset, ".log")):
            return  # cut before, and a segment with another base has replaced the empty rest
        SegmentDigest.remove(directory, self.base_offset)
        file = directory.open(segment_name(self.base_offset, ".log"), write=True)
        try:
            file.truncate(self.position)
            if self.batch:
                file.append_at(self.batch, self.position)
            file.sync()
        finally:
            file.close()
        for suffix in (".index", ".timeindex", ".summary"):
            directory.unlink(segment_name(self.base_offset, suffix))
        self.cut_transactions(directory)
        directory.sync()

    def _restart(self, directory: Directory) -> None:
        for name in directory.names():
            if name.endswith((*SEGMENT_SUFFIXES, ".snapshot")):
                directory.unlink(name)
        # Of the old log, and perhaps above the new start.
        directory.unlink(StartMark.NAME)
        write_leader_epochs(directory, [])
        directory.write(segment_name(self.base_offset, ".log"), b"", sync=True)
        directory.sync()

    def restarted(self, state: PartitionState) -> PartitionState:
        """Return the state of the log after a restart, from the one before it."""
        base = self.base_offset
        return dataclasses.replace(state, clean=False, start_offset=base, end_offset=base,
                                   recovery_point=base, segments=1, active_base=base,
                                   active_bytes=0, aborts=-1)  # fmt: skip

    def cut_transactions(self, directory: Directory) -> None:
        name = segment_name(self.base_offset, ".txnindex")
        if directory.exists(name):
            index = TransactionIndex(self.base_offset, directory.read(name))
            index.truncate_to(self.end_offset)
            if index.entries:
                directory.with_room(lambda: directory.write(name, index.entries, sync=True))
            else:
                directory.unlink(name)
