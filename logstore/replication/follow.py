"""Follow: copies the topics of a source into a directory, asynchronously, and keeps the copy level.

Raw batches are copied: offsets, leader epochs, gaps, transactions and their markers stay as they
are.  So at every moment each log of the target is a byte-exact prefix of what its source had made
durable (a directory) or committed (a Kafka).  There is no other state: a copy continues where the
target's own log ends.

Before the first batch of a partition is copied, and whenever the source reports a change, the two
histories are compared: first the leader epochs, then the bytes of the target's last batch.  If they
differ, DivergedError is raised and nothing is changed, or the target is cut to the common part.

Follow does not delete records that retention deletes at the source, unless it is told to.  It does
not copy groups and other internal topics.  It runs in the thread of its caller.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from logstore.closeable import Closeable
from logstore.config import ConfigError
from logstore.errors import CorruptLogError, DivergedError, InvalidRecordError
from logstore.files.disk_reserve import STORE_RESERVE_BYTES
from logstore.format.batch import BatchHeader
from logstore.log.topic_id import uuid_text
from logstore.partition.partition import Partition
from logstore.replication.divergence import batch_start, common_end
from logstore.replication.source import (
    DirectorySource,
    Fetched,
    Place,
    Source,
    SourceTopic,
    Wanted,
    whole_batches,
)
from logstore.store.store import open_store

__all__ = ["Follow", "FollowStatus", "FollowedPartition"]

log = logging.getLogger("logstore.replication")

CHUNK_BYTES = 4 << 20  # of one partition in one step
SYNC_BYTES = 64 << 20  # a sync of the target after as many
SYNC_SECONDS = 1.0  # or as long after the first byte
WAIT_SECONDS = 0.5  # how long one step waits for new records
RETRY_SECONDS = (0.1, 5.0)  # the first and the longest pause while the source cannot be reached
AGAIN_SECONDS = 0.05  # after an answer without records that ended in a comparison
PATIENCE_SECONDS = 30.0  # of `catch_up`, while the source cannot be reached


@dataclasses.dataclass(frozen=True, slots=True)
class FollowedPartition:
    """One partition of a copy.  Lag is what the source has and the target does not."""

    topic: str
    partition: int
    end_offset: int  # of the target
    source_end_offset: int  # of what can be read there; -1: not asked yet
    lag_records: int  # offsets; a gap of compaction counts
    lag_bytes: int | None  # None: not known; an estimate if the source is a Kafka
    lag_seconds: float  # since the target was level; before that, by the last record's time
    copied_records: int  # since `Follow` was made
    copied_bytes: int
    truncated_records: int  # cut from the target because the source had another history


@dataclasses.dataclass(frozen=True, slots=True)
class FollowStatus:
    """A copy as it is now."""

    partitions: tuple[FollowedPartition, ...]
    unreachable_seconds: float  # since the source could be reached; 0.0 if it can

    @property
    def lag_records(self) -> int:
        """The sum of all partitions."""
        return sum(each.lag_records for each in self.partitions)

    @property
    def lag_bytes(self) -> int | None:
        """The sum of all partitions; None if one is not known."""
        known = [each.lag_bytes for each in self.partitions if each.lag_bytes is not None]
        return sum(known) if len(known) == len(self.partitions) else None

    @property
    def lag_seconds(self) -> float:
        """The greatest of all partitions."""
        return max((each.lag_seconds for each in self.partitions), default=0.0)

    @property
    def copied_records(self) -> int:
        """The sum of all partitions."""
        return sum(each.copied_records for each in self.partitions)

    @property
    def copied_bytes(self) -> int:
        """The sum of all partitions."""
        return sum(each.copied_bytes for each in self.partitions)

    @property
    def truncated_records(self) -> int:
        """The sum of all partitions."""
        return sum(each.truncated_records for each in self.partitions)


class _Replica:
    """The state of one partition, in memory only."""

    def __init__(self, place: Place, level_at: float) -> None:
        self.place = place
        self.compared = False  # whether the histories are known to be the same
        self.begin = 0  # the source starts here, above the end of the target
        self.source_start = -1
        self.source_end = -1
        self.goal: int | None = None  # of `catch_up`
        self.drained = False  # the source had nothing at the end of the target
        self.level_at = level_at  # when the target was level; by the clock of `time.time`
        self.copied_records = self.copied_bytes = self.truncated_records = 0
        self.unsynced_bytes = 0

    def lag(self, end: int) -> int:
        return 0 if self.drained else max(0, self.source_end - end)


class Follow(Closeable):
    """A copy of a source in the directory `target`, which must be ours alone.

    `source` is a directory, or a Source such as a KafkaSource.  `topics` are names or patterns
    (``orders*``); by default all topics are copied, also those that are made later.  With
    `allow_truncate` records of the target that the source does not have are cut, and a topic that
    was deleted and made again at the source is deleted here and copied again.  With `trim` records
    that retention deletes at the source are deleted here.

    Raises LockedError if another process has the target open for writing, FileNotFoundError if the
    source does not exist, ConfigError if source and target are the same directory.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Source,
        target: str | os.PathLike[str],
        *,
        topics: Sequence[str] = (),
        allow_truncate: bool = False,
        trim: bool = False,
        durability: str = "fsync",
    ) -> None:
        if isinstance(topics, str):
            raise ConfigError(f"topics is a sequence of names, not {topics!r}")
        if isinstance(source, str | os.PathLike):
            if str(source).startswith("kafka://"):
                raise ConfigError(f"{source}: give logstore.KafkaSource({str(source)!r})")
            if Path(source).resolve() == Path(target).resolve():
                raise ConfigError(f"{target} is the source and the target: name two directories")
            source = DirectorySource(source)
        self._source: Source = source
        self._patterns = tuple(topics)
        self._allow_truncate = allow_truncate
        self._trim = trim
        self._fsync = durability == "fsync"
        self._stopping = threading.Event()
        self._replicas: dict[Place, _Replica] = {}
        self._turn = 0  # which partition is asked first
        self._refresh_at = 0.0
        self._unsynced_since: float | None = None
        self._unreachable_since: float | None = None
        try:
            # Not `logstore.open`: it would write the markers that end open transactions.
            self._store = open_store(
                Path(target), readonly=False, create=True, durability=durability, config=None,
                clock=None, partitioner=None, progress=None, reserve_bytes=STORE_RESERVE_BYTES,
                allow_unsafe_fs=False,
            )  # fmt: skip
        except BaseException:
            self._source.close()
            raise

    def close(self) -> None:
        """Make the copy durable and close both sides."""
        try:
            self._store.close()
        finally:
            self._source.close()

    def stop(self) -> None:
        """End `run` or `catch_up` after the step under way.  From any thread or signal handler."""
        self._stopping.set()

    def __repr__(self) -> str:
        return f"<Follow {self._source.name!r} to {str(self._store.path)!r}>"

    # ---- running ----

    def run(self, *, tick: Callable[[], object] | None = None) -> FollowStatus:
        """Copy until `stop` is called.  `tick` is called after each step.

        While the source cannot be reached, try again: first after 0.1 s, at last every 5 s.
        """
        self._loop(tick, lambda: False, None)
        return self.status()

    def catch_up(self, *, tick: Callable[[], object] | None = None) -> FollowStatus:
        """Copy until the target has what the source had when this was called.

        Raises ConnectionError if the source cannot be reached for 30 seconds.
        """
        self._reached(self._refresh, None)
        for replica in self._replicas.values():
            replica.goal = None
        self._loop(tick, self._is_level, PATIENCE_SECONDS)
        return self.status()

    def _loop(
        self, tick: Callable[[], object] | None, done: Callable[[], bool], patience: float | None
    ) -> None:
        pause = RETRY_SECONDS[0]
        try:
            while not self._stopping.is_set() and not done():
                if self._reached(self.step, patience):
                    pause = RETRY_SECONDS[0]
                else:
                    self._stopping.wait(pause)
                    pause = min(2 * pause, RETRY_SECONDS[1])
                if tick is not None:
                    tick()
        finally:
            self._sync()

    def _reached(self, act: Callable[[], object], patience: float | None) -> bool:
        """Call `act`; return whether the source could be reached."""
        try:
            act()
        except (ConnectionError, TimeoutError) as error:
            now = time.monotonic()
            if self._unreachable_since is None:
                self._unreachable_since = now
                log.warning("%s cannot be reached, trying again: %s", self._source.name, error)
            if patience is not None and now - self._unreachable_since > patience:
                raise
            return False
        if self._unreachable_since is not None:
            log.info("%s can be reached again", self._source.name)
            self._unreachable_since = None
        return True

    def _is_level(self) -> bool:
        return self._refresh_at > 0 and all(
            each.drained or (each.goal is not None and self._end(each) >= each.goal)
            for each in self._replicas.values()
        )

    def step(self, wait: float = WAIT_SECONDS) -> bool:
        """Ask the source once and copy its answer; return whether records were copied."""
        now = time.monotonic()
        if now >= self._refresh_at:
            self._refresh()
        for replica in [each for each in self._replicas.values() if not each.compared]:
            self._compare(replica)
        wanted = [self._wanted(each) for each in self._replicas.values()]
        if not wanted:
            self._stopping.wait(min(wait, 0.1))
            return False
        # Each step starts with another partition: a full answer must not starve the last ones.
        self._turn = (self._turn + 1) % len(wanted)
        wanted = wanted[self._turn :] + wanted[: self._turn]
        wait = min(wait, self._refresh_at - now) if self._unsynced_since is None else 0.0
        copied = False
        for answer in self._source.fetch(wanted, max(0.0, wait)):
            replica = self._replicas[answer.place]
            copied |= self._take(replica, answer)
        self._sync_if_due(copied)
        return copied

    # ---- topics ----

    def _wants(self, topic: str) -> bool:
        return not self._patterns or any(
            fnmatch.fnmatchcase(topic, pattern) for pattern in self._patterns
        )

    def _refresh(self) -> None:
        """Make the topics and partitions that are new at the source."""
        found = {name: each for name, each in self._source.topics().items() if self._wants(name)}
        for name, topic in found.items():
            self._adopt(name, topic)
        for place in [each for each in self._replicas if each.topic not in found]:
            log.warning("%s is gone at the source; its copy stays", place)
            del self._replicas[place]
        self._refresh_at = time.monotonic() + self._source.refresh_seconds

    def _adopt(self, name: str, topic: SourceTopic) -> None:
        count = max(topic.partitions, default=-1) + 1
        if not count:
            return
        mine = self._store.get(name)
        if mine is not None and topic.id is not None and mine.id not in (None, topic.id):
            self._replace(name, uuid_text(topic.id), uuid_text(mine.id))
            mine = None
        if mine is None:
            settings = self._source.settings(name)
            mine = self._store.create_topic(name, count, config=settings, topic_id=topic.id)
            log.info("copying topic %s of %d partitions", name, count)
        elif len(mine) < count:
            mine.add_partitions(count - len(mine))
        for number in topic.partitions:
            place = Place(name, number)
            if place not in self._replicas:
                self._replicas[place] = _Replica(place, self._last_time(mine[number]))

    def _replace(self, name: str, theirs: str, mine: str) -> None:
        end = sum(log.end_offset for log in self._store[name])
        reason = (
            f"the topic was deleted and made again at the source: its id is {theirs} there "
            f"and {mine} here"
        )
        if not self._allow_truncate:
            raise DivergedError(
                f"{reason}; allow_truncate=True deletes the {end} records here and copies it again",
                where=name, common_offset=0, end_offset=end,
            )  # fmt: skip
        log.warning("%s: %s; deleting its %d records here", name, reason, end)
        self._store.delete_topic(name)
        for place in [each for each in self._replicas if each.topic == name]:
            del self._replicas[place]

    @staticmethod
    def _last_time(partition: Partition) -> float:
        """Return when the target was level for the first estimate: the time of its last record."""
        times = [segment.max_timestamp for segment in partition.segments]
        return max(times) / 1000 if max(times) >= 0 else time.time()

    # ---- copying ----

    def _log(self, replica: _Replica) -> Partition:
        # Looked up each time: a partition that nothing refers to can be closed when descriptors
        # run out.
        return self._store[replica.place.topic][replica.place.partition]

    def _end(self, replica: _Replica) -> int:
        return self._log(replica).end_offset

    def _wanted(self, replica: _Replica) -> Wanted:
        mine = self._log(replica)
        end = mine.end_offset
        epoch = mine.leader_epochs.epoch_for(end - 1) if end > mine.start_offset else None
        # A step is written to one segment.
        limit = min(CHUNK_BYTES, mine.config.segment_bytes)
        return Wanted(replica.place, max(end, replica.begin), -1 if epoch is None else epoch, limit)

    def _take(self, replica: _Replica, answer: Fetched) -> bool:
        mine = self._log(replica)
        end = mine.end_offset
        if answer.cut_to is not None and answer.cut_to < end:
            self._cut(replica, answer.cut_to, "the source was truncated")
            replica.compared = False
            return False
        if answer.diverging is not None or answer.out_of_range:
            self._compare(replica)
            self._stopping.wait(AGAIN_SECONDS)  # a source that changes now may be ahead of itself
            return False
        replica.source_end = answer.log_end_offset
        if replica.goal is None:
            replica.goal = answer.log_end_offset
        data = memoryview(answer.batches)
        if data.nbytes:
            self._append(replica, mine, data)
        # Offsets without a batch, which compaction or a truncation left, are no lag.
        nothing = not data.nbytes and not answer.is_full
        replica.drained = nothing and answer.end_offset >= answer.log_end_offset
        if answer.start_offset != replica.source_start:
            self._follow_start(mine, answer.start_offset)
            replica.source_start = answer.start_offset
        if replica.lag(mine.end_offset) == 0:
            replica.level_at = time.time()
        return bool(data.nbytes)

    def _append(self, replica: _Replica, mine: Partition, data: memoryview) -> None:
        end = mine.end_offset
        _, last = whole_batches(data)
        first = BatchHeader.parse(data)
        if first.base_offset < end:
            # Compaction at the source may join batches: the target then ends inside of one.
            raise DivergedError(
                f"the source has a batch from offset {first.base_offset} to {first.last_offset}, "
                f"and the target ends at {end}, inside of it",
                where=mine.name, common_offset=first.base_offset, end_offset=end,
            )  # fmt: skip
        try:
            mine.parts.appender.append_batch(
                data, origin="follower", durability="os", expect_end=end
            )
        except InvalidRecordError as error:
            raise CorruptLogError(
                f"the source sent a batch that cannot be copied: {error}",
                path=f"{self._source.name}/{mine.name}", position=-1,
                start_offset=end, end_offset=BatchHeader.parse(data, last).next_offset,
            ) from error  # fmt: skip
        replica.copied_records += mine.end_offset - end
        replica.copied_bytes += data.nbytes
        replica.unsynced_bytes += data.nbytes
        replica.level_at = max(replica.level_at, BatchHeader.parse(data, last).max_timestamp / 1000)
        if self._unsynced_since is None:
            self._unsynced_since = time.monotonic()

    def _follow_start(self, mine: Partition, start: int) -> None:
        """Trim the target to the start of the source, if it was told to or has nothing below."""
        if start <= mine.start_offset or mine.end_offset < start:
            return
        if self._trim or self._has_nothing_below(mine, start):
            mine.trim(start)

    @staticmethod
    def _has_nothing_below(mine: Partition, start: int) -> bool:
        first = next(iter(mine.read_batches(mine.start_offset, 1)), None)
        return first is None or BatchHeader.parse(first).next_offset > start

    # ---- syncing ----

    def _sync_if_due(self, copied: bool) -> None:
        if self._unsynced_since is None:
            return
        size = sum(each.unsynced_bytes for each in self._replicas.values())
        late = time.monotonic() - self._unsynced_since >= SYNC_SECONDS
        if not copied or late or size >= SYNC_BYTES:
            self._sync()

    def _sync(self) -> None:
        """Make the copy durable.  A crash costs only the records since the last call."""
        if self._fsync:
            for replica in self._replicas.values():
                if replica.unsynced_bytes:
                    self._log(replica).sync()
        for replica in self._replicas.values():
            replica.unsynced_bytes = 0
        self._unsynced_since = None

    # ---- comparing ----

    def _compare(self, replica: _Replica) -> None:
        """Compare the histories; cut the target if it has another one, or raise DivergedError."""
        mine, place = self._log(replica), replica.place
        common = common_end(self._source, place, mine)
        if common < mine.end_offset:
            self._cut(replica, common, "the source has other records, or was truncated")
        start, end = self._source.bounds(place)
        empty = mine.end_offset == mine.start_offset
        if mine.end_offset < start:
            if not (empty or self._trim):
                raise DivergedError(
                    f"records {mine.end_offset} to {start - 1} were deleted at the source before "
                    f"they were copied; trim=True lets the copy begin at {start}",
                    where=mine.name, common_offset=mine.end_offset, end_offset=mine.end_offset,
                )  # fmt: skip
            self._restart(replica, mine, start)
        elif empty and mine.end_offset > end:
            if not self._allow_truncate:
                raise DivergedError(
                    f"the source ends at {end}, and the target begins at {mine.start_offset}; "
                    f"allow_truncate=True lets the copy begin at {start}",
                    where=mine.name, common_offset=end, end_offset=mine.end_offset,
                )  # fmt: skip
            self._restart(replica, mine, start)
        replica.compared = True

    def _restart(self, replica: _Replica, mine: Partition, start: int) -> None:
        """Delete what the target has; the copy begins with the batch that holds `start`."""
        first = self._source.batch_at(replica.place, start)
        base = start if first is None else BatchHeader.parse(first).base_offset
        mine.parts.cutter.restart_at(min(base, start))
        replica.begin = start

    def _cut(self, replica: _Replica, offset: int, reason: str) -> None:
        mine = self._log(replica)
        end = mine.end_offset
        offset = batch_start(mine, offset)
        if not self._allow_truncate:
            raise DivergedError(
                f"{reason}: both are the same up to offset {offset} only, and the target ends at "
                f"{end}; allow_truncate=True cuts {end - offset} records from the target",
                where=mine.name, common_offset=offset, end_offset=end,
            )  # fmt: skip
        log.warning("%s: %s; cutting the target from %d to %d", mine.name, reason, end, offset)
        mine.parts.cutter.truncate(offset, whole_batches=True)
        replica.truncated_records += end - offset
        replica.begin, replica.goal, replica.drained = 0, None, False

    # ---- status ----

    def status(self) -> FollowStatus:
        """Return offsets and lag of every partition."""
        rows = tuple(self._row(replica) for _, replica in sorted(self._replicas.items()))
        since = self._unreachable_since
        return FollowStatus(rows, 0.0 if since is None else time.monotonic() - since)

    def _row(self, replica: _Replica) -> FollowedPartition:
        end = self._end(replica)
        lag = replica.lag(end)
        return FollowedPartition(
            topic=replica.place.topic,
            partition=replica.place.partition,
            end_offset=end,
            source_end_offset=replica.source_end,
            lag_records=lag,
            lag_bytes=0 if lag == 0 else self._lag_bytes(replica, end, lag),
            lag_seconds=max(0.0, time.time() - replica.level_at) if lag else 0.0,
            copied_records=replica.copied_records,
            copied_bytes=replica.copied_bytes,
            truncated_records=replica.truncated_records,
        )

    def _lag_bytes(self, replica: _Replica, end: int, lag: int) -> int | None:
        known = self._source.bytes_from(replica.place, end)
        if known is not None:
            return known
        mine = self._log(replica)
        records = end - mine.start_offset
        size = sum(segment.size_bytes for segment in mine.segments)
        return size * lag // records if records else None
