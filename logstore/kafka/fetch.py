"""Fetch: batches of some partitions, now or when there are enough bytes."""

from __future__ import annotations

from typing import Any, NamedTuple

from logstore.errors import LogStoreError
from logstore.kafka.calls import Call, Pending
from logstore.kafka.errors import ErrorCode, KafkaError, error_code
from logstore.kafka.metadata import ZERO_ID
from logstore.kafka.offsets import check_leader_epoch, opened_partition
from logstore.kafka.waiting import Wait
from logstore.partition.partition import Partition

__all__ = ["fetch"]

ISOLATION = {0: "read_uncommitted", 1: "read_committed"}


class _Asked(NamedTuple):
    """One partition of a request."""

    partition: Partition
    offset: int
    max_bytes: int


def fetch(call: Call) -> dict[str, Any] | Pending:
    """Answer with records, or wait for them."""
    body = call.body
    isolation = ISOLATION.get(body["isolation_level"])
    if isolation is None:
        return {"error_code": ErrorCode.INVALID_REQUEST}
    if body["session_id"] != 0 and body["session_epoch"] > 0:
        return {"error_code": ErrorCode.FETCH_SESSION_ID_NOT_FOUND}
    reading = _Reading(call, isolation)
    reading.look()
    if reading.enough():
        return reading.answer()
    pending = Pending(call)

    def done() -> None:
        try:
            reading.look()
            pending.answer(reading.answer())
        except Exception as error:  # noqa: BLE001  answered with its code
            pending.fail(error)

    def begin() -> None:
        if call.connection.closed:
            return
        wait: Wait = call.broker.waiting.wait(
            [asked.partition for asked in reading.asked],
            body["max_wait_ms"] / 1000,
            reading.has_enough,
            done,
        )
        if not wait.over:
            pending.when_lost(lambda: call.broker.waiting.cancel(wait))

    if call.may_wait:
        call.broker.calls.put(begin)
    else:
        begin()
    return pending


class _Reading:
    """A fetch request and what it can be answered with at this time."""

    def __init__(self, call: Call, isolation: str) -> None:
        self.call = call
        self.isolation = isolation
        self.asked: list[_Asked] = []
        self.responses: list[dict[str, Any]] = []
        self.size_bytes = 0
        self.failed = False
        # A slice ended with its segment or at a limit, and the log has more records after it:
        # waiting adds nothing to it.
        self.cut_short = False
        body = call.body
        self._max_bytes = min(body["max_bytes"], call.broker.config.fetch_max_bytes)
        self._min_bytes = min(body["min_bytes"], self._max_bytes)

    def enough(self) -> bool:
        """Whether to answer now."""
        return (
            self.call.body["max_wait_ms"] <= 0
            or not self.asked
            or self.failed
            or self.cut_short
            or self.size_bytes >= self._min_bytes
            or self.call.broker.draining
        )

    def has_enough(self) -> bool:
        """Whether there is something to look at again: asked after each append."""
        if self._min_bytes <= 1:
            for asked in self.asked:
                if asked.partition.closed or self._stop(asked.partition) > asked.offset:
                    return True
            return False
        self.look()
        return self.enough()

    def _stop(self, partition: Partition) -> int:
        if self.isolation == "read_committed":
            return partition.last_stable_offset
        return partition.end_offset

    def answer(self) -> dict[str, Any]:
        """Return the response."""
        return {"responses": self.responses, "session_id": 0}

    def look(self) -> None:
        """Find what is there.  No record is read: an answer has slices of files."""
        self.asked, self.responses = [], []
        self.size_bytes, self.failed, self.cut_short = 0, False, False
        for topic in self.call.body["topics"]:
            rows = []
            for each in topic["partitions"]:
                row: dict[str, Any] = {
                    "partition_index": each["partition"], "high_watermark": -1, "records": b"",
                }  # fmt: skip
                rows.append(row)
                try:
                    self._read(topic, each, row)
                except (KafkaError, LogStoreError, OSError, IndexError) as error:
                    self.failed = True
                    code = error_code(error)
                    if isinstance(error, IndexError) and code is ErrorCode.UNKNOWN_SERVER_ERROR:
                        code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                    if code is ErrorCode.KAFKA_STORAGE_ERROR and self.call.version < 6:
                        code = ErrorCode.NOT_LEADER_OR_FOLLOWER
                    row["error_code"] = code
            self.responses.append(
                {"topic": topic["topic"], "topic_id": topic["topic_id"], "partitions": rows}
            )

    def _read(self, topic: dict[str, Any], each: dict[str, Any], row: dict[str, Any]) -> None:
        partition = self._partition(topic, each["partition"])
        row["aborted_transactions"] = None
        body = self.call.body
        if max(body["replica_id"], body["replica_state"]["replica_id"]) >= 0:
            raise KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER)  # no other node has a replica
        check_leader_epoch(partition, each["current_leader_epoch"])
        offset = each["fetch_offset"]
        start, end = partition.start_offset, partition.end_offset
        if not start <= offset <= end:
            raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE)
        if self._diverges(partition, each, row):
            return
        asked = _Asked(partition, offset, each["partition_max_bytes"])
        self.asked.append(asked)
        row["high_watermark"] = end
        row["last_stable_offset"] = partition.last_stable_offset
        row["log_start_offset"] = start
        committed = self.isolation == "read_committed"
        row["aborted_transactions"] = [] if committed else None
        left = self._max_bytes - self.size_bytes
        if (left <= 0 and self.size_bytes) or self._stop(partition) <= offset:
            return
        limit = min(left, asked.max_bytes)
        # Only the first partition with records sends a batch above the limit.
        found = partition.parts.reader.read_slice(
            offset, limit, isolation=self.isolation, whole_first=not self.size_bytes
        )
        if found is None:
            return
        row["records"] = found
        self.size_bytes += found.size_bytes
        if found.end_offset < self._stop(partition):
            self.cut_short = True
        if committed:
            row["aborted_transactions"] = [
                {"producer_id": each.producer_id, "first_offset": each.first_offset}
                for each in partition.aborted_transactions(offset, found.end_offset)
            ]

    def _diverges(self, partition: Partition, each: dict[str, Any], row: dict[str, Any]) -> bool:
        """Whether the log of the client has another history; the row then tells where it parts."""
        epoch = each["last_fetched_epoch"]
        if epoch < 0:
            return False
        found = partition.end_offset_for_epoch(epoch)
        latest = partition.leader_epochs.latest
        if found is None or latest is None or epoch > latest:
            raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE)
        if found.end_offset < each["fetch_offset"] or found.epoch < epoch:
            row["diverging_epoch"] = {"epoch": found.epoch, "end_offset": found.end_offset}
            return True
        return False

    def _partition(self, topic: dict[str, Any], number: int) -> Partition:
        broker = self.call.broker
        if self.call.version >= 13:
            found = None if topic["topic_id"] == ZERO_ID else broker.topic_by_id(topic["topic_id"])
            if found is None:
                raise KafkaError(ErrorCode.UNKNOWN_TOPIC_ID)
        else:
            found = broker.store.get(topic["topic"])
            if found is None:
                raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        return opened_partition(self.call, found, number)
