"""PartitionInspection: checks every file of a partition and lists the problems.

It writes nothing and takes no lock on the directory.  So it works on read-only media, concurrently
with a writer in another process, and in a directory of a broker.  A deep inspection reads every
byte.  Otherwise it reads sizes, the first header of each segment, indexes and side files, and no
records.

Invariant: the log is authoritative.  Indexes and side files are compared with it, and a difference
is a problem of theirs.  An I/O error is a problem of its own kind: it does not mean that the bytes
are damaged.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from logstore import _native
from logstore.checking.findings import CheckedView, Findings
from logstore.checking.problem import Problem, ProblemKind, Severity
from logstore.checking.side_file_check import SideFileInspection
from logstore.errors import CorruptLogError, UnsupportedFormatError
from logstore.files.names import segment_name
from logstore.format.index import OffsetIndex, TimeIndex, used_entries
from logstore.log.segment import Segment
from logstore.log.segment_contents import SegmentContents
from logstore.log.segment_digest import (
    DIGEST_SUFFIX,
    DamagedDigestError,
    FileDigest,
    SegmentDigest,
    digest_of,
)

__all__ = [
    "CheckProgress",
    "PartitionInspection",
    "bytes_to_inspect",
    "check_choice",
    "find_problems",
    "raise_first_error",
]

# Called with (bytes checked so far, bytes to check in all).  If it raises, the inspection ends.
CheckProgress = Callable[[int, int], None]

RECEIPT = re.compile(r"logstore\.repair-\d+\.json\Z")
_HEADER_BYTES = 61


def bytes_to_inspect(segments: Sequence[Segment], *, deep: bool) -> int:
    """Return the total for a progress callback: bytes if deep, else the number of segments."""
    return sum(segment.size_bytes for segment in segments) if deep else len(segments)


class _Look(NamedTuple):
    """A segment at one moment.  Later appends and rolls do not change it."""

    sealed: bool
    live: bool  # this process appends to it: its index entries are in memory
    limit: int  # bytes of its .log file
    end_offset: int
    offsets: bytes = b""  # entries of a live segment
    times: bytes = b""

    @classmethod
    def at(cls, segment: Segment) -> _Look:
        """Return the present state of a segment.  The caller holds the lock of the view."""
        sealed, live = segment.sealed, segment.writer is not None
        # Of the active file only the bytes up to `end` are published; a write may be under way
        # after.
        limit = segment.file.size() if sealed else segment.file.end
        # Copied below, under the lock: the writer adds entries to these buffers.
        entries = (segment.offset_index.entries, segment.time_index.entries) if live else ()
        return cls(sealed, live, limit, segment.end_offset, *map(bytes, entries))


class PartitionInspection:
    """One inspection of the files of a partition.  `run` may be called once."""

    def __init__(
        self, view: CheckedView, *, deep: bool, moved: Callable[[int], None] | None = None
    ) -> None:
        """`moved` is called with the size of every piece that was checked."""
        self._view = view
        self._directory = view.directory
        self._deep = deep
        self._moved = moved or _ignore
        self._findings = Findings(view.directory)
        self._problems = self._findings.problems
        # The last segment, and its state when `run` began: only this one can change.
        self._last: tuple[Segment, _Look] | None = None

    def _look_at(self, segment: Segment) -> _Look:
        if self._last is not None and segment is self._last[0]:
            return self._last[1]
        return _Look.at(segment)

    def run(self) -> list[Problem]:
        """Return the problems, first those of the segments, then those of the side files."""
        view = self._view
        with view.lock:
            # After the lock is released, the last segment may grow or be sealed.
            segments = view.segments  # an immutable tuple: the checks below need no lock
            end = segments[-1].end_offset
            with contextlib.suppress(FileNotFoundError):  # a directory without any segment yet
                self._last = segments[-1], _Look.at(segments[-1])
        producers = 0
        for segment in segments:
            try:
                with segment.visited():  # at most one sealed segment is open at a time
                    producers += self._inspect_segment(segment)
            except FileNotFoundError:
                raise  # deleted by retention, or missing: `find_problems` distinguishes the two
            except OSError as error:
                self._findings.note(
                    ProblemKind.UNREADABLE_FILE,
                    segment.path,
                    str(error),
                    offsets=range(segment.base_offset, segment.end_offset),
                )
        self._inspect_order(segments)
        if producers and self._deep:
            self._inspect_aborts(segments, end)
        SideFileInspection(view, segments, self._findings).run()
        return self._problems

    # ---- the log ----

    def _inspect_segment(self, segment: Segment) -> int:
        """Check one segment; return the number of its batches with a producer, 0 if not deep."""
        before = len(self._problems)
        contents = self._walk(segment) if self._deep else None
        if contents is None:
            self._inspect_head(segment)
            self._moved(1)
        sound = len(self._problems) == before
        # If another process appends to this segment, its index files lag: do not check them.
        look = self._look_at(segment)
        if look.sealed or look.live:
            self._inspect_indexes(segment, contents)
        self._inspect_digest(segment, sound)
        return 0 if contents is None else contents.producers

    def _walk(self, segment: Segment) -> SegmentContents:
        """Check every batch and every record; note damage and continue after it."""
        file = segment.file
        limit = self._look_at(segment).limit
        position, producers, first = 0, 0, True
        contents = segment.walk(limit=limit, progress=self._progress(0))
        whole = contents
        while contents.stopped != "end":
            producers += contents.producers
            if contents.stopped == "legacy":
                self._findings.note(
                    ProblemKind.OLD_FORMAT,
                    segment.path,
                    contents.reason,
                    position=contents.position,
                )
                break
            # Search the next valid batch: the bytes up to it are one damaged range.
            sound = _native.find_batch(
                file, contents.position, limit, contents.next_offset, segment.offset_max
            )
            position, base, _ = sound or (limit, segment.end_offset, 0)
            self._findings.note(
                ProblemKind.DAMAGED_BATCH,
                segment.path,
                contents.reason,
                position=contents.position,
                end_position=position,
                offsets=range(contents.next_offset, max(base, contents.next_offset)),
            )
            first = False
            if sound is None:
                break
            contents = segment.walk(
                position, limit=limit, next_offset=base, progress=self._progress(position)
            )
            whole = whole.followed_by(contents)
        # In a damaged file a scan would report the same ranges again.
        if first:
            self._inspect_records(segment)
            self._inspect_end(segment, contents)
        return whole

    def _progress(self, start: int) -> Callable[[int], None]:
        done = start

        def moved(now: int) -> None:
            nonlocal done
            self._moved(now - done)
            done = now

        return moved

    def _inspect_records(self, segment: Segment) -> None:
        """Check the inside of batches whose checksums are right: lengths, counts, compression."""
        scan = segment.scan(on_corrupt="skip")
        chunk = _native.ColumnBuilder(0, 1 << 16, 1 << 30, 0)
        try:
            while scan.fill(chunk):
                self._moved(0)
                chunk = _native.ColumnBuilder(0, 1 << 16, 1 << 30, 0)
        except UnsupportedFormatError as error:
            # `_walk` has noted an old format already, with its position.
            noted = {problem.kind for problem in self._problems if problem.path == segment.path}
            if ProblemKind.OLD_FORMAT not in noted:
                self._findings.note(ProblemKind.UNAVAILABLE_CODEC, segment.path, str(error))
        for position, end_position, start, stop, reason in scan.skipped:
            self._findings.note(
                ProblemKind.DAMAGED_BATCH,
                segment.path,
                reason,
                position=position,
                end_position=end_position,
                offsets=range(start, stop),
            )

    def _inspect_end(self, segment: Segment, contents: SegmentContents) -> None:
        """Note a file that ends before the end offset of its segment."""
        if any(p.path == segment.path and p.position >= 0 for p in self._problems):
            return  # damage is noted already, with its offsets
        wanted = self._look_at(segment).end_offset
        if contents.next_offset < wanted and segment.dense:
            self._findings.note(
                ProblemKind.MISSING_RECORDS,
                segment.path,
                f"the file ends at offset {contents.next_offset}, not at {wanted}",
                position=contents.position,
                offsets=range(contents.next_offset, wanted),
            )

    def _inspect_head(self, segment: Segment) -> None:
        """Check the header of the first batch: the part of `_walk` that is cheap."""
        if not segment.size_bytes:
            return
        header = segment.file.pread(_HEADER_BYTES, 0)
        fault = ""
        if segment.size_bytes < _HEADER_BYTES:
            fault = f"{segment.size_bytes} bytes are too few for a batch"
        elif header[16] in (0, 1):
            self._findings.note(
                ProblemKind.OLD_FORMAT, segment.path, f"magic {header[16]}", position=0
            )
        else:
            # Magic 2, a base offset of this segment, and a length from that of an empty batch (49)
            # to the end of the file.  The length does not count its own field and the base offset.
            base, size = int.from_bytes(header[:8], "big"), int.from_bytes(header[8:12], "big")
            if (
                header[16] != 2
                or not segment.base_offset <= base <= segment.offset_max
                or not 49 <= size <= segment.size_bytes - 12
            ):
                fault = f"a first batch at offset {base} of {size} bytes, magic {header[16]}"
        if fault:
            offsets = range(segment.base_offset, segment.end_offset)
            self._findings.note(
                ProblemKind.DAMAGED_BATCH, segment.path, fault, position=0, offsets=offsets
            )

    def _inspect_order(self, segments: Sequence[Segment]) -> None:
        start = self._view.start_offset
        first = segments[0].base_offset
        if start < first:
            self._findings.note(
                ProblemKind.MISSING_RECORDS,
                segments[0].path,
                f"the log starts at {start}, its first segment at {first}",
                offsets=range(start, first),
            )

    # ---- indexes ----

    def _inspect_indexes(self, segment: Segment, contents: SegmentContents | None) -> None:
        for suffix, kind, width in (
            (".index", ProblemKind.DAMAGED_INDEX, OffsetIndex.ENTRY_BYTES),
            (".timeindex", ProblemKind.DAMAGED_TIME_INDEX, TimeIndex.ENTRY_BYTES),
        ):
            name = segment_name(segment.base_offset, suffix)
            look = self._look_at(segment)
            entries = look.offsets if suffix == ".index" else look.times
            raw = entries if look.live else self._findings.read(name)
            if raw is None:
                if segment.size_bytes and not self._findings.has(name):
                    self._findings.note(ProblemKind.MISSING_INDEX, name, "there is no such file")
                continue
            entries = used_entries(raw, width)
            if len(entries) % width:
                self._findings.note(kind, name, f"{len(raw)} bytes are no whole number of entries")
            elif contents is not None and entries in _rebuilt(segment, contents, suffix):
                continue  # exactly what a rebuild gives; other entries may be right, too
            elif suffix == ".index":
                self._inspect_offset_entries(segment, name, entries)
            else:
                self._inspect_time_entries(segment, name, entries, contents)

    def _inspect_offset_entries(self, segment: Segment, name: str, entries: bytes) -> None:
        """Check that every entry leads to a batch that ends with its offset.

        Unless deep, only the last entry is checked.
        """
        index = OffsetIndex(segment.base_offset, entries)
        numbers = range(len(index)) if self._deep else range(len(index))[-1:]
        for number in numbers:
            offset, position = index[number]
            header = segment.file.pread(_HEADER_BYTES, position) if position >= 0 else b""
            base = int.from_bytes(header[:8], "big")
            last = base + int.from_bytes(header[23:27], "big")
            if len(header) < _HEADER_BYTES or last != offset:
                self._findings.note(
                    ProblemKind.DAMAGED_INDEX,
                    name,
                    f"an index entry for offset {offset} leads to a batch of {base} to {last}",
                    position=number * OffsetIndex.ENTRY_BYTES,
                )
                return

    def _inspect_time_entries(
        self, segment: Segment, name: str, entries: bytes, contents: SegmentContents | None
    ) -> None:
        for number, fault in _time_faults(segment, entries, contents):
            position = number * TimeIndex.ENTRY_BYTES
            self._findings.note(ProblemKind.DAMAGED_TIME_INDEX, name, fault, position=position)
            return  # one problem for each file

    def _inspect_aborts(self, segments: Sequence[Segment], end: int) -> None:
        """Check that every transaction that the log aborts is listed as aborted."""
        try:
            self._view.known_producers().check(segments, end)
        except FileNotFoundError:
            raise
        except OSError as error:
            name = Path(error.filename or "").name
            if not self._findings.has(name):
                self._findings.note(ProblemKind.UNREADABLE_FILE, name, str(error))
        except CorruptLogError as error:
            self._findings.note(
                ProblemKind.DAMAGED_TRANSACTION_INDEX,
                Path(error.path),
                error.reason,
                position=error.position,
                offsets=error.offsets or None,
            )

    # ---- digests ----

    def _inspect_digest(self, segment: Segment, sound: bool) -> None:
        """Compare the files with the digest.  `sound` is whether the .log file has no problem."""
        name = segment_name(segment.base_offset, DIGEST_SUFFIX)
        try:
            digest = SegmentDigest.read(self._directory, segment.base_offset)
        except DamagedDigestError as error:
            self._findings.note(ProblemKind.DAMAGED_DIGEST, name, str(error))
            return
        except OSError as error:
            self._findings.note(ProblemKind.UNREADABLE_FILE, name, str(error))
            return
        if digest is None:
            return
        log_name = segment_name(segment.base_offset, ".log")
        found = self._digest_now(log_name)
        if sound and found is not None and not self._is_same(found, digest.log):
            self._findings.note(
                ProblemKind.DIGEST_MISMATCH,
                log_name,
                _differs(found, digest.log),
                offsets=range(segment.base_offset, segment.end_offset),
            )
        for suffix, kind in (
            (".index", ProblemKind.DAMAGED_INDEX),
            (".timeindex", ProblemKind.DAMAGED_TIME_INDEX),
            (".txnindex", ProblemKind.DAMAGED_TRANSACTION_INDEX),
        ):
            index_name = segment_name(segment.base_offset, suffix)
            if self._findings.has(index_name):
                continue
            now, then = self._digest_now(index_name), digest.indexes.get(suffix)
            if now is None and then is not None:
                missing = suffix == ".txnindex"
                self._findings.note(
                    kind if missing else ProblemKind.MISSING_INDEX,
                    index_name,
                    f"there is no such file; {then[0]} bytes were sealed",
                )
            elif now is not None and then is None:
                self._findings.note(kind, index_name, f"there was no such file; now {now[0]} bytes")
            elif now is not None and then is not None and not self._is_same(now, then):
                self._findings.note(kind, index_name, _differs(now, then))

    def _digest_now(self, name: str) -> FileDigest | None:
        with contextlib.suppress(FileNotFoundError):
            if self._deep:
                return digest_of(self._directory, name, lambda _: self._moved(0))
            return self._directory.size(name), -1
        return None

    def _is_same(self, now: FileDigest, then: FileDigest) -> bool:
        return now == then if self._deep else now[0] == then[0]


def _rebuilt(segment: Segment, contents: SegmentContents, suffix: str) -> tuple[bytes, ...]:
    """Return the possible contents of an index built from the log.

    A time index has a last entry after a roll or a close, and none before.
    """
    if suffix == ".index":
        return (contents.offsets,)
    return (contents.times, contents.final_times(segment.base_offset))


def _differs(now: FileDigest, then: FileDigest) -> str:
    if now[0] != then[0]:
        return f"{now[0]} bytes; {then[0]} were sealed"
    return f"the checksum is {now[1]:08x}; {then[1]:08x} was sealed"


def _ignore(_: int) -> None:
    """Do nothing: the default for `moved`."""


def missing_file(view: CheckedView, error: FileNotFoundError) -> Problem:
    """Return the problem of a .log file that is missing without a deletion by the writer."""
    path = view.directory.path / Path(error.filename or "").name
    return Problem(ProblemKind.MISSING_RECORDS, path, "there is no such file")


def has_errors(problems: Sequence[Problem]) -> bool:
    """Return whether a strict check would raise."""
    return any(problem.severity == Severity.ERROR for problem in problems)


def check_choice(on_corrupt: str) -> str:
    """Return `on_corrupt`; raise ValueError unless it is "raise" or "report"."""
    if on_corrupt not in ("raise", "report"):
        raise ValueError(f"on_corrupt must be 'raise' or 'report', not {on_corrupt!r}")
    return on_corrupt


def raise_first_error(problems: Sequence[Problem]) -> None:
    """Raise CorruptLogError for the first problem that is an error, if there is one."""
    for problem in problems:
        if problem.severity == Severity.ERROR:
            offsets = problem.offsets or range(0)
            error = CorruptLogError(
                problem.detail,
                path=problem.path,
                position=max(problem.position, 0),
                start_offset=offsets.start,
                end_offset=offsets.stop,
            )
            error.problems = tuple(problems)
            raise error


def find_problems(
    view: CheckedView, *, deep: bool, progress: CheckProgress | None
) -> list[Problem]:
    """Return the problems of a partition, those of the log first.

    If the writer rewrote, truncated or deleted segments during an inspection that found an error,
    the inspection is repeated: the error may have been the change.
    """
    while True:
        view.check_usable()
        generation = view.generation
        view.look()
        total = bytes_to_inspect(view.segments, deep=deep)
        done = 0

        def moved(size: int, total: int = total) -> None:
            nonlocal done
            done += size
            if progress is not None:
                progress(min(done, total), total)

        try:
            problems = PartitionInspection(view, deep=deep, moved=moved).run()
        except (CorruptLogError, FileNotFoundError) as error:
            if not view.moved_since(generation):
                if isinstance(error, FileNotFoundError):
                    return [missing_file(view, error)]
                raise
            continue
        # An error may have been a change that the writer was making.
        if has_errors(problems) and view.moved_since(generation):
            continue
        return problems


def _time_faults(
    segment: Segment, entries: bytes, contents: SegmentContents | None
) -> Iterator[tuple[int, str]]:
    """Yield the number and the fault of each entry of a time index that cannot be right."""
    times = list(TimeIndex(segment.base_offset, entries))
    for number, (one, two) in enumerate(itertools.pairwise(times), 1):
        if not (one[0] < two[0] and one[1] <= two[1]):
            yield number, f"entry {two} is not greater than the entry {one} before it"
    for number, (timestamp, offset) in enumerate(times):
        late = contents is not None and timestamp > contents.max_timestamp
        if timestamp < 0 or late or not segment.base_offset <= offset < segment.end_offset:
            yield number, f"entry ({timestamp}, {offset}) is not of this segment"
