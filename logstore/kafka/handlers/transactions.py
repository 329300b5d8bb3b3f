"""The APIs of transactions.

The coordinator is the store's: producers of this process and clients of the listener fence each
other by transactional id.

The version of a request tells which flow a client uses.  EndTxn 5, TxnOffsetCommit 5 and Produce 12
are transaction version 2 (KIP-890): the partitions are added by the requests that write to them,
and each transaction has its own epoch.  With older versions, a client adds partitions itself and
keeps its epoch from one transaction to the next.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from logstore.config import ConfigError
from logstore.coordinators.internal_topics import CONSUMER_OFFSETS, INTERNAL_TOPICS
from logstore.coordinators.quorum.outcome import Outcome
from logstore.coordinators.transaction_coordinator import Transactions
from logstore.coordinators.transaction_state import TransactionMetadata
from logstore.errors import (
    CoordinatorError,
    FencedError,
    InvalidNameError,
    LogStoreError,
    NotCoordinatorError,
    TransactionAbortedError,
)
from logstore.kafka.calls import Call, Pending, answer_when
from logstore.kafka.handlers.group_offsets import checked_offsets, fill
from logstore.kafka.handlers.groups import coordinator_of, group_error
from logstore.kafka.handlers.offsets import partition_of
from logstore.kafka.protocol.errors import ErrorCode, KafkaError, error_code, error_message
from logstore.partition.partition import Partition
from logstore.store.topic import check_topic_name

__all__ = [
    "add_offsets_to_txn",
    "add_partitions_to_txn",
    "describe_producers",
    "describe_transactions",
    "end_txn",
    "enlist",
    "init_producer_id",
    "list_transactions",
    "txn_offset_commit",
    "write_txn_markers",
]

STATES = (
    *("Empty", "Ongoing", "PrepareCommit", "PrepareAbort", "CompleteCommit", "CompleteAbort"),
    *("Dead", "PrepareEpochFence"),
)
EXPECTED = (KafkaError, LogStoreError, OSError)
# How long a request waits until other nodes have committed its records.  Kafka's request.timeout.ms
# is the same.
ANSWER_SECONDS = 30.0


def _transactions(call: Call) -> Transactions:
    return Transactions.of(call.broker.store)


def _fenced_code(call: Call, since: int) -> ErrorCode:
    """PRODUCER_FENCED is known to clients from a version on; before, INVALID_PRODUCER_EPOCH is."""
    if call.version >= since:
        return ErrorCode.PRODUCER_FENCED
    return ErrorCode.INVALID_PRODUCER_EPOCH


def _code(call: Call, error: BaseException, since: int) -> ErrorCode:
    """Return the code for what the coordinator refused."""
    if isinstance(error, FencedError | TransactionAbortedError):
        return _fenced_code(call, since)
    return group_error(error) if not isinstance(error, KafkaError) else error.code


def _check_id(
    call: Call, transactional_id: str, producer_id: int, *, or_previous: bool = False
) -> None:
    """Refuse an id that is not known, or that belongs to another producer id.

    `or_previous`: the producer id before is allowed, too: its epochs may have run out.
    """
    known = _transactions(call).state_of(transactional_id)
    if known is None or (
        producer_id != known.producer_id
        and not (or_previous and producer_id == known.previous_producer_id >= 0)
    ):
        raise KafkaError(ErrorCode.INVALID_PRODUCER_ID_MAPPING)


def enlist(
    call: Call,
    transactional_id: str,
    producer: tuple[int, int],
    partitions: Iterable[tuple[str, int]],
) -> None:
    """Add partitions to a transaction of version 2, before its records are appended there."""
    if not transactional_id:
        raise KafkaError(ErrorCode.INVALID_REQUEST)
    _check_id(call, transactional_id, producer[0])
    _transactions(call).add_partitions(transactional_id, producer, partitions, client_version=2)


# ---- producers ----


def init_producer_id(call: Call) -> dict[str, Any] | Pending:
    """Give a producer its id and epoch; fence the one that had the transactional id before."""
    body = call.body
    refused = {"producer_id": -1, "producer_epoch": -1}
    name = body["transactional_id"]
    given = body["producer_id"], body["producer_epoch"]
    if name == "" or (given[0] == -1) != (given[1] == -1):
        return refused | {"error_code": ErrorCode.INVALID_REQUEST}
    if name is None:
        return {"producer_id": call.broker.take_producer_id(), "producer_epoch": 0}
    timeout = body["transaction_timeout_ms"]
    if not 0 < timeout <= call.broker.config.transaction_max_timeout_ms:
        return refused | {"error_code": ErrorCode.INVALID_TRANSACTION_TIMEOUT}

    def answer(identity: tuple[int, int] | BaseException) -> dict[str, Any]:
        if isinstance(identity, InvalidNameError):
            return refused | {"error_code": ErrorCode.INVALID_REQUEST}
        if isinstance(identity, ConfigError):
            return refused | {"error_code": ErrorCode.INVALID_TRANSACTION_TIMEOUT}
        if isinstance(identity, BaseException):
            return refused | {"error_code": _code(call, identity, 4)}
        return {"producer_id": identity[0], "producer_epoch": identity[1]}

    begun = _transactions(call).init_producer_later(
        name, timeout, expected=None if given[0] == -1 else given, in_process=False
    )
    return answer_when(call, begun, answer, ANSWER_SECONDS)


# ---- transactions ----


def add_partitions_to_txn(call: Call) -> dict[str, Any] | Pending:
    """Add partitions to a transaction, all or none."""
    body = call.body
    name = body["v3_and_below_transactional_id"]
    producer = body["v3_and_below_producer_id"], body["v3_and_below_producer_epoch"]
    topics = body["v3_and_below_topics"]
    rows = {
        (topic["name"], number): ErrorCode.NONE
        for topic in topics
        for number in topic["partitions"]
    }
    for topic, number in rows:
        if topic in INTERNAL_TOPICS:
            # Only the coordinators add these: the end of a transaction writes markers into them.
            rows[topic, number] = ErrorCode.TOPIC_AUTHORIZATION_FAILED
        elif number not in call.broker.topology.numbers(topic):
            rows[topic, number] = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    if any(rows.values()):
        rows = {each: code or ErrorCode.OPERATION_NOT_ATTEMPTED for each, code in rows.items()}
        return _added(topics, rows)

    def answer(end: object) -> dict[str, Any]:
        if isinstance(end, BaseException):
            return _added(topics, dict.fromkeys(rows, _code(call, end, 2)))
        return _added(topics, rows)

    return answer_when(call, _add(call, name, producer, rows), answer, ANSWER_SECONDS)


def _add(
    call: Call, name: str, producer: tuple[int, int], partitions: Iterable[tuple[str, int]]
) -> Outcome[TransactionMetadata | None]:
    """Add partitions to a transaction for a client that keeps its epoch."""
    try:
        if not name:
            raise KafkaError(ErrorCode.INVALID_REQUEST)
        _check_id(call, name, producer[0])
        return _transactions(call).add_partitions_later(
            name, producer, partitions, client_version=0
        )
    except EXPECTED as error:
        return Outcome.failed(error)


def _added(topics: list[dict[str, Any]], rows: dict[tuple[str, int], ErrorCode]) -> dict[str, Any]:
    return {
        "results_by_topic_v3_and_below": [
            {
                "name": topic["name"],
                "results_by_partition": [
                    {
                        "partition_index": number,
                        "partition_error_code": rows[topic["name"], number],
                    }
                    for number in topic["partitions"]
                ],
            }
            for topic in topics
        ]
    }


def add_offsets_to_txn(call: Call) -> dict[str, Any] | Pending:
    """Add the partition that keeps a group's offsets to a transaction."""
    body = call.body
    if not body["group_id"]:
        return {"error_code": ErrorCode.INVALID_GROUP_ID}
    number = coordinator_of(call).book.partition_of(body["group_id"])
    producer = body["producer_id"], body["producer_epoch"]
    added = _add(call, body["transactional_id"], producer, [(CONSUMER_OFFSETS, number)])

    def answer(end: object) -> dict[str, Any]:
        return {"error_code": _code(call, end, 2)} if isinstance(end, BaseException) else {}

    return answer_when(call, added, answer, ANSWER_SECONDS)


def txn_offset_commit(call: Call) -> dict[str, Any] | Pending:
    """Commit offsets of a group as a part of a transaction.

    If another node coordinates the transaction, its client has added the partition there before.
    """
    body = call.body
    offsets, answer = checked_offsets(call, body["topics"])
    group, producer = body["group_id"], (body["producer_id"], body["producer_epoch"])
    if not group:
        return {"topics": fill(answer, ErrorCode.INVALID_GROUP_ID)}
    groups = coordinator_of(call)

    def commit(_: object) -> Outcome[range]:
        _transactions(call).verify(*producer, place)
        if body["generation_id"] >= 0 and not groups.knows(group):
            raise KafkaError(ErrorCode.ILLEGAL_GENERATION)
        if not offsets:
            return Outcome.of(range(0))
        return groups.commit_later(
            group,
            offsets,
            producer=producer,
            member_id=body["member_id"],
            generation=body["generation_id"],
            instance_id=body["group_instance_id"],
        )

    enlisted: Outcome[TransactionMetadata | None] = Outcome.of(None)
    try:
        if not body["transactional_id"]:
            raise KafkaError(ErrorCode.INVALID_REQUEST)
        try:
            _check_id(call, body["transactional_id"], producer[0])
        except NotCoordinatorError:
            if call.version >= 5:
                raise
        place = (CONSUMER_OFFSETS, groups.book.partition_of(group))
        if offsets and call.version >= 5:
            enlisted = _transactions(call).add_partitions_later(
                body["transactional_id"], producer, [place], client_version=2
            )
    except EXPECTED as error:
        enlisted = Outcome.failed(error)
    return answer_when(
        call,
        enlisted.and_then(commit),
        lambda end: {"topics": fill(answer, _commit_code(call, end))},
        ANSWER_SECONDS,
    )


def _commit_code(call: Call, end: object) -> ErrorCode:
    """Return the code for the end of a commit in a transaction."""
    if not isinstance(end, BaseException):
        return ErrorCode.NONE
    if isinstance(end, FencedError | TransactionAbortedError):
        return ErrorCode.INVALID_PRODUCER_EPOCH
    code = group_error(end)
    if code is ErrorCode.INVALID_TXN_STATE and call.version >= 4:
        return ErrorCode.TRANSACTION_ABORTABLE
    return code


def end_txn(call: Call) -> dict[str, Any] | Pending:
    """Commit or abort; answered when the markers are in all partitions."""
    body = call.body
    if not body["transactional_id"]:
        return {"error_code": ErrorCode.INVALID_REQUEST}
    producer = body["producer_id"], body["producer_epoch"]
    new = call.version >= 5

    def answer(following: tuple[int, int] | BaseException) -> dict[str, Any]:
        if isinstance(following, BaseException):
            return {"error_code": _code(call, following, 2)}
        return {"producer_id": following[0], "producer_epoch": following[1]} if new else {}

    try:
        _check_id(call, body["transactional_id"], producer[0], or_previous=new)
    except EXPECTED as error:
        return answer(error)
    ended = _transactions(call).end_later(
        body["transactional_id"],
        producer,
        commit=body["committed"],
        client_version=2 if new else 0,
    )
    return answer_when(call, ended, answer, ANSWER_SECONDS)


def write_txn_markers(call: Call) -> dict[str, Any] | Pending:
    """End transactions in single partitions: for coordinators elsewhere, and for operators."""
    if call.broker.node is not None:
        from logstore.kafka.clustering.marking import write_markers

        return write_markers(call)
    markers = []
    for marker in call.body["markers"]:
        topics = []
        for topic in marker["topics"]:
            rows = []
            for number in topic["partition_indexes"]:
                code = ErrorCode.NONE
                try:
                    partition = partition_of(call, topic["name"], number)
                    if marker["transaction_version"] >= 2:
                        _check_marker(partition, marker)
                    partition.end_transaction(
                        marker["producer_id"],
                        marker["producer_epoch"],
                        commit=marker["transaction_result"],
                        coordinator_epoch=max(0, marker["coordinator_epoch"]),
                    )
                except FencedError:
                    code = _fenced_marker(partition, marker)
                except EXPECTED as error:
                    code = error_code(error)
                rows.append({"partition_index": number, "error_code": code})
            topics.append({"name": topic["name"], "partitions": rows})
        markers.append({"producer_id": marker["producer_id"], "topics": topics})
    return {"markers": markers}


def _fenced_marker(partition: Partition, marker: dict[str, Any]) -> ErrorCode:
    """Return the code of a marker that is too old: of its producer, or of its coordinator."""
    known = partition.parts.reader.known_producer(marker["producer_id"])
    if known is not None and known.epoch <= marker["producer_epoch"]:
        return ErrorCode.TRANSACTION_COORDINATOR_FENCED
    return ErrorCode.INVALID_PRODUCER_EPOCH


def _check_marker(partition: Partition, marker: dict[str, Any]) -> None:
    """Refuse a marker of transaction version 2 with the epoch of the transaction that is open."""
    known = partition.parts.reader.known_producer(marker["producer_id"])
    if (
        known is not None
        and known.transaction_start >= 0
        and known.epoch >= marker["producer_epoch"]
    ):
        raise KafkaError(ErrorCode.INVALID_PRODUCER_EPOCH)


# ---- administration ----


def describe_producers(call: Call) -> dict[str, Any]:
    """Answer with the producers that partitions remember."""
    topics = []
    for topic in call.body["topics"]:
        rows = []
        for number in topic["partition_indexes"]:
            row: dict[str, Any] = {"partition_index": number, "active_producers": []}
            rows.append(row)
            try:
                check_topic_name(topic["name"])
                row["active_producers"] = [
                    {
                        "producer_id": entry.producer_id,
                        "producer_epoch": entry.epoch,
                        "last_sequence": entry.last_sequence,
                        "last_timestamp": entry.timestamp,
                        "coordinator_epoch": entry.coordinator_epoch,
                        "current_txn_start_offset": entry.transaction_start,
                    }
                    for entry in partition_of(call, topic["name"], number).parts.reader.producers()
                ]
            except EXPECTED as error:
                row |= {"error_code": error_code(error), "error_message": error_message(error)}
        topics.append({"name": topic["name"], "partitions": rows})
    return {"topics": topics}


def describe_transactions(call: Call) -> dict[str, Any]:
    """Answer with the state of transactional ids."""
    known = {each.transactional_id: each for each in _transactions(call).list()}
    states = []
    for name in call.body["transactional_ids"]:
        row: dict[str, Any] = {"transactional_id": name}
        states.append(row)
        found = known.get(name)
        if not name:
            row["error_code"] = ErrorCode.INVALID_REQUEST
        elif found is None:
            row["error_code"] = ErrorCode.TRANSACTIONAL_ID_NOT_FOUND
            try:
                _transactions(call).state_of(name)
            except CoordinatorError as error:
                row["error_code"] = error_code(error)
        else:
            topics: dict[str, list[int]] = {}
            for topic, number in found.partitions:
                topics.setdefault(topic, []).append(number)
            row |= {
                "transaction_state": found.state,
                "transaction_timeout_ms": found.timeout_ms,
                "transaction_start_time_ms": found.start_ms,
                "producer_id": found.producer_id,
                "producer_epoch": found.producer_epoch,
                "topics": [
                    {"topic": topic, "partitions": numbers} for topic, numbers in topics.items()
                ],
            }
    return {"transaction_states": states}


def list_transactions(call: Call) -> dict[str, Any]:
    """Answer with the transactional ids, filtered."""
    body = call.body
    states, ids = set(body["state_filters"]), set(body["producer_id_filters"])
    pattern = body["transactional_id_pattern"]
    try:
        matches = re.compile(pattern).fullmatch if pattern else None
    except re.error:
        return {"error_code": ErrorCode.INVALID_REGULAR_EXPRESSION}
    now = call.broker.clock.time_ms()
    rows = []
    for each in _transactions(call).list():
        age = now - each.start_ms  # long for an id without a transaction, as Kafka has it
        if (
            (states and each.state not in states)
            or (ids and each.producer_id not in ids)
            or (body["duration_filter"] >= 0 and age <= body["duration_filter"])
            or (matches is not None and matches(each.transactional_id) is None)
        ):
            continue
        rows.append(
            {
                "transactional_id": each.transactional_id,
                "producer_id": each.producer_id,
                "transaction_state": each.state,
            }
        )
    return {
        "unknown_state_filters": sorted(states.difference(STATES)),
        "transaction_states": rows,
    }
