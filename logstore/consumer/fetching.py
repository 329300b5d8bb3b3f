"""Fetcher: takes records from the sources of a consumer, for a poll or for an iteration.

Deserializers and interceptors are called for each record.  If one of them raises, the position is
set back to the record that it failed for, so that the record is read again.

Only the consumer's thread calls its methods, except `interrupt` and `overdue`, which any thread may
call.  `interrupt` sets `attention` before it ends the run.  The consumer's thread publishes a run
before it looks at `attention`.  So one of the two threads sees the other, without a lock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import cast

from logstore.consumer.positions import Positions
from logstore.consumer.received import ReceivedRecord, deserialized
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

RUN = 32_768  # offsets that an iteration reads from a partition before the next one has its turn
LIST_RUN = 512  # the same, if deserializers or interceptors are called


class Fetcher:
    """Reads the partitions of `positions`, one after the other."""

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
        # Whether an iteration can return the records of a scan without a call of Python code.
        self._plain = not (
            key_deserializer
            or value_deserializer
            or interceptors.receivers
            or max_processing_time is not None
        )
        self.attention = False  # end the run: the group or a commit needs the consumer's thread
        self.taken: dict[Source, int | None] = {}  # positions before the current poll
        self.handed_at: float | None = None  # when `current` of the positions was returned

    def take(
        self, max_records: int, partitions: Collection[TopicPartition] | None = None
    ) -> list[ReceivedRecord]:
        """Return the records that are available now, without waiting; of several partitions.

        `partitions`: read only these.
        """
        found: list[ReceivedRecord] = []
        began: dict[TopicPartition, int] = {}
        for source in list(self._positions.turn):
            if partitions is not None and source.partition not in partitions:
                self._positions.next_turn(source)
                continue
            at = source.position
            self.taken[source] = at
            try:
                records = self._read(source, max_records - len(found))
            except BaseException as error:
                if not found or isinstance(error, KeyboardInterrupt):
                    raise
                break  # return the records before the error; the next call raises it again
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
        """Return records of one partition, deserialized; an empty list if there are none."""
        at = source.position
        if source.paused or at is None:
            return []
        records = self._read_raw(source, limit)
        if not records or (self._key_deserializer is None and self._value_deserializer is None):
            return cast("list[ReceivedRecord]", records)  # a record of a log has all fields
        made: list[ReceivedRecord] = []
        try:
            made.extend(
                deserialized(record, self._key_deserializer, self._value_deserializer)
                for record in records
            )
        except SerializationError as error:
            # Return the records before it.  The position is the bad record: the next call raises.
            source.seek(error.offset)
            if not made:
                raise
        except BaseException:
            source.seek(at)
            raise
        return made

    def _read_raw(self, source: Source, limit: int) -> list[Record]:
        """Read records; if the position is outside of the log or truncated, set it to `start`."""
        try:
            return source.read(limit)
        except OffsetOutOfRangeError as error:
            if self._positions.start == "none":
                raise
            cut = source.log.parts.view.cut
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

    def _intercepted(
        self, records: list[ReceivedRecord], began: Mapping[TopicPartition, int]
    ) -> list[ReceivedRecord]:
        """Return the result of `on_consume`; if it raises, set the positions back to `began`."""
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
        """Return a run: an iterable of records of one partition; None if there are none now."""
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
            run = None  # `_list_run` handles these errors
        if run is None:
            return self._list_run(source)
        self._positions.running, self._positions.run = source, run
        self._positions.run_began = source.position
        # After `run` was published: an `interrupt` before that found no run to end.
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
        """Yield records one by one; at the end, set the position after the last yielded record."""
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
            # `running` is another if the loop has called `seek`, or the partition was revoked.
            if at.running is source and record is not records[-1]:
                source.seek(at.current.offset + 1)

    # ---- for other threads ----

    def interrupt(self) -> None:
        """End the current run: the consumer then rebalances or commits before the next record."""
        self.attention = True
        run = self._positions.run
        if run is not None:
            run.end()
        self._bell.ring()

    def overdue(self) -> str:
        """Return which record is processed for longer than `max_processing_time`, or "".

        The timers' thread calls it.  It reads without a lock: a wrong time is noticed one heartbeat
        later.
        """
        limit, since, record = self._max_processing_time, self.handed_at, self._positions.current
        if limit is None or since is None or record is None:
            return ""
        spent = time.monotonic() - since
        if spent <= limit:
            return ""
        where = f"{record.topic}-{record.partition} offset {record.offset}"
        return f"{where} is being processed for {spent:.1f} s; max_processing_time is {limit} s"
