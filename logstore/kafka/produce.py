"""Produce: append a client's batches.

The bytes of the client are the bytes in the file: the engine checks them and puts offset and leader
epoch in front.  The partitions of a request succeed or fail each on its own.  The answer is sent
when the batches are as durable as the store is opened for; acks=1 and acks=all mean the same.
"""

from __future__ import annotations

import functools
import logging
import struct
from typing import Any

from logstore.coordinators.internal_topics import INTERNAL_TOPICS
from logstore.errors import (
    ConcurrentTransactionsError,
    ReadOnlyError,
    TransactionStateError,
    UnknownTopicError,
)
from logstore.kafka.calls import Call, NotNowError, Pending
from logstore.kafka.errors import ErrorCode, KafkaError, error_code, error_message
from logstore.partition.partition import Partition

__all__ = ["produce"]

log = logging.getLogger("logstore.kafka")

INLINE_BYTES = 64 << 10  # a larger request is appended by a worker
ADMIN_CLIENT = "__admin_client"
_HEADER_BYTES = 61
_ATTRIBUTES = struct.Struct(">h")
_LENGTH = struct.Struct(">i")
_CODEC, _TRANSACTIONAL = 0x07, 0x10
_ZSTD = 4
# Errors that are answered without the start of the log, as are all of transactional batches.
_WITHOUT_START = {
    *(ErrorCode.MESSAGE_TOO_LARGE, ErrorCode.RECORD_LIST_TOO_LARGE),
    *(ErrorCode.CORRUPT_MESSAGE, ErrorCode.KAFKA_STORAGE_ERROR),
}
_MAGIC_AT, _ATTRIBUTES_AT, _LENGTH_AT = 16, 21, 8


class _Produced:
    """The answers of one request, of which some wait for the disk."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.responses: list[dict[str, Any]] = []
        self.appended: list[tuple[Partition, range, dict[str, Any]]] = []  # to be made durable
        self.failed = False

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
    rows = [
        (topic["name"], each) for topic in body["topic_data"] for each in topic["partition_data"]
    ]
    if not call.may_wait:
        _require_inline(call, rows)
    produced = _Produced(call)
    refusal = _refusal(call, rows)
    for topic in body["topic_data"]:
        answers = []
        for each in topic["partition_data"]:
            row: dict[str, Any] = {"index": each["index"], "base_offset": -1}
            answers.append(row)
            try:
                if refusal is not None:
                    raise refusal
                _append(call, topic["name"], each, row, produced)
            except NotNowError:
                raise  # the only partition of the request: nothing is appended yet
            except Exception as error:  # noqa: BLE001  answered with its code
                _refuse(row, error, call.version)
                produced.failed = True
        produced.responses.append({"name": topic["name"], "partition_responses": answers})
    pending = produced.answer_when_durable() if produced.appended else None
    if acks == 0:
        if produced.failed:
            call.connection.close("error", "a batch with acks=0 could not be appended")
        return None
    return {"responses": produced.responses} if pending is None else pending


def _require_inline(call: Call, rows: list[tuple[str, dict[str, Any]]]) -> None:
    """Leave to a worker what may take long: large, compressed or transactional batches."""
    if len(rows) != 1 or call.body["transactional_id"] is not None:
        call.wait()
    for name, each in rows:
        records = each["records"]
        if records is None or len(records) > INLINE_BYTES or len(records) < _HEADER_BYTES:
            call.wait()
        if _attributes(records) & (_CODEC | _TRANSACTIONAL):
            call.wait()
        topic = call.broker.store.get(name)
        if topic is None or topic.opened(each["index"]) is None:
            call.wait()


def _refusal(call: Call, rows: list[tuple[str, dict[str, Any]]]) -> KafkaError | None:
    """Return what is wrong with the request as a whole."""
    if call.body["acks"] not in (-1, 0, 1):
        return KafkaError(ErrorCode.INVALID_REQUIRED_ACKS)
    ids = set()
    for _, each in rows:
        records = each["records"]
        if records is None or len(records) < _HEADER_BYTES or records[_MAGIC_AT] != 2:
            continue
        if _attributes(records) & _TRANSACTIONAL:
            ids.add(bytes(records[43:51]))
    if ids and call.body["transactional_id"] is None:
        return KafkaError(ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
    if len(ids) > 1:
        return KafkaError(ErrorCode.INVALID_PRODUCER_ID_MAPPING)
    return None


def _attributes(records: memoryview) -> int:
    number: int = _ATTRIBUTES.unpack_from(records, _ATTRIBUTES_AT)[0]
    return number


def _append(
    call: Call, name: str, each: dict[str, Any], row: dict[str, Any], produced: _Produced
) -> None:
    store = call.broker.store
    if name in INTERNAL_TOPICS and call.client_id != ADMIN_CLIENT:
        raise KafkaError(ErrorCode.INVALID_TOPIC_EXCEPTION, f"{name} is written by the server only")
    topic = store.get(name)
    if topic is None:
        raise UnknownTopicError(name)
    if each["index"] not in topic.partition_numbers:
        raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    records = each["records"]
    _check_batch(records, call.version)
    partition = topic[each["index"]]
    if _attributes(records) & _TRANSACTIONAL:
        _check_producer(call, records)
    else:
        row["log_start_offset"] = partition.start_offset
    try:
        appended = partition.parts.appender.append_batch(
            records, durability="os", wait=call.may_wait
        )
    except BlockingIOError:
        call.wait()
        raise
    row["base_offset"] = appended.offsets.start
    row["log_append_time_ms"] = appended.timestamp
    row["log_start_offset"] = partition.start_offset
    if store.durability == "fsync":
        produced.appended.append((partition, appended.offsets, row))


def _check_producer(call: Call, records: memoryview) -> None:
    """Refuse a batch whose producer id is not the one of the transactional id."""
    from logstore.coordinators.transaction_coordinator import Transactions

    known = Transactions.of(call.broker.store).producer_id_of(call.body["transactional_id"])
    if known != int.from_bytes(records[43:51], "big", signed=True):
        raise KafkaError(ErrorCode.INVALID_PRODUCER_ID_MAPPING)


def _check_batch(records: memoryview | None, version: int) -> None:
    """Refuse what is not one batch of format 2; the engine checks the rest."""
    if records is None or len(records) < _HEADER_BYTES:
        raise KafkaError(ErrorCode.INVALID_RECORD, "a produce request has one batch a partition")
    if records[_MAGIC_AT] in (0, 1):
        raise KafkaError(ErrorCode.INVALID_RECORD, "message formats 0 and 1 are not taken")
    if records[_MAGIC_AT] != 2:
        raise KafkaError(ErrorCode.CORRUPT_MESSAGE, f"message format {records[_MAGIC_AT]}")
    (length,) = _LENGTH.unpack_from(records, _LENGTH_AT)
    if length + 12 != len(records):
        raise KafkaError(ErrorCode.INVALID_RECORD, "a produce request has one batch a partition")
    if version < 7 and _attributes(records) & _CODEC == _ZSTD:
        raise KafkaError(ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, "zstd needs Produce version 7")


def _refuse(row: dict[str, Any], error: BaseException, version: int = 11) -> None:
    if isinstance(error, IndexError):
        error = KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    code = error_code(error)
    if code is ErrorCode.UNKNOWN_SERVER_ERROR:
        log.error("a batch could not be appended", exc_info=error)
    if isinstance(error, ConcurrentTransactionsError):
        # The client tries again, without asking for metadata first.
        code = ErrorCode.NOT_ENOUGH_REPLICAS
    elif isinstance(error, ReadOnlyError):
        code = ErrorCode.KAFKA_STORAGE_ERROR
    elif isinstance(error, TransactionStateError) and version >= 11:
        code = ErrorCode.TRANSACTION_ABORTABLE
    row.update(
        error_code=code, base_offset=-1, log_append_time_ms=-1, error_message=error_message(error),
    )  # fmt: skip
    if code in _WITHOUT_START:
        row["log_start_offset"] = -1
