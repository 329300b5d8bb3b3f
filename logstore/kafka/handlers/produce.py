"""Produce: append a client's batches.

The bytes of the client are the bytes in the file: the engine checks them and puts offset and leader
epoch in front.  The partitions of a request succeed or fail each on its own.  The answer is sent
when the batches are as durable as the store is opened for; acks=1 and acks=all mean the same.
"""

from __future__ import annotations

import functools
import logging
import struct
from typing import TYPE_CHECKING, Any, NoReturn

from logstore import _native
from logstore.coordinators.internal_topics import INTERNAL_TOPICS
from logstore.errors import (
    ConcurrentTransactionsError,
    IndeterminateAppendError,
    InvalidRecordError,
    LogStoreError,
    NotCoordinatorError,
    ReadOnlyError,
    TransactionStateError,
    UnknownTopicError,
)
from logstore.format.batch import (
    AT_ATTRIBUTES,
    AT_LENGTH,
    AT_MAGIC,
    AT_PRODUCER_ID,
    CODEC,
    HEADER_BYTES,
    OVERHEAD_BYTES,
    TRANSACTIONAL,
)
from logstore.format.codec_ids import CODECS
from logstore.format.validation import refused_records
from logstore.kafka.calls import Call, NotNowError, Pending
from logstore.kafka.protocol.errors import ErrorCode, KafkaError, error_code, error_message
from logstore.partition.partition import Partition
from logstore.partition.raw.plain_append import append_plain
from logstore.store.topic import Topic

if TYPE_CHECKING:
    from logstore.kafka.broker import Broker
    from logstore.kafka.network.connection import Connection
    from logstore.kafka.network.outgoing import Pieces
    from logstore.replication.hosting.hosted import HostedReplica
    from logstore.replication.hosting.produced import Produced as Outcome

__all__ = ["produce", "produce_now"]

log = logging.getLogger("logstore.kafka")

INLINE_BYTES = 64 << 10  # a larger request is appended by a worker
ADMIN_CLIENT = "__admin_client"
_PRODUCER = struct.Struct(">qhi")  # id, epoch, sequence of the first record
# Errors that are answered without the start of the log, as are all of transactional batches.
_WITHOUT_START = {
    *(ErrorCode.MESSAGE_TOO_LARGE, ErrorCode.RECORD_LIST_TOO_LARGE),
    *(ErrorCode.CORRUPT_MESSAGE, ErrorCode.KAFKA_STORAGE_ERROR),
}


class _RefusedRecordsError(KafkaError):
    """A batch of which some records break a rule of the topic."""

    def __init__(self, code: ErrorCode, message: str, records: list[tuple[int, str]]) -> None:
        super().__init__(code, message)
        self.records = records  # place in the batch, and the rule


class _Produced:
    """The answers of one request, of which some wait for the disk."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.responses: list[dict[str, Any]] = []
        self.appended: list[tuple[Partition, range, dict[str, Any]]] = []  # to be made durable
        # Rows that replicas answer later, in the loop's thread: how many there are, and were done.
        self.replicated = self.acknowledged = 0
        self.pending: Pending | None = None
        self.failed = False
        self.not_enlisted: Exception | None = None  # why transactional batches are refused

    def answer_when_acknowledged(self) -> Pending:
        """Answer when the replicas have answered all rows."""
        pending = Pending(self._call, early=True)

        def wait() -> None:
            self.pending = pending
            self._answer_replicated()

        self._call.broker.calls.put(wait)
        return pending

    def acknowledge(self, row: dict[str, Any], outcome: Outcome, name: str, size: int) -> None:
        """Note the outcome of an append to a replica.  From any thread."""

        def note() -> None:
            self.acknowledged += 1
            if outcome.code:
                error = outcome.error if not outcome.offsets else None
                _refuse(row, error or KafkaError(ErrorCode(outcome.code)), self._call.version)
                self.failed = True
            else:
                row["base_offset"] = outcome.offsets.start
                row["log_append_time_ms"] = outcome.timestamp
                row["log_start_offset"] = outcome.start
                self._call.appended.append((name, size, len(outcome.offsets)))
            self._answer_replicated()

        self._call.broker.calls.put(note)

    def _answer_replicated(self) -> None:
        if self.pending is None or self.acknowledged < self.replicated:
            return
        if self._call.body["acks"] != 0:
            self.pending.answer({"responses": self.responses})
        elif self.failed:
            self._call.connection.close("error", "a batch with acks=0 could not be appended")

    def answer_when_durable(self) -> Pending:
        """Sync what was appended; the answer is given when the last row is durable or failed.

        The callbacks run in the loop's thread, and count only after all rows are counted here.
        """
        pending = Pending(self._call, early=True)
        waiting = len(self.appended)

        def done(row: dict[str, Any], error: BaseException | None) -> None:
            nonlocal waiting
            if error is not None:
                _refuse(row, error)
            waiting -= 1
            if waiting == 0 and self._call.body["acks"] != 0:
                pending.answer({"responses": self.responses})

        for partition, offsets, row in self.appended:
            self._call.broker.syncs.add(partition, offsets, functools.partial(done, row))
        return pending


def produce(call: Call) -> dict[str, Any] | Pending | None:
    """Append what a client sent."""
    body = call.body
    acks = body["acks"]
    asked = [(_topic(call, each), each) for each in body["topic_data"]]
    rows = [(topic, row) for topic, each in asked for row in each["partition_data"]]
    if not call.may_wait:
        _require_inline(call, rows)
    produced = _Produced(call)
    refusal = _refusal(call, rows)
    if refusal is None:
        produced.not_enlisted = _enlist(call, rows)
    for topic, each in asked:
        answers = []
        for row in each["partition_data"]:
            answer: dict[str, Any] = {"index": row["index"], "base_offset": -1}
            answers.append(answer)
            try:
                if refusal is not None:
                    raise refusal
                _append(call, _allowed(call, topic, each), row, answer, produced)
            except NotNowError:
                raise  # the only partition of the request: nothing is appended yet
            except Exception as error:  # noqa: BLE001  answered with its code
                _refuse(answer, error, call.version)
                produced.failed = True
        names = {"name": each["name"], "topic_id": each["topic_id"]}
        produced.responses.append(names | {"partition_responses": answers})
    pending = produced.answer_when_durable() if produced.appended else None
    if produced.replicated:
        pending = produced.answer_when_acknowledged()
    if acks == 0:
        if produced.failed:
            call.connection.close("error", "a batch with acks=0 could not be appended")
        return None
    return {"responses": produced.responses} if pending is None else pending


def produce_now(
    broker: Broker, connection: Connection, buffer: bytearray, at: int, size: int
) -> tuple[Pieces, int] | None:
    """Append the batch of a common request, as `produce` does; None for every other request.

    Common: one batch for one open partition, not compressed and not transactional, with an answer
    that does not wait for the disk.  If the batch is refused, nothing is appended here: `produce`
    finds the same error, and has its answer.  Raise IndeterminateAppendError if the batch may be in
    the log.
    """
    found = _native.read_produce(buffer, at, size) if broker.node is None else None
    if found is None:
        return None
    client_id, name, number, position, size_bytes = found
    store = broker.store
    topic = store.get(name) if isinstance(name, str) else broker.topic_by_id(name)
    if topic is None or topic.name in INTERNAL_TOPICS or store.durability == "fsync":
        return None
    partition = topic.opened(number)
    if partition is None:
        return None
    records = memoryview(buffer)[position : position + size_bytes]
    parts = partition.parts
    time_ms = -1
    try:
        offsets = append_plain(parts.active, records)
        if offsets is None:
            appended = parts.appender.append_batch(records, durability="os", wait=False)
            offsets, time_ms, _ = appended
        start_offset = partition.start_offset
    except IndeterminateAppendError:
        raise
    except (LogStoreError, OSError):
        return None
    connection.client_id = client_id
    answer = _native.produce_answer(buffer, at, size, offsets.start, time_ms, start_offset)
    broker.topics.appended_one(topic.name, size_bytes, len(offsets))
    return (answer,), len(answer)


def _topic(call: Call, asked: dict[str, Any]) -> Topic | None:
    """Return the topic that a request has the name or, from version 13 on, the id of."""
    if call.version >= 13:
        return call.broker.topic_by_id(asked["topic_id"])
    return call.broker.store.get(asked["name"])


def _allowed(call: Call, topic: Topic | None, asked: dict[str, Any]) -> Topic:
    """Return a topic that clients may write to."""
    name = asked["name"] if topic is None else topic.name
    if name in INTERNAL_TOPICS and call.client_id != ADMIN_CLIENT:
        raise KafkaError(ErrorCode.INVALID_TOPIC_EXCEPTION, f"{name} is written by the server only")
    if topic is not None:
        return topic
    topology = call.broker.topology
    if call.version >= 13:
        name = topology.name_of(asked["topic_id"])
        if name is None:
            raise KafkaError(ErrorCode.UNKNOWN_TOPIC_ID)
    if topology.topic_id(name) is not None:
        raise KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER)
    raise UnknownTopicError(name)


def _require_inline(call: Call, rows: list[tuple[Topic | None, dict[str, Any]]]) -> None:
    """Leave to a worker what may take long: large, compressed or transactional batches."""
    if len(rows) != 1 or call.body["transactional_id"] is not None:
        call.wait()
    for topic, each in rows:
        records = each["records"]
        if records is None or len(records) > INLINE_BYTES or len(records) < HEADER_BYTES:
            call.wait()
        if _attributes(records) & (CODEC | TRANSACTIONAL):
            call.wait()
        if topic is None or topic.opened(each["index"]) is None:
            call.wait()


def _refusal(call: Call, rows: list[tuple[Topic | None, dict[str, Any]]]) -> KafkaError | None:
    """Return what is wrong with the request as a whole."""
    if call.body["acks"] not in (-1, 0, 1):
        return KafkaError(ErrorCode.INVALID_REQUIRED_ACKS)
    places = [(topic.name, each["index"]) for topic, each in rows if topic is not None]
    if len(set(places)) < len(places):
        # Clients keep answers by partition: of two answers they would see one.
        return KafkaError(ErrorCode.INVALID_REQUEST, "a partition is in the request twice")
    ids = set()
    for _, each in rows:
        records = each["records"]
        if records is None or len(records) < HEADER_BYTES or records[AT_MAGIC] != 2:
            continue
        if _attributes(records) & TRANSACTIONAL:
            ids.add(_producer_id(records))
    if ids and call.body["transactional_id"] is None:
        return KafkaError(ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
    if len(ids) > 1:
        return KafkaError(ErrorCode.INVALID_PRODUCER_ID_MAPPING)
    return None


def _enlist(call: Call, rows: list[tuple[Topic | None, dict[str, Any]]]) -> Exception | None:
    """Add the partitions of the request to its transaction (version 12); return what is refused.

    It is one record of the coordinator, which is durable before the first batch is appended.
    """
    if call.version < 12 or call.body["transactional_id"] is None:
        return None
    places: dict[tuple[str, int], memoryview] = {}
    for topic, each in rows:
        records = each["records"]
        if (
            topic is not None
            and topic.name not in INTERNAL_TOPICS
            and each["index"] in topic.partition_numbers
            and records is not None
            and len(records) >= HEADER_BYTES
            and _attributes(records) & TRANSACTIONAL
        ):
            places[topic.name, each["index"]] = records
    if not places:
        return None
    from logstore.kafka.handlers.transactions import enlist

    producer_id, epoch, _ = _PRODUCER.unpack_from(next(iter(places.values())), AT_PRODUCER_ID)
    try:
        enlist(call, call.body["transactional_id"], (producer_id, epoch), places)
    except (KafkaError, LogStoreError, OSError) as error:
        return error
    return None


def _attributes(records: memoryview) -> int:
    return int.from_bytes(records[AT_ATTRIBUTES : AT_ATTRIBUTES + 2], "big")


def _producer_id(records: memoryview) -> int:
    return int.from_bytes(records[AT_PRODUCER_ID : AT_PRODUCER_ID + 8], "big", signed=True)


def _append(
    call: Call, topic: Topic, each: dict[str, Any], row: dict[str, Any], produced: _Produced
) -> None:
    if each["index"] not in topic.partition_numbers:
        raise KafkaError(call.broker.topology.missing(topic.name, each["index"]))
    records = each["records"]
    _check_batch(records, call.version)
    replica = call.broker.topology.replica(topic.name, each["index"])
    if replica is not None:
        _replicate(call, replica, records, row, produced)
        return
    partition = topic[each["index"]]
    transactional = bool(_attributes(records) & TRANSACTIONAL)
    if transactional and produced.not_enlisted is not None:
        raise produced.not_enlisted
    if transactional and call.version < 12:
        _check_producer(call, records)
    else:
        row["log_start_offset"] = partition.start_offset
    if transactional and call.version >= 12:
        _check_first(partition, records)
    try:
        appended = partition.parts.appender.append_batch(
            records, durability="os", wait=call.may_wait
        )
    except BlockingIOError:
        call.wait()
        raise
    except InvalidRecordError as error:
        if error.reason in ("key", "timestamp"):
            _refuse_records(call, partition, records, error)
        raise
    row["base_offset"] = appended.offsets.start
    row["log_append_time_ms"] = appended.timestamp
    call.appended.append((topic.name, len(records), len(appended.offsets)))
    row["log_start_offset"] = partition.start_offset
    if call.broker.store.durability == "fsync":
        produced.appended.append((partition, appended.offsets, row))


def _replicate(
    call: Call,
    replica: HostedReplica,
    records: memoryview,
    row: dict[str, Any],
    produced: _Produced,
) -> None:
    """Append to a partition that this node leads; answered when enough replicas have it."""
    name, size = replica.key[0], len(records)
    try:
        replica.produce(
            records,
            call.body["acks"],
            lambda outcome: produced.acknowledge(row, outcome, name, size),
            timeout_ms=max(1, call.body["timeout_ms"]),
            wait=call.may_wait,
        )
    except BlockingIOError:
        call.wait()
        raise
    produced.replicated += 1


def _refuse_records(
    call: Call, partition: Partition, records: memoryview, error: InvalidRecordError
) -> NoReturn:
    """Raise the error of a batch with the records that break a rule, as Kafka answers it."""
    call.wait()  # reads every record
    found = refused_records(bytes(records), partition.config, call.broker.clock.time_ms())
    reasons = {reason for _, reason, _ in found} or {error.reason}
    late = "timestamp" in reasons
    code = ErrorCode.INVALID_TIMESTAMP if late else ErrorCode.INVALID_RECORD
    rows = [(place, text) for place, _, text in found]
    raise _RefusedRecordsError(code, str(error), rows) from error


def _check_producer(call: Call, records: memoryview) -> None:
    """Refuse a batch whose producer id is not the one of the transactional id."""
    from logstore.coordinators.transaction_coordinator import Transactions

    try:
        known = Transactions.of(call.broker.store).state_of(call.body["transactional_id"])
    except NotCoordinatorError:
        return  # another node knows the id; the partition compares epochs
    if known is None or known.producer_id != _producer_id(records):
        raise KafkaError(ErrorCode.INVALID_PRODUCER_ID_MAPPING)


def _check_first(partition: Partition, records: memoryview) -> None:
    """Refuse a first batch of a transactional producer whose sequence is not 0 (version 12).

    The batch before it was refused, or has not arrived yet.
    """
    producer_id, _, sequence = _PRODUCER.unpack_from(records, AT_PRODUCER_ID)
    if sequence != 0 and partition.parts.reader.known_producer(producer_id) is None:
        raise KafkaError(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, "a new producer starts at 0")


def _check_batch(records: memoryview | None, version: int) -> None:
    """Refuse what is not one batch of format 2; the engine checks the rest."""
    if records is None or len(records) < HEADER_BYTES:
        raise KafkaError(ErrorCode.INVALID_RECORD, "a produce request has one batch a partition")
    if records[AT_MAGIC] in (0, 1):
        raise KafkaError(ErrorCode.INVALID_RECORD, "message formats 0 and 1 are not taken")
    if records[AT_MAGIC] != 2:
        raise KafkaError(ErrorCode.CORRUPT_MESSAGE, f"message format {records[AT_MAGIC]}")
    length = int.from_bytes(records[AT_LENGTH : AT_LENGTH + 4], "big", signed=True)
    if length + OVERHEAD_BYTES != len(records):
        raise KafkaError(ErrorCode.INVALID_RECORD, "a produce request has one batch a partition")
    if version < 7 and _attributes(records) & CODEC == CODECS["zstd"]:
        raise KafkaError(ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, "zstd needs Produce version 7")


def _refuse(row: dict[str, Any], error: BaseException, version: int = 11) -> None:
    if isinstance(error, IndexError):
        error = KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    code = error_code(error)
    if code is ErrorCode.UNKNOWN_SERVER_ERROR:
        log.error("a batch could not be appended", exc_info=error)
    if isinstance(error, ConcurrentTransactionsError):
        # The client tries again; one from before version 12 without asking for metadata first.
        if version < 12:
            code = ErrorCode.NOT_ENOUGH_REPLICAS
    elif isinstance(error, ReadOnlyError):
        code = ErrorCode.KAFKA_STORAGE_ERROR
    elif isinstance(error, TransactionStateError) and version >= 11:
        code = ErrorCode.TRANSACTION_ABORTABLE
    row.update(
        error_code=code, base_offset=-1, log_append_time_ms=-1, error_message=error_message(error),
    )  # fmt: skip
    if isinstance(error, _RefusedRecordsError):
        row["record_errors"] = [
            {"batch_index": place, "batch_index_error_message": text}
            for place, text in error.records
        ]
    if code in _WITHOUT_START:
        row["log_start_offset"] = -1
