"""Fetcher: takes records from the sources of a consumer, for a poll or for an iteration.

Records go through the deserializers and the interceptors.  If one of them raises, the positions are
those from before the record that it failed for, so that the record is read again.

Used by the consumer's thread; `interrupt` and `overdue` by any thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from logstore.consumer.positions import Positions
from logstore.consumer.received import ConsumedRecord, ReceivedRecord
from logstore.consumer.source import Source
from logstore.consumer.wakeup import Bell
from logstore.coordinators.offset_records import TopicPartition
from logstore.errors import (
    ClosedError,
    LogTruncatedError,
    OffsetOutOfRangeError,
    UnknownTopicError,
)
from logstore.interceptors import InterceptorChain
from logstore.record import Record
from logstore.serialization import Deserializer, SerializationError
from logstore.store.store import Store

__all__ = ["Fetcher"]

log = logging.getLogger("logstore.consumer")

RUN = 32_768  # offsets that an iteration takes from a partition before it looks around
LIST_RUN = 512  # the same, of records that go through the user's own code


class Fetcher:
    """Reads the partitions of `positions`, each in its turn."""

    def __init__(
        self,
        store: Store,
        positions: Positions,
        bell: Bell,
        *,
        key_deserializer: Deserializer | None,
        value_deserializer: Deserializer | None,
        interceptors: InterceptorChain,
        max_processing_time: float | None,
    ) -> None:
        self._store = store
        self._positions = positions
        self._bell = bell
        self._key_deserializer = key_deserializer
        self._value_deserializer = value_deserializer
        self._interceptors = interceptors
        self._max_processing_time = max_processing_time
        # Whether an iteration can hand out what the scan gives, and nothing has to look at it.
        self._plain = not (
            key_deserializer
            or value_deserializer
            or interceptors.receivers
            or max_processing_time is not None
        )
        self.attention = False  # something else than records wants to be looked at
        self.taken: dict[Source, int | None] = {}  # positions before the poll that is under way
        self.handed_at: float | None = None  # when `current` of the positions was handed out

    def take(self, max_records: int) -> list[ReceivedRecord]:
        """What there is now, from several partitions if need be."""
        found: list[ReceivedRecord] = []
        began: dict[TopicPartition, int] = {}
        for source in list(self._positions.turn):
            at = source.position
            self.taken[source] = at
            try:
                records = self._read(source, max_records - len(found))
            except BaseException as error:
                if not found or isinstance(error, KeyboardInterrupt):
                    raise
                break  # what was read is returned first; the error comes again
            if records:
                assert at is not None
                began[source.partition] = at
                found += records
            if len(found) >= max_records:
                break
            self._positions.next_turn(source)
        if not found:
            return found
        given = self._intercepted(found, began)
        self._positions.handed = began
        self._positions.current = found[0]
        if self._max_processing_time is not None:
            self.handed_at = time.monotonic()
        return given

    def _read(self, source: Source, limit: int) -> list[ReceivedRecord]:
        """Records of one partition, deserialized; none when there are none."""
        at = source.position
        if source.paused or at is None:
            return []
        records = self._read_raw(source, limit)
        if not records or (self._key_deserializer is None and self._value_deserializer is None):
            return cast("list[ReceivedRecord]", records)  # a record of a log has all fields
        made: list[ReceivedRecord] = []
        try:
            made.extend(map(self._deserialized, records))
        except SerializationError as error:
            # Those before it first; it comes with the next call, and its offset is the position.
            source.seek(error.offset)
            if not made:
                raise
        except BaseException:
            source.seek(at)
            raise
        return made

    def _read_raw(self, source: Source, limit: int) -> list[Record]:
        """A position outside of the log, or past a truncation, is reset as `start` says."""
        try:
            return source.read(limit)
        except OffsetOutOfRangeError as error:
            if self._positions.start == "none":
                raise
            cut = source.log.cut
            target = self._positions.start_of(source)
            if isinstance(error, LogTruncatedError):
                # "latest" must not skip what was appended in the place of the truncated records.
                target = min(target, max(error.truncated_to, source.log.start_offset))
            log.warning("%s: %s; reading on from %d", source.partition, error, target)
            source.seek(target, cut)
            return source.read(limit)
        except (ClosedError, UnknownTopicError):
            if self._store.closed or self._positions.exists(source.partition):
                raise
            self._positions.drop([source.partition])  # its topic was deleted
            return []

    def _deserialized(self, record: Record) -> ConsumedRecord:
        topic, partition = record.topic or "", record.partition or 0
        made: list[Any] = []
        for part, call in (("value", self._value_deserializer), ("key", self._key_deserializer)):
            raw = getattr(record, part)
            if call is not None and raw is not None:
                try:
                    raw = call(raw)
                except Exception as error:
                    raise SerializationError(
                        error, part=part, topic=topic, data=getattr(record, part),
                        partition=partition, offset=record.offset,
                    ) from error  # fmt: skip
            made.append(raw)
        return ConsumedRecord(made[0], made[1], record.headers, record.timestamp, record.offset,
                              partition, topic)  # fmt: skip

    def _intercepted(
        self, records: list[ReceivedRecord], began: Mapping[TopicPartition, int]
    ) -> list[ReceivedRecord]:
        """As the interceptors want them; when one fails, it is as if nothing had been read."""
        if not self._interceptors.receivers:
            return records
        try:
            taken = self._interceptors.on_consume(cast("list[Record]", records))
            return cast("list[ReceivedRecord]", list(taken))
        except BaseException:
            for tp, at in began.items():
                self._positions.sources[tp].seek(at)
            raise

    # ---- iterating ----

    def next_run(self) -> Iterable[ReceivedRecord] | None:
        """Records of one partition, as long as nothing else is to be done; None: none are there."""
        for source in list(self._positions.turn):
            run = self._scan_run(source) if self._plain else self._list_run(source)
            self._positions.next_turn(source)
            if run is not None:
                return run
        return None

    def _scan_run(self, source: Source) -> Iterable[ReceivedRecord] | None:
        if source.paused or source.position is None:
            return None
        try:
            run = source.run(RUN)
        except (OffsetOutOfRangeError, ClosedError, UnknownTopicError):
            run = None  # the longer way knows what to do
        if run is None:
            return self._list_run(source)
        self._positions.running, self._positions.run = source, run
        self._positions.run_began = source.position
        if self.attention:
            run.end()
        return cast("Iterable[ReceivedRecord]", run)

    def _list_run(self, source: Source) -> Iterable[ReceivedRecord] | None:
        at = source.position
        records = self._read(source, LIST_RUN)
        if not records:
            return None
        assert at is not None
        given = self._intercepted(records, {source.partition: at})
        return self._each(source, given) if given else None

    def _each(self, source: Source, records: list[ReceivedRecord]) -> Iterator[ReceivedRecord]:
        """Give out a run one by one; whatever ends it, the position is right behind."""
        at = self._positions
        at.running = source
        timed = self._max_processing_time is not None
        record = None
        try:
            for record in records:
                at.current = record
                if timed:
                    self.handed_at = time.monotonic()
                yield record
                if self.attention:
                    break
        finally:
            # Not if somebody has moved the position meanwhile, or the partition is gone.
            if at.running is source and record is not records[-1]:
                source.seek(at.current.offset + 1)

    # ---- for other threads ----

    def interrupt(self) -> None:
        """Have the consumer look around before the next record; by any thread."""
        self.attention = True
        run = self._positions.run
        if run is not None:
            run.end()
        self._bell.ring()

    def overdue(self) -> str:
        """What it has been at for longer than it may; called by the timers' thread."""
        limit, since, record = self._max_processing_time, self.handed_at, self._positions.current
        if limit is None or since is None or record is None:
            return ""
        spent = time.monotonic() - since
        if spent <= limit:
            return ""
        where = f"{record.topic}-{record.partition} offset {record.offset}"
        return f"{where} is being processed for {spent:.1f} s; max_processing_time is {limit} s"
