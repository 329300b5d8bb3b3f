"""SegmentRecovery: checks one segment after a crash, and cuts off or keeps invalid bytes.

Invariant: a torn tail is cut off, damage is kept.

- An invalid batch is a torn tail if no valid batch follows it and its offsets were never known to
  be durable: an append was interrupted.  Its bytes are copied to another file and cut off.
- Any other invalid batch is damage: its bytes stay in the file, are reported, and hide only their
  own offsets.  The one exception is a power cut (the machine has booted since, and the batch is
  above every offset known to be durable).  Then the kernel may have written a later page and not an
  earlier one.  The log is cut at the first invalid batch, so that it is a prefix of the appended
  records; the bytes that are cut off are kept in another file, too.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from logstore import _native
from logstore.errors import DiskFullError, UnsupportedFormatError
from logstore.files.directory import COPY_BYTES, Directory
from logstore.files.names import segment_name
from logstore.log.segment import Segment
from logstore.log.segment_contents import SegmentContents
from logstore.log.segment_digest import SegmentDigest
from logstore.recovery.report import Damage, RecoveryProgress, RecoveryReport, TornTail

__all__ = ["SegmentRecovery"]

log = logging.getLogger("logstore.recovery")

TORN = re.compile(r".+\.torn-\d+\Z")
TORN_FILES_MAX = 16  # kept in one directory
TORN_BYTES_MAX = 64 << 20  # of one torn tail, kept
DAMAGE_MESSAGE = "%s: damage at byte %d (%s), kept"
BESIDE_LOG = (".index", ".timeindex", ".txnindex", ".summary", ".sum")  # nothing without their log


class SegmentRecovery:
    """Recovers the segments of one directory, one at a time, and adds to its report.

    With `readonly` nothing is written: the report lists what would be cut.
    """

    def __init__(
        self,
        directory: Directory,
        report: RecoveryReport,
        readonly: bool,
        progress: RecoveryProgress | None,
    ) -> None:
        self.directory = directory
        self.report = report
        self.readonly = readonly
        self.progress = progress
        self.total_bytes = 0  # of all segments to check: the total of `progress`

    def walk(
        self, segment: Segment, position: int = 0, next_offset: int | None = None
    ) -> SegmentContents:
        before = self.report.bytes_checked

        def moved(now: int) -> None:
            self.report.bytes_checked = before + now - position
            if self.progress is not None:
                self.progress(self.report.bytes_checked, self.total_bytes)

        return segment.walk(position, next_offset=next_offset, progress=moved)

    def recover(
        self, segment: Segment, last: bool, durable: int, same_boot: bool
    ) -> tuple[SegmentContents, bool, bool]:
        """Check one segment; return its contents, if it ends in damage, and if it was cut."""
        size = segment.size_bytes
        self.report.segments_checked += 1
        contents = self.walk(segment)
        damaged_tail = cut = False
        while contents.stopped != "end":
            if contents.stopped == "legacy":
                raise UnsupportedFormatError(
                    f"{segment.path} at byte {contents.position}: message format 0 or 1, written "
                    f"by Kafka 0.10 or older; let a Kafka 3.x broker rewrite the topic in format 2"
                )
            # Bytes that an fsync covered cannot be torn: if they are unreadable, that is damage.
            known_durable = contents.next_offset < durable
            sound = _native.find_batch(
                segment.file, contents.position, size, contents.next_offset, segment.offset_max
            )
            # Pages are written back in any order: after a power loss valid batches may follow lost
            # ones.
            power_cut = not same_boot and not known_durable
            if sound is not None and not power_cut:
                position, base, _ = sound
                self.note_damage(segment, contents, position, base)
                later = self.walk(segment, position, base)
                contents = contents.followed_by(later)
                continue
            if sound is None and (known_durable or (not last and not power_cut)):
                end = max(durable, segment.next_base or 0) if not last else durable
                self.note_damage(segment, contents, size, end)
                contents = contents._replace(position=size, stopped="end")
                damaged_tail = True
                break
            # Never acknowledged as durable: the log ends here.
            cut = True
            self.cut(segment, contents, size)
            contents = contents._replace(stopped="end")
        if not (last or same_boot or damaged_tail) and segment.dense:
            # All batches are valid, but batches before the next segment may be lost: a file that
            # ends at the end of a batch shows no other trace of that.
            cut |= durable <= contents.next_offset < (segment.next_base or 0)
        if not self.readonly:
            self.refresh_indexes(segment, contents)
        return contents, damaged_tail, cut

    def note_damage(
        self, segment: Segment, contents: SegmentContents, end_position: int, end_offset: int
    ) -> None:
        damage = Damage(
            segment.path,
            contents.position,
            end_position,
            range(contents.next_offset, max(contents.next_offset, end_offset)),
            contents.reason,
        )
        self.report.damage.append(damage)
        if not self.readonly:  # for a reader it may be a truncation under way: see Partition
            log.warning(DAMAGE_MESSAGE, damage.path, damage.position, damage.reason)

    def cut(self, segment: Segment, contents: SegmentContents, size: int) -> None:
        """Cut off a torn tail; first copy its bytes to another file."""
        position = contents.position
        kept: Path | None = None
        if not self.readonly:
            # Copied and synced before the cut; the digest is removed before the file changes.
            kept = self.copy_aside(segment, position, size)
            SegmentDigest.remove(self.directory, segment.base_offset)
            file = self.directory.open(segment_name(segment.base_offset, ".log"), write=True)
            try:
                file.truncate(position)
                file.sync()
            finally:
                file.close()
            segment.release()
        self.report.torn.append(
            TornTail(
                segment.path, position, size - position, contents.next_offset, kept, contents.reason
            )
        )
        log.warning("%s: cut %d torn bytes at %d", segment.path, size - position, position)

    def copy_aside(self, segment: Segment, position: int, size: int) -> Path | None:
        """Copy the first bytes of a torn tail, unless they are zeros or the disk is full."""
        kept: str | None = None
        target: _native.File | None = None
        start = position
        size = min(size, position + TORN_BYTES_MAX)
        try:
            while position < size:
                piece = segment.file.pread(min(COPY_BYTES, size - position), position)
                if not piece:
                    break
                if target is None and piece.strip(b"\0"):
                    kept = self.torn_name(segment_name(segment.base_offset, ".log"))
                    target = self.directory.open(kept, write=True, create=True, exclusive=True)
                if target is not None:
                    target.append_at(piece, position - start)
                position += len(piece)
            if target is not None:
                target.sync()
        except DiskFullError as error:
            # The append of these bytes was never acknowledged: open must not fail for them.
            log.warning(
                "%s: the torn bytes at %d are not kept: %s", segment.path, start, str(error)
            )
            if kept is not None:
                self.directory.unlink(kept)
            kept = None
        finally:
            if target is not None:
                target.close()
        return None if kept is None else self.directory.path / kept

    def set_aside(self, segment: Segment, why: str) -> None:
        """Rename the .log file of a segment, so that it is kept and never loaded."""
        name = segment_name(segment.base_offset, ".log")
        kept = self.torn_name(name)
        self.directory.rename(name, kept)
        for suffix in BESIDE_LOG:
            self.directory.unlink(segment_name(segment.base_offset, suffix))
        self.report.set_aside.append(self.directory.path / kept)
        log.warning("%s set aside as %s: %s", segment.path, kept, why)

    def torn_name(self, name: str) -> str:
        """Return a free name for torn bytes; delete the oldest such files if there are many."""
        kept = [each for each in self.directory.names() if TORN.match(each)]
        kept.sort(key=lambda each: (self.directory.modified_ms(each), each))
        for each in kept[: max(0, len(kept) - TORN_FILES_MAX + 1)]:
            self.directory.unlink(each)
            self.report.removed.append(self.directory.path / each)
            log.warning("%s/%s removed: more than %d such files",
                        self.directory.path, each, TORN_FILES_MAX)  # fmt: skip
        number = 1
        while f"{name}.torn-{number}" in kept:
            number += 1
        return f"{name}.torn-{number}"

    def refresh_indexes(self, segment: Segment, contents: SegmentContents) -> None:
        """Write the index files again if they differ from the contents of the log."""
        names = (segment_name(segment.base_offset, suffix) for suffix in (".index", ".timeindex"))
        try:
            held = [self.directory.read(name) for name in names]
        except FileNotFoundError:
            held = []
        wanted = [contents.offsets, contents.final_times(segment.base_offset)]
        if held != wanted:
            self.write_indexes(segment, contents, sync=True)
            self.report.indexes_rebuilt.append(segment.path.with_suffix(".index"))

    def write_indexes(self, segment: Segment, contents: SegmentContents, *, sync: bool) -> None:
        try:
            segment.write_indexes(contents, sync=sync)
        except DiskFullError as error:
            log.warning("%s: no room for its indexes, which are made when needed: %s",
                        segment.path, str(error))  # fmt: skip
            for suffix in (".index", ".timeindex"):
                self.directory.unlink(segment_name(segment.base_offset, suffix))
