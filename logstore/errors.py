"""The exceptions of logstore.  All of them are LogStoreErrors, and most are a builtin error, too.

    LogStoreError
      ClosedError                 ValueError     used after close()
        ForkedHandleError                        used in a child process after fork
      ReadOnlyError               ValueError     a write through readonly=True
      OffsetOutOfRangeError       IndexError     outside [start_offset, end_offset)
        LogTruncatedError                        the log was truncated below a reader's position
      RecordNotFoundError         LookupError    inside the log, but removed by compaction
      RecordTooLargeError         ValueError
      InvalidRecordError          ValueError     a record that can never be stored
      InvalidNameError            ValueError     not a topic-N directory name
      NotALogError                ValueError     a directory that does not hold a log
      UnsafeFileSystemError       ValueError     NFS, SMB, 9p or FUSE: see allow_unsafe_fs
      UnsupportedFormatError      ValueError     message format 0 or 1, an unknown codec
        CodecUnavailableError                    the codec's package is not installed
      FencedError                 ValueError     the caller's epoch is not the newest
      NotLeaderError              RuntimeError   the log is not led in the caller's epoch
      CorruptLogError             ValueError     bytes of the log are damaged
        CorruptMetadataError                     the file of the metadata tree is damaged
      UnknownTopicError           KeyError       no such topic in the store
      TopicExistsError            ValueError     a topic of that name exists
      ConflictError               RuntimeError   the log does not end where the caller expects
      DivergedError               RuntimeError   a copy has records that its source does not have
      OutOfOrderSequenceError     ValueError     a batch that does not follow the producer's last
      TransactionAbortedError     RuntimeError   the transaction was aborted
      TransactionStateError       RuntimeError   no transaction, or one that is ending
        ConcurrentTransactionsError
      RebalanceError              RuntimeError   the group refuses a request of a member
      CoordinatorError            RuntimeError   this node cannot answer for a group: try again
        CoordinatorLoadingError
        CoordinatorNotAvailableError
        NotCoordinatorError
      NotEnoughReplicasError      RuntimeError   fewer replicas in sync than min.insync.replicas
      NodeIdInUseError            RuntimeError   another node has this node id
      ClusterMismatchError        ValueError     a directory and a tree of different clusters
      ClusterMemberError          ValueError     the directory of a node, used without its cluster
      MetadataUnavailableError    TimeoutError   the metadata service does not answer
      ReplicaOfflineError         OSError        this node cannot use its copy of a partition
      LockedError                 OSError        another process or handle has the lock
      DiskFullError               OSError        nothing was written
      IndeterminateAppendError    OSError        may or may not be in the log: see .offsets
        FailedLogError            ClosedError    an fsync failed earlier: nothing is appended
        InterruptedAppendError    KeyboardInterrupt

Those of workers, delays and queues are in `work_errors`.

Other ``OSError``s of the operating system pass through unchanged.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from logstore.checking.problem import Problem

COMMAND_MAX = 200  # characters of another process's command line in a text


class LogStoreError(Exception):
    """The base class of logstore's exceptions.  They can be copied and pickled."""

    def __reduce__(self) -> tuple[object, ...]:
        # The default calls __init__ with `args`, which is the text: most __init__ methods have
        # other parameters.  Make the object without __init__; pickle and copy then set attributes
        # and notes from `state`.
        reduced = super().__reduce__()
        assert isinstance(reduced, tuple)
        kind, args, *state = reduced
        return (_restored, (kind, args), *state)


class ClosedError(LogStoreError, ValueError):
    """The handle has been closed."""


class ForkedHandleError(ClosedError):
    """The handle was opened by a parent process; open a new one in this process."""


class ReadOnlyError(LogStoreError, ValueError):
    """The handle was opened with ``readonly=True``."""


class OffsetOutOfRangeError(LogStoreError, IndexError):
    """The offset is outside the log: ``.offset``, and the log's ``.start`` and ``.end``."""

    def __init__(self, offset: int, *, start: int, end: int, where: str = "the log") -> None:
        super().__init__(f"offset {offset} is outside {where} [{start}, {end})")
        self.offset = offset
        self.start = start
        self.end = end


class LogTruncatedError(OffsetOutOfRangeError):
    """The log was truncated to ``.truncated_to`` after this reader had read up to ``.offset``.

    The records that the reader got from ``.truncated_to`` on are no longer in the log.  Other
    records have these offsets, or will have them.  Read on from ``.truncated_to``.
    """

    def __init__(
        self, offset: int, *, truncated_to: int, start: int, end: int, where: str = "the log"
    ) -> None:
        super().__init__(offset, start=start, end=end, where=where)
        # The base class sets its attributes; its text is replaced.
        self.args = (
            f"{where} was truncated to offset {truncated_to} after it was read up to offset "
            f"{offset}; it is [{start}, {end}) now: read on from {truncated_to}",
        )
        self.truncated_to = truncated_to


class RecordNotFoundError(LogStoreError, LookupError):
    """The offset is inside the log but holds no record (compaction, a control record)."""

    def __init__(self, offset: int, *, where: str = "the log") -> None:
        super().__init__(
            f"no record at offset {offset} of {where}: it was compacted away or is a control record"
        )
        self.offset = offset


class RecordTooLargeError(LogStoreError, ValueError):
    """A batch of this record alone has ``.size`` bytes, more than the ``.limit``."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(
            f"the record takes {size} bytes as a batch, uncompressed; the smaller of "
            f"max.message.bytes and segment.bytes allows {limit}: raise it or split the value"
        )
        self.size = size
        self.limit = limit


class InvalidRecordError(LogStoreError, ValueError):
    """The record breaks a rule of the format or of the partition's configuration.

    ``.reason`` is "crc", "codec", "key", "size", "timestamp" or "transaction"; "" for another rule.
    """

    def __init__(self, message: str = "", *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class InvalidNameError(LogStoreError, ValueError):
    """The name is not ``topic-N``."""


class NotALogError(LogStoreError, ValueError):
    """The directory exists but does not hold a log."""


class UnsupportedFormatError(LogStoreError, ValueError):
    """The data is valid, but of a format that logstore does not read.  The text has the remedy."""


class CodecUnavailableError(UnsupportedFormatError):
    """The package of the ``.codec`` is not installed.  The text has the command to install it."""

    def __init__(self, codec: str, *, package: str, extra: str) -> None:
        super().__init__(
            f'{codec} needs the {package} package: pip install "logstore-engine[{extra}]"'
        )
        self.codec = codec
        self.package = package


class FencedError(LogStoreError, ValueError):
    """The caller's ``.epoch`` is below the ``.current`` one, which another client or leader has."""

    def __init__(self, epoch: int, current: int, *, where: str) -> None:
        super().__init__(
            f"epoch {epoch} of {where} is over: {current} has begun; its old holder must stop"
        )
        self.epoch = epoch
        self.current = current


class NotLeaderError(LogStoreError, RuntimeError):
    """The log of ``.partition`` is not led in the epoch of the caller.  Nothing was appended.

    ``.leader`` is the id of the node that leads it, None if it is not known here.  ``.epoch`` is
    the newest epoch that is known here, ``.asked`` the epoch of the caller if it gave one.
    """

    def __init__(
        self, partition: str, *, leader: int | None = None, epoch: int, asked: int | None = None
    ) -> None:
        led = "its leader is not known here" if leader is None else f"node {leader} leads it"
        wanted = "" if asked is None else f", not in epoch {asked}"
        super().__init__(
            f"{partition} is not led here{wanted}: its epoch is {epoch}, and {led}; "
            f"read the metadata again and send to the leader"
        )
        self.partition = partition
        self.leader = leader
        self.epoch = epoch
        self.asked = asked


class CorruptLogError(LogStoreError, ValueError):
    """A file of the log is damaged, at byte ``.position`` of ``.path``; ``.reason`` is the fault.

    ``.offsets`` is the half-open range of offsets that cannot be read.  If a check raises it,
    ``.problems`` lists all problems that it found.
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
            f"{where}: {reason}{hidden}; scan(on_corrupt='skip') reads on after the damage"
        )
        self.path = os.fspath(path)
        self.position = position
        self.reason = reason
        self.start_offset = start_offset
        self.end_offset = end_offset

    @property
    def offsets(self) -> range:
        """Return the offsets that cannot be read."""
        return range(self.start_offset, self.end_offset)


class CorruptMetadataError(CorruptLogError):
    """The file of the embedded metadata tree, ``.path``, is damaged; ``.reason`` is the fault."""

    def __init__(self, reason: str, *, path: str | os.PathLike[str]) -> None:
        super().__init__(reason, path=path, position=0)
        # The base class sets its attributes; its text is about a log.
        self.args = (
            f"{self.path} is damaged: {reason}; restore the newest copy of it; an older one "
            f"is refused by nodes that have seen newer epochs",
        )


class UnsafeFileSystemError(LogStoreError, ValueError):
    """The directory is on a file system without reliable locks and fsync: ``.filesystem``."""

    def __init__(self, filesystem: str, *, path: str | os.PathLike[str]) -> None:
        super().__init__(
            f"{os.fspath(path)} is on {filesystem}, where locks and fsync cannot be relied on: "
            f"choose a local disk, open it with readonly=True, or accept the risk with "
            f"allow_unsafe_fs=True"
        )
        self.filesystem = filesystem
        self.path = os.fspath(path)


class UnknownTopicError(LogStoreError, KeyError):
    """No topic has the name ``.topic``; ``.near`` lists similar names."""

    def __init__(self, topic: object, *, near: tuple[str, ...] = (), where: str = "") -> None:
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        super().__init__(f"no topic {topic!r} in {where or 'the store'}{hint}")
        self.topic = topic
        self.near = near

    def __str__(self) -> str:  # KeyError would return the repr of the text
        return str(self.args[0])


class TopicExistsError(LogStoreError, ValueError):
    """A topic of the name ``.topic`` exists."""

    def __init__(self, topic: str, *, where: str = "") -> None:
        super().__init__(
            f"topic {topic!r} exists in {where or 'the store'}: exist_ok=True takes it as it is"
        )
        self.topic = topic


class ConflictError(LogStoreError, RuntimeError):
    """The log ends at ``.actual``, not at the ``.expected`` offset.  Nothing was appended."""

    def __init__(self, expected: int, actual: int, *, where: str = "the log") -> None:
        super().__init__(
            f"{where} ends at offset {actual}, not at {expected}: another writer changed it; "
            f"read from offset {min(expected, actual)} on and decide again"
        )
        self.expected = expected
        self.actual = actual


class DivergedError(LogStoreError, RuntimeError):
    """A copy and its source have different records from ``.common_offset`` on.

    ``.end_offset`` is the end of the copy, ``.where`` its partition or topic.  The copy was not
    changed.
    """

    def __init__(self, reason: str, *, where: str, common_offset: int, end_offset: int) -> None:
        super().__init__(f"{where}: {reason}")
        self.where = where
        self.common_offset = common_offset
        self.end_offset = end_offset


class OutOfOrderSequenceError(LogStoreError, ValueError):
    """The first ``.sequence`` of a batch is not the ``.expected`` one.  Nothing was appended.

    Either a batch before it is missing, or it repeats a part of a batch, or it repeats a batch that
    is too old to be recognised.
    """

    def __init__(self, reason: str, *, producer_id: int, sequence: int, expected: int) -> None:
        super().__init__(
            f"producer {producer_id} sent sequence {sequence}, not {expected}: {reason}"
        )
        self.producer_id = producer_id
        self.sequence = sequence
        self.expected = expected


class TransactionAbortedError(LogStoreError, RuntimeError):
    """The transaction was aborted.  read_committed readers never get its records."""


class TransactionStateError(LogStoreError, RuntimeError):
    """The call does not fit the state of the transaction, or of its producer."""


class ConcurrentTransactionsError(TransactionStateError):
    """A transaction that the call depends on has not ended yet: try again."""


class RebalanceError(LogStoreError, RuntimeError):
    """A group refused a request of a member or of an administrator.  Nothing was changed.

    ``.group`` is its name, ``.code`` Kafka's name of the reason, such as ILLEGAL_GENERATION.
    """

    def __init__(self, reason: str, *, group: str, code: str) -> None:
        super().__init__(f"group {group!r}: {reason} ({code})")
        self.group = group
        self.code = code


class CoordinatorError(LogStoreError, RuntimeError):
    """This node cannot answer for a group or a transactional id at the moment.

    ``.topic`` and ``.partition`` are the place of its records.  Ask for the coordinator again, then
    repeat the request.
    """

    _reason = "has no coordinator that answers"

    def __init__(self, topic: str, partition: int, reason: str = "") -> None:
        super().__init__(f"{topic}-{partition} {reason or self._reason}")
        self.topic = topic
        self.partition = partition


class CoordinatorLoadingError(CoordinatorError):
    """This node has become the coordinator and reads the log: try again after a moment."""

    _reason = "is being loaded by its new coordinator: try again after a moment"


class CoordinatorNotAvailableError(CoordinatorError):
    """The coordinator could not write the request to its log.  Nothing was changed."""

    _reason = "could not be written by its coordinator: try again"


class NotCoordinatorError(CoordinatorError):
    """Another node is the coordinator, or this node has just lost the partition.

    A request that waited when the partition was lost may or may not have taken effect.
    """

    _reason = "is coordinated by another node: ask for its coordinator again"


class NotEnoughReplicasError(LogStoreError, RuntimeError):
    """``.isr`` replicas are in sync, fewer than the ``.minimum``.  Nothing was appended."""

    def __init__(self, isr: int, minimum: int, *, where: str) -> None:
        super().__init__(
            f"{where} has {isr} replicas in sync, and acks=all needs {minimum}: wait until more "
            f"nodes are up, or lower min.insync.replicas"
        )
        self.isr = isr
        self.minimum = minimum


class NodeIdInUseError(LogStoreError, RuntimeError):
    """Another node of the cluster, at ``.host``, has the id ``.node``, and is alive."""

    def __init__(self, node: int, host: str) -> None:
        super().__init__(
            f"node {node} is running at {host}: choose another node.id; if the directory was "
            f"copied from that node, remove one of the two"
        )
        self.node = node
        self.host = host


class ClusterMismatchError(LogStoreError, ValueError):
    """The directory belongs to the cluster ``.expected``, the metadata tree to ``.found``.

    `node` is the number of the directory's node, if only that differs.
    """

    def __init__(self, expected: str, found: str, *, where: str, node: int | None = None) -> None:
        remedy = "correct zookeeper.connect"
        if node is not None:
            remedy = f"start it as node {node} (--node {node}, node.id={node})"
        super().__init__(
            f"{where} belongs to cluster {expected}, but the metadata tree to cluster {found}: "
            f"{remedy}, or start with another directory"
        )
        self.expected = expected
        self.found = found


class ClusterMemberError(LogStoreError, ValueError):
    """The directory is that of node ``.node`` of the cluster ``.cluster``, not one of its own."""

    def __init__(self, cluster: str, node: int, reason: str, *, where: str) -> None:
        super().__init__(f"{where} is node {node} of the cluster {cluster}: {reason}")
        self.cluster = cluster
        self.node = node


class MetadataUnavailableError(LogStoreError, TimeoutError):
    """The metadata service did not answer in time.

    ``.since`` is the Unix time in seconds from which on it did not answer.
    """

    def __init__(self, reason: str, *, since: float) -> None:
        super().__init__(reason)
        self.since = since


class ReplicaOfflineError(LogStoreError, OSError):
    """This node cannot use its copy of a partition: ``.reason``.  Other nodes may have one."""

    def __init__(self, reason: str, *, where: str) -> None:
        super().__init__(f"the replica of {where} on this node is offline: {reason}")
        self.reason = reason


def _shortened(command: str) -> str:
    """Return the words of a command line that fit, without a part of a word."""
    first, *rest = command.split() or [""]
    for word in rest:
        if len(first) + 1 + len(word) > COMMAND_MAX:
            return f"{first} ..."
        first += f" {word}"
    return first


class LockedError(LogStoreError, OSError):
    """Another handle has the lock: ``.path`` is the lock file, ``.pid`` its holder if known.

    If a KafkaServer serves the store already, ``.path`` is the store's.
    """

    def __init__(self, path: str | os.PathLike[str], *, pid: int | None, holder: str = "",
                 served: str = "") -> None:  # fmt: skip
        if served:
            what = f"already served on {served}: use that server, or close it first"
        elif pid == os.getpid():
            what = "already open for writing in this process: use that handle, or close it first"
        else:
            who = f"process {pid}" if pid else "another process or a running Kafka broker"
            detail = f" ({_shortened(holder)})" if holder else ""
            what = f"locked by {who}{detail}: close it there, or open here with readonly=True"
        super().__init__(errno.EAGAIN, what, os.fspath(path))
        self.path = os.fspath(path)
        self.pid = pid


class DiskFullError(LogStoreError, OSError):
    """The device or quota is full.  Nothing was appended; the log can be read.

    ``.free_bytes`` is the free space of the file system, ``.needed_bytes`` the size of the write,
    ``.reclaimable_bytes`` what retention could delete now, and ``.remedy`` how.  A number that is
    not known is None.  When there is space again, the same handle can append.
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
    """The records may or may not be in the log: the write or its fsync did not finish.

    ``.offsets`` is the range of offsets that the records have if they are in the log.
    ``.leader_epoch`` is the epoch of the leader that appended them, -1 if there are no replicas.
    """

    leader_epoch = -1

    def __init__(self, reason: str, *, offsets: range, leader_epoch: int = -1) -> None:
        super().__init__(f"{reason}; {_named(offsets)} may or may not be in the log")
        self.offsets = offsets
        self.leader_epoch = leader_epoch


class FailedLogError(IndeterminateAppendError, ClosedError):
    """An fsync failed: this handle appends nothing any more.  Open the log again.

    The records of this call are not in the log; ``.offsets`` is empty.  Earlier records above the
    durable offset may or may not be in the log.
    """

    def __init__(self, reason: str, *, offsets: range) -> None:
        # Not that of IndeterminateAppendError, which adds a sentence about `offsets`.
        OSError.__init__(self, reason)
        self.offsets = offsets


class InterruptedAppendError(IndeterminateAppendError, KeyboardInterrupt):
    """Ctrl-C arrived after the records were in the log, but perhaps before they were durable."""

    def __init__(self, *, offsets: range) -> None:
        OSError.__init__(
            self, f"interrupted: {_named(offsets)} in the log, but perhaps not on disk yet"
        )
        self.offsets = offsets


def _restored(kind: type[LogStoreError], args: tuple[object, ...]) -> LogStoreError:
    """Return an exception of `kind` with `args`, without a call of its __init__."""
    error = kind.__new__(kind, *args)
    if isinstance(error, OSError):
        # OSError parses errno, text and filename in __init__ if a subclass has its own __init__,
        # and otherwise in __new__; then this call has no effect.
        OSError.__init__(error, *args)
    return error


def _named(offsets: range) -> str:
    if len(offsets) == 1:
        return f"offset {offsets.start}"
    return f"offsets {offsets.start} to {offsets.stop - 1}"
