"""Every exception that logstore raises on its own account.

    LogStoreError
      ClosedError                 ValueError     used after close()
        ForkedHandleError                        used in a child process after fork
      ReadOnlyError               ValueError     a write through readonly=True
      OffsetOutOfRangeError       IndexError     outside [start_offset, end_offset)
        LogTruncatedError                        the log was cut below a reader's position
      RecordNotFoundError         LookupError    inside, but compacted away
      RecordTooLargeError         ValueError
      InvalidRecordError          ValueError     a record that can never be stored
      InvalidNameError            ValueError     not a topic-N directory name
      NotALogError                ValueError     a directory that holds something else
      UnsafeFileSystemError       ValueError     NFS, SMB, 9p or FUSE: see allow_unsafe_fs
      UnsupportedFormatError      ValueError     message format 0 or 1, an unknown codec
        CodecUnavailableError                    the codec's package is not installed
      FencedError                 ValueError     someone with a higher epoch has taken over
      CorruptLogError             ValueError     bytes that cannot be what was written
      UnknownTopicError           KeyError       no such topic in the store
      TopicExistsError            ValueError     a topic of that name is there already
      ConflictError               RuntimeError   the log's end is not where the caller expects it
      OutOfOrderSequenceError     ValueError     a batch that does not follow the producer's last
      TransactionAbortedError     RuntimeError   the transaction is over, and not committed
      TransactionStateError       RuntimeError   not now: no transaction, or one that is ending
        ConcurrentTransactionsError
      RebalanceError              RuntimeError   the group has moved on without this member
      LockedError                 OSError        another process or handle owns the directory
      DiskFullError               OSError        nothing was written
      IndeterminateAppendError    OSError        may or may not be in the log: see .offsets
        FailedLogError            ClosedError    an fsync failed earlier: nothing is appended
        InterruptedAppendError    KeyboardInterrupt

Other ``OSError``s pass through as the operating system gave them.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from logstore.checking.problem import Problem

__all__ = [
    "ClosedError",
    "CodecUnavailableError",
    "ConcurrentTransactionsError",
    "ConflictError",
    "CorruptLogError",
    "DiskFullError",
    "FailedLogError",
    "FencedError",
    "ForkedHandleError",
    "IndeterminateAppendError",
    "InterruptedAppendError",
    "InvalidNameError",
    "InvalidRecordError",
    "LockedError",
    "LogStoreError",
    "LogTruncatedError",
    "NotALogError",
    "OffsetOutOfRangeError",
    "OutOfOrderSequenceError",
    "ReadOnlyError",
    "RebalanceError",
    "RecordNotFoundError",
    "RecordTooLargeError",
    "TopicExistsError",
    "TransactionAbortedError",
    "TransactionStateError",
    "UnknownTopicError",
    "UnsafeFileSystemError",
    "UnsupportedFormatError",
]


class LogStoreError(Exception):
    """The base of all of logstore's exceptions."""


class ClosedError(LogStoreError, ValueError):
    """The handle has been closed."""


class ForkedHandleError(ClosedError):
    """The handle was opened by a parent process; open a new one in this process."""


class ReadOnlyError(LogStoreError, ValueError):
    """The handle was opened with ``readonly=True``."""


class OffsetOutOfRangeError(LogStoreError, IndexError):
    """The offset lies outside the log: ``.offset``, and the log's ``.start`` and ``.end``."""

    def __init__(self, offset: int, *, start: int, end: int, where: str = "the log") -> None:
        super().__init__(f"offset {offset} is outside {where} [{start}, {end})")
        self.offset = offset
        self.start = start
        self.end = end


class LogTruncatedError(OffsetOutOfRangeError):
    """The log was truncated to ``.truncated_to`` after this reader had read up to ``.offset``.

    What the reader got from ``.truncated_to`` on is not in the log any more; other records have
    these offsets, or will have them.  Read on from ``.truncated_to``.
    """

    def __init__(
        self, offset: int, *, truncated_to: int, start: int, end: int, where: str = "the log"
    ) -> None:
        super().__init__(offset, start=start, end=end, where=where)
        self.args = (
            f"{where} was truncated to offset {truncated_to} after it was read up to offset "
            f"{offset}; it is [{start}, {end}) now: read on from {truncated_to}",
        )
        self.truncated_to = truncated_to


class RecordNotFoundError(LogStoreError, LookupError):
    """The offset lies inside the log but holds no record (compaction, a control record)."""

    def __init__(self, offset: int, *, where: str = "the log") -> None:
        super().__init__(
            f"no record at offset {offset} of {where}: it was compacted away or is a control record"
        )
        self.offset = offset


class RecordTooLargeError(LogStoreError, ValueError):
    """The record alone would make a batch of ``.size`` bytes; ``.limit`` is what is allowed."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(
            f"the record takes {size} bytes as a batch, uncompressed; the smaller of "
            f"max.message.bytes and segment.bytes allows {limit}: raise it or split the value"
        )
        self.size = size
        self.limit = limit


class InvalidRecordError(LogStoreError, ValueError):
    """The record breaks a rule of the format or of the partition's configuration."""


class InvalidNameError(LogStoreError, ValueError):
    """The name is not ``topic-N``."""


class NotALogError(LogStoreError, ValueError):
    """The directory exists but does not hold a log."""


class UnsupportedFormatError(LogStoreError, ValueError):
    """Valid data in a form that logstore does not read; the message has the remedy."""


class CodecUnavailableError(UnsupportedFormatError):
    """The package of the ``.codec`` is not installed; the message has the command that does it."""

    def __init__(self, codec: str, *, package: str, extra: str) -> None:
        super().__init__(
            f'{codec} needs the {package} package: pip install "logstore-engine[{extra}]"'
        )
        self.codec = codec
        self.package = package


class FencedError(LogStoreError, ValueError):
    """The caller's ``.epoch`` is below ``.current``: someone else has taken over since."""

    def __init__(self, epoch: int, current: int, *, where: str) -> None:
        super().__init__(
            f"epoch {epoch} of {where} is over: {current} has begun; whoever had {epoch} must stop"
        )
        self.epoch = epoch
        self.current = current


class CorruptLogError(LogStoreError, ValueError):
    """Damage: where it is (``.path``, byte ``.position``), what it is, and which offsets it hides.

    ``.offsets`` is the half-open range that cannot be read.  Raised by a check, ``.problems`` has
    everything that it found.
    """

    problems: tuple[Problem, ...] = ()

    def __init__(
        self,
        reason: str,
        *,
        path: str | os.PathLike[str],
        position: int,
        start_offset: int = -1,
        end_offset: int = -1,
    ) -> None:
        where = f"{os.fspath(path)} at byte {position}"
        hidden = (
            f" (offsets {start_offset} to {end_offset - 1})" if end_offset > start_offset else ""
        )
        super().__init__(
            f"{where}: {reason}{hidden}; scan(on_corrupt='skip') reads on behind the damage"
        )
        self.path = os.fspath(path)
        self.position = position
        self.reason = reason
        self.start_offset = start_offset
        self.end_offset = end_offset

    @property
    def offsets(self) -> range:
        """The offsets that cannot be read."""
        return range(self.start_offset, self.end_offset)


class UnsafeFileSystemError(LogStoreError, ValueError):
    """The directory lies on a file system that cannot keep a log safe: ``.filesystem``."""

    def __init__(self, filesystem: str, *, path: str | os.PathLike[str]) -> None:
        super().__init__(
            f"{os.fspath(path)} lies on {filesystem}, where locks and fsync cannot be relied on: "
            f"choose a local disk, open it with readonly=True, or accept the risk with "
            f"allow_unsafe_fs=True"
        )
        self.filesystem = filesystem
        self.path = os.fspath(path)


class UnknownTopicError(LogStoreError, KeyError):
    """No topic has that name: ``.topic``, and those that look alike in ``.near``."""

    def __init__(self, topic: object, *, near: tuple[str, ...] = (), where: str = "") -> None:
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        super().__init__(f"no topic {topic!r} in {where or 'the store'}{hint}")
        self.topic = topic
        self.near = near

    def __str__(self) -> str:  # KeyError would show the message's repr
        return str(self.args[0])


class TopicExistsError(LogStoreError, ValueError):
    """A topic of that name is there already: ``.topic``."""

    def __init__(self, topic: str, *, where: str = "") -> None:
        super().__init__(
            f"topic {topic!r} exists in {where or 'the store'}: exist_ok=True takes it as it is"
        )
        self.topic = topic


class ConflictError(LogStoreError, RuntimeError):
    """The log ends at ``.actual``, not at the ``.expected`` offset.  Nothing was appended."""

    def __init__(self, expected: int, actual: int, *, where: str = "the log") -> None:
        super().__init__(
            f"{where} ends at offset {actual}, not at {expected}: someone else appended; "
            f"read what is there from {min(expected, actual)} on and decide again"
        )
        self.expected = expected
        self.actual = actual


class OutOfOrderSequenceError(LogStoreError, ValueError):
    """A batch whose first ``.sequence`` is not the ``.expected`` one.  Nothing was appended.

    Either a batch before it is missing, or it repeats a part of one, or one so old that its offsets
    are no longer remembered.  ``.expected`` is -1 when any would do but this.
    """

    def __init__(self, reason: str, *, producer_id: int, sequence: int, expected: int) -> None:
        super().__init__(
            f"producer {producer_id} sent sequence {sequence}, not {expected}: {reason}"
        )
        self.producer_id = producer_id
        self.sequence = sequence
        self.expected = expected


class TransactionAbortedError(LogStoreError, RuntimeError):
    """The transaction was aborted: what was appended in it will never be read as committed."""


class TransactionStateError(LogStoreError, RuntimeError):
    """What was asked for does not fit the state of the transaction, or of its producer."""


class ConcurrentTransactionsError(TransactionStateError):
    """The transaction is being ended right now: ask again."""


class RebalanceError(LogStoreError, RuntimeError):
    """A group refused what a member, or someone outside of it, asked for.  Nothing was done.

    ``.group`` is its name, ``.code`` Kafka's name of the reason, such as ILLEGAL_GENERATION.
    """

    def __init__(self, reason: str, *, group: str, code: str) -> None:
        super().__init__(f"group {group!r}: {reason} ({code})")
        self.group = group
        self.code = code


class LockedError(LogStoreError, OSError):
    """Another handle may write here: ``.path`` is the lock file, ``.pid`` its holder if known."""

    def __init__(self, path: str | os.PathLike[str], *, pid: int | None, holder: str = "") -> None:
        if pid == os.getpid():
            what = "already open for writing in this process: use that handle, or close it first"
        else:
            who = f"process {pid}" if pid else "another process or a running Kafka broker"
            detail = f" ({' '.join(holder.split())[:100]})" if holder else ""
            what = f"locked by {who}{detail}: close it there, or open here with readonly=True"
        super().__init__(errno.EAGAIN, what, os.fspath(path))
        self.path = os.fspath(path)
        self.pid = pid


class DiskFullError(LogStoreError, OSError):
    """The device or quota is full.  Nothing was appended; the log can be read.

    ``.free_bytes`` is what the file system had left, ``.needed_bytes`` what was to be written,
    ``.reclaimable_bytes`` what retention could delete now, and ``.remedy`` how; None or empty where
    nobody asked.  Once there is space, appending goes on through the same handle.
    """

    free_bytes: int | None = None
    needed_bytes: int | None = None
    reclaimable_bytes: int | None = None
    remedy: str = ""

    def __str__(self) -> str:
        numbers = [
            f"{number} bytes {what}"
            for number, what in ((self.free_bytes, "free"), (self.needed_bytes, "needed"))
            if number is not None
        ]
        said = OSError.__str__(self)
        if numbers:
            said = f"{said}: {', '.join(numbers)}"
        return f"{said}; {self.remedy}" if self.remedy else said


class IndeterminateAppendError(LogStoreError, OSError):
    """Bytes may have reached the file, but not provably the disk.

    ``.offsets`` is the range of offsets the records have if they are in the log.
    """

    def __init__(self, reason: str, *, offsets: range) -> None:
        super().__init__(f"{reason}; {_named(offsets)} may or may not be in the log")
        self.offsets = offsets


class FailedLogError(IndeterminateAppendError, ClosedError):
    """An fsync failed: nothing is appended through this handle any more.  Open the log again.

    What this call brought is not in the log; ``.offsets`` is empty.  What others appended above the
    durable offset may or may not be.
    """

    def __init__(self, reason: str, *, offsets: range) -> None:
        OSError.__init__(self, reason)
        self.offsets = offsets


class InterruptedAppendError(IndeterminateAppendError, KeyboardInterrupt):
    """Ctrl-C arrived when the records were in the log already, but perhaps not yet durable."""

    def __init__(self, *, offsets: range) -> None:
        OSError.__init__(
            self, f"interrupted: {_named(offsets)} in the log, but perhaps not on disk yet"
        )
        self.offsets = offsets


def _named(offsets: range) -> str:
    if len(offsets) == 1:
        return f"offset {offsets.start}"
    return f"offsets {offsets.start} to {offsets.stop - 1}"
