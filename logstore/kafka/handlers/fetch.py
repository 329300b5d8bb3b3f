"""Fetch: batches of some partitions, now or when there are enough bytes.

The handler runs in the loop's thread, as everything of fetch sessions does; a worker's thread only
opens the partitions that are not open.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from logstore import _native
from logstore.errors import LogStoreError
from logstore.kafka.calls import Call, Pending
from logstore.kafka.clustering.topology import ZERO_ID, replica_id
from logstore.kafka.handlers.fetch_sessions import (
    FINAL_EPOCH,
    INITIAL_EPOCH,
    FetchRow,
    FetchSession,
    RowKey,
)
from logstore.kafka.handlers.offsets import check_leader_epoch, opened_partition
from logstore.kafka.protocol.errors import ErrorCode, KafkaError, error_code
from logstore.partition.partition import Partition
from logstore.store.topic import Topic

if TYPE_CHECKING:
    from logstore.kafka.broker import Broker
    from logstore.kafka.network.connection import Connection
    from logstore.kafka.network.outgoing import Pieces

__all__ = ["fetch", "fetch_now"]

ISOLATION = {0: "read_uncommitted", 1: "read_committed"}
# A row with one of these errors does not end the wait for the other rows, as with Kafka.
_UNKNOWN = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID)


def fetch(call: Call) -> dict[str, Any] | Pending:
    """Answer with records, or wait for them."""
    body, sessions = call.body, call.broker.sessions
    if call.broker.node is not None and replica_id(body) >= 0:
        from logstore.kafka.clustering.replica_fetch import serve_replica

        return serve_replica(call)
    isolation = ISOLATION.get(body["isolation_level"])
    if isolation is None:
        return {"error_code": ErrorCode.INVALID_REQUEST}
    by_id = call.version >= 13
    name = "topic_id" if by_id else "topic"
    rows: dict[RowKey, FetchRow] = {
        (topic[name], each["partition"]): FetchRow(topic[name], each)
        for topic in body["topics"]
        for each in topic["partitions"]
    }
    session = None
    session_id, epoch = body["session_id"], body["session_epoch"]
    if epoch in (INITIAL_EPOCH, FINAL_EPOCH):
        sessions.remove(session_id)
    else:
        gone = body["forgotten_topics_data"]
        forgotten = [(topic[name], number) for topic in gone for number in topic["partitions"]]
        try:
            session = sessions.begin(session_id, epoch, by_id, rows, forgotten)
        except KafkaError as error:
            return {"error_code": error.code}
        if session is not None and call.broker.store.readonly:
            session.cool()  # appends of another process are not noticed
    reading = _Reading(call, isolation, rows, session)
    closed = reading.find_partitions()
    if not closed:
        return reading.result()
    pending = Pending(call)

    def opened(found: Any, error: BaseException | None) -> None:
        try:
            if error is not None:
                raise error
            reading.take(found)
            reading.result(pending)
        except Exception as raised:  # noqa: BLE001  answered with its code
            pending.fail(raised)

    call.broker.workers.submit(lambda: _open(call, closed), opened)
    return pending


def fetch_now(
    broker: Broker, connection: Connection, buffer: bytearray, at: int, size: int
) -> tuple[Pieces, int] | None:
    """Answer a common request, as `fetch` does; None for every other request.

    Common: one open partition, no session, and records that need not be waited for, none of them of
    an aborted transaction.
    """
    found = _native.read_fetch(buffer, at, size) if broker.node is None else None
    if found is None:
        return None
    client_id, name, number, offset, epoch, fetched, wait_ms, least, most, committed = found
    topic = broker.store.get(name) if isinstance(name, str) else broker.topic_by_id(name)
    partition = None if topic is None else topic.opened(number)
    if topic is None or partition is None or fetched >= 0:
        return None
    try:
        check_leader_epoch(partition, epoch)
        start, end, stable = (
            partition.start_offset, partition.high_watermark, partition.last_stable_offset
        )  # fmt: skip
        stop = stable if committed else end
        if not start <= offset < stop:
            return None
        records = partition.parts.reader.read_slice(
            offset,
            min(most, broker.config.fetch_max_bytes),
            isolation=ISOLATION[committed],
            whole_first=True,
        )
        if records is None:
            return None
        if committed and partition.aborted_transactions(offset, records.end_offset):
            return None
    except (KafkaError, LogStoreError, OSError, IndexError):
        return None  # found again by `fetch`
    if records.size_bytes < least and wait_ms > 0 and records.end_offset >= stop:
        return None
    head, tail = _native.fetch_answer(buffer, at, size, end, stable, start, records.size_bytes)
    connection.client_id = client_id
    broker.topics.fetched_one(topic.name, records.size_bytes)
    pieces: Pieces = (head, records, tail) if tail else (head, records)
    return pieces, len(head) + records.size_bytes + len(tail)


def _open(
    call: Call, closed: list[tuple[FetchRow, Topic]]
) -> list[tuple[FetchRow, Partition | ErrorCode]]:
    """Open partitions, in a worker's thread."""
    call.may_wait = True
    found: list[tuple[FetchRow, Partition | ErrorCode]] = []
    for row, topic in closed:
        try:
            found.append((row, opened_partition(call, topic, row.number)))
        except IndexError:
            found.append((row, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION))
        except (KafkaError, LogStoreError, OSError) as error:
            found.append((row, error_code(error)))
    return found


class _Reading:
    """A fetch request and what it can be answered with at this time."""

    def __init__(
        self,
        call: Call,
        isolation: str,
        rows: dict[RowKey, FetchRow],
        session: FetchSession | None,
    ) -> None:
        self.call = call
        self.isolation = isolation
        self.rows = rows if session is None else session.rows
        self.session = session
        self.epoch = 0 if session is None else session.epoch
        self.answers: list[tuple[FetchRow, dict[str, Any]]] = []
        self.size_bytes = 0
        self.failed = False
        self._unknown = 0  # rows without a partition
        # A slice ended with its segment or at a limit, and the log has more records after it:
        # waiting adds nothing to it.
        self.cut_short = False
        body = call.body
        self._max_bytes = min(body["max_bytes"], call.broker.config.fetch_max_bytes)
        self._min_bytes = min(body["min_bytes"], self._max_bytes)
        for row in self._to_read():
            row.error = None

    def _to_read(self) -> list[FetchRow]:
        return list(self.rows.values()) if self.session is None else self.session.to_read()

    # ---- partitions ----

    def find_partitions(self) -> list[tuple[FetchRow, Topic]]:
        """Find the open partition of each row; return the rows whose partition is not open."""
        topics: dict[str | bytes, Topic | None] = {}
        closed = []
        for row in self._to_read():
            if row.error is not None or (row.partition is not None and not row.partition.closed):
                continue
            if row.topic not in topics:
                topics[row.topic] = self._topic(row.topic)
            topic = topics[row.topic]
            opened = None if topic is None else topic.opened(row.number)
            self._attach(row, opened)
            if topic is None:
                row.error = self._missing(row)
                continue
            row.name = topic.name
            if opened is None:
                closed.append((row, topic))
        return closed

    def _missing(self, row: FetchRow) -> ErrorCode:
        """Return the error of a row without a topic.  A session knows the name of a deleted one."""
        topology = self.call.broker.topology
        name = row.name
        if name is None:
            name = row.topic if isinstance(row.topic, str) else topology.name_of(row.topic)
        if name is None:
            return ErrorCode.UNKNOWN_TOPIC_ID
        missing = topology.missing(name, row.number)
        if missing is ErrorCode.NOT_LEADER_OR_FOLLOWER:
            return missing
        if row.name is not None and row.name in self.call.broker.store:
            return ErrorCode.INCONSISTENT_TOPIC_ID
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION

    def _topic(self, name: str | bytes) -> Topic | None:
        broker = self.call.broker
        if isinstance(name, str):
            return broker.store.get(name)
        return None if name == ZERO_ID else broker.topic_by_id(name)

    def _attach(self, row: FetchRow, partition: Partition | None) -> None:
        if self.session is None:
            row.partition = partition
        else:
            self.session.attach(row, partition)

    def take(self, found: list[tuple[FetchRow, Partition | ErrorCode]]) -> None:
        """Use the partitions that a worker opened."""
        if self._is_outdated():
            return
        for row, each in found:
            if isinstance(each, ErrorCode):
                row.error = each
            else:
                self._attach(row, each)

    def _is_outdated(self) -> bool:
        """Whether the session was removed, or has had another request."""
        return self.session is not None and self.session.epoch != self.epoch

    # ---- the answer ----

    def result(self, pending: Pending | None = None) -> dict[str, Any] | Pending:
        """Answer now, or when there is enough."""
        self.look()
        if self._is_outdated() or self.enough():
            answer = self.answer()
            if pending is None:
                return answer
            pending.answer(answer)
            return pending
        pending = pending or Pending(self.call)
        self._wait(pending)
        return pending

    def _wait(self, pending: Pending) -> None:
        if self.call.connection.closed:
            return
        waiting, session = self.call.broker.waiting, self.session

        def done() -> None:
            try:
                self.look()
                pending.answer(self.answer())
            except Exception as error:  # noqa: BLE001  answered with its code
                pending.fail(error)

        # The Watch of a session listens to its partitions.
        partitions = [row.partition for row in self.rows.values()] if session is None else []
        wait = waiting.wait(
            [each for each in partitions if each is not None],
            self.call.body["max_wait_ms"] / 1000,
            self.has_enough,
            done,
        )
        if not wait.over:
            pending.when_lost(lambda: waiting.cancel(wait))
            if session is not None:
                session.watch.wait = wait

    def enough(self) -> bool:
        """Whether to answer now."""
        return (
            self.call.body["max_wait_ms"] <= 0
            or self._unknown == len(self.rows)
            or self.failed
            or self.cut_short
            or self.size_bytes >= self._min_bytes
            or self.call.broker.draining
        )

    def has_enough(self) -> bool:
        """Whether there is something to look at again: asked after each append."""
        session = self.session
        changed = self.rows.values() if session is None else session.note_changes()
        if self._min_bytes > 1:
            self.look()
            return self.enough()
        leads = self.call.broker.topology.leads
        for row in changed:
            partition = row.partition
            if partition is not None and (
                partition.closed
                or self._stop(partition) > row.fetch_offset
                or not leads(partition.topic, partition.number)
            ):
                return True
        return False

    def _stop(self, partition: Partition) -> int:
        if self.isolation == "read_committed":
            return partition.last_stable_offset
        return partition.high_watermark

    def answer(self) -> dict[str, Any]:
        """Return the response."""
        session, answers, body = self.session, self.answers, self.call.body
        by_id = self.call.version >= 13
        session_id = 0
        if session is not None:
            session_id = session.id
            if self._is_outdated():
                code = ErrorCode.INVALID_FETCH_SESSION_EPOCH
                return {"error_code": code, "session_id": session_id}
            answers = [each for each in answers if session.selects(*each)]
        elif body["session_epoch"] == INITIAL_EPOCH and self.call.version >= 7:
            weight = sum(row.weight for row in self.rows.values())
            session_id = self.call.broker.sessions.create(by_id, answers, weight)
        name = "topic_id" if by_id else "topic"
        # Partitions stay in their turn, so a topic may be there twice, as in Kafka's answers.
        responses = [
            {name: topic, "partitions": [answer for _, answer in rows]}
            for topic, rows in itertools.groupby(answers, key=lambda each: each[0].topic)
        ]
        return {"responses": responses, "session_id": session_id}

    # ---- reading ----

    def look(self) -> None:
        """Find what is there.  No record is read: an answer has slices of files."""
        self.answers = []
        self.size_bytes, self.failed, self.cut_short, self._unknown = 0, False, False, 0
        if self._is_outdated():
            return
        for row, _ in self.find_partitions():
            row.error = ErrorCode.NOT_LEADER_OR_FOLLOWER  # closed while the fetch waited
        for row in self._to_read():
            answer: dict[str, Any] = {
                "partition_index": row.number, "high_watermark": -1, "records": b"",
            }  # fmt: skip
            code = row.error
            if row.partition is not None:
                try:
                    code = None
                    if self._read(row, row.partition, answer):
                        continue
                except (KafkaError, LogStoreError, OSError, IndexError) as error:
                    code = error_code(error)
            if code is not None:
                self._refuse(code, answer)
            self.answers.append((row, answer))

    def _refuse(self, code: ErrorCode, answer: dict[str, Any]) -> None:
        if code in _UNKNOWN:
            self._unknown += 1
        else:
            self.failed = True
        if code is ErrorCode.KAFKA_STORAGE_ERROR and self.call.version < 6:
            code = ErrorCode.NOT_LEADER_OR_FOLLOWER
        if code is ErrorCode.INCONSISTENT_TOPIC_ID:
            answer["aborted_transactions"] = None
        answer["error_code"] = code

    def _read(self, row: FetchRow, partition: Partition, answer: dict[str, Any]) -> bool:
        """Fill the answer of a row; return whether its session has nothing to answer for it."""
        answer["aborted_transactions"] = None
        if replica_id(self.call.body) >= 0:
            raise KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER)  # no other node has a replica
        self.call.broker.topology.check_leads(partition.topic, partition.number)
        check_leader_epoch(partition, row.leader_epoch)
        offset = row.fetch_offset
        start, end = partition.start_offset, partition.end_offset
        if not start <= offset <= end:
            raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE)
        if self._diverges(row, partition, answer):
            return False
        stop, watermark = self._stop(partition), partition.high_watermark
        sent = (row.end, row.start)
        if self.session is not None and stop <= offset and (watermark, start) == sent:
            del self.session.dirty[row]
            return True
        answer["high_watermark"] = watermark
        answer["last_stable_offset"] = partition.last_stable_offset
        answer["log_start_offset"] = start
        committed = self.isolation == "read_committed"
        answer["aborted_transactions"] = [] if committed else None
        left = self._max_bytes - self.size_bytes
        if (left <= 0 and self.size_bytes) or stop <= offset:
            return False
        limit = min(left, row.max_bytes)
        # Only the first partition with records sends a batch above the limit.
        found = partition.parts.reader.read_slice(
            offset, limit, isolation=self.isolation, whole_first=not self.size_bytes
        )
        if found is None:
            return False
        answer["records"] = found
        self.size_bytes += found.size_bytes
        if found.end_offset < self._stop(partition):
            self.cut_short = True
        if committed:
            answer["aborted_transactions"] = [
                {"producer_id": each.producer_id, "first_offset": each.first_offset}
                for each in partition.aborted_transactions(offset, found.end_offset)
            ]
        return False

    def _diverges(self, row: FetchRow, partition: Partition, answer: dict[str, Any]) -> bool:
        """Whether the log of the client has another history; the answer then has where it parts."""
        epoch = row.fetched_epoch
        if epoch < 0:
            return False
        found = partition.end_offset_for_epoch(epoch)
        latest = partition.leader_epochs.latest
        if found is None or latest is None or epoch > latest:
            raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE)
        if found.end_offset < row.fetch_offset or found.epoch < epoch:
            answer["diverging_epoch"] = {"epoch": found.epoch, "end_offset": found.end_offset}
            return True
        return False
