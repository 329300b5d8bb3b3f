"""The APIs of transactions.

The coordinator is the store's: producers of this process and clients of the listener fence each
other by transactional id.  The clients here keep their epoch from one transaction to the next
(client version below 2).
"""

from __future__ import annotations

import re
from typing import Any

from logstore.config import ConfigError
from logstore.coordinators.internal_topics import CONSUMER_OFFSETS
from logstore.coordinators.transaction_coordinator import Transactions
from logstore.errors import (
    FencedError,
    InvalidNameError,
    LogStoreError,
    RebalanceError,
    TransactionAbortedError,
    TransactionStateError,
)
from logstore.kafka.calls import Call
from logstore.kafka.errors import ErrorCode, KafkaError, error_code, error_message
from logstore.kafka.group_offsets import checked_offsets, fill
from logstore.kafka.groups import coordinator_of, group_error
from logstore.kafka.offsets import partition_of
from logstore.store.topic import check_topic_name

__all__ = [
    "add_offsets_to_txn",
    "add_partitions_to_txn",
    "describe_producers",
    "describe_transactions",
    "end_txn",
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


def _check_id(call: Call, transactional_id: str, producer_id: int) -> None:
    """Refuse an id that is not known, or that belongs to another producer id."""
    known = _transactions(call).producer_id_of(transactional_id)
    if known != producer_id:
        raise KafkaError(ErrorCode.INVALID_PRODUCER_ID_MAPPING)


# ---- producers ----


def init_producer_id(call: Call) -> dict[str, Any]:
    """Give a producer its id and epoch; fence the one that had the transactional id before."""
    body = call.body
    refused = {"producer_id": -1, "producer_epoch": -1}
    name = body["transactional_id"]
    if name is None:
        return {"producer_id": call.broker.take_producer_id(), "producer_epoch": 0}
    given = body["producer_id"], body["producer_epoch"]
    if not name or (given[0] == -1) != (given[1] == -1):
        return refused | {"error_code": ErrorCode.INVALID_REQUEST}
    timeout = body["transaction_timeout_ms"]
    if not 0 < timeout <= call.broker.config.transaction_max_timeout_ms:
        return refused | {"error_code": ErrorCode.INVALID_TRANSACTION_TIMEOUT}
    try:
        producer_id, epoch = _transactions(call).init_producer(
            name, timeout, expected=None if given[0] == -1 else given, client_version=0
        )
    except InvalidNameError:
        return refused | {"error_code": ErrorCode.INVALID_REQUEST}
    except ConfigError:
        return refused | {"error_code": ErrorCode.INVALID_TRANSACTION_TIMEOUT}
    except EXPECTED as error:
        return refused | {"error_code": _code(call, error, 4)}
    return {"producer_id": producer_id, "producer_epoch": epoch}


# ---- transactions ----


def add_partitions_to_txn(call: Call) -> dict[str, Any]:
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
        known = call.broker.store.get(topic)
        if known is None or number not in call.broker.declared_partitions(known):
            rows[topic, number] = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    if any(rows.values()):
        rows = {each: code or ErrorCode.OPERATION_NOT_ATTEMPTED for each, code in rows.items()}
    else:
        try:
            if not name:
                raise KafkaError(ErrorCode.INVALID_REQUEST)
            _check_id(call, name, producer[0])
            _transactions(call).add_partitions(name, producer, rows)
        except EXPECTED as error:
            rows = dict.fromkeys(rows, _code(call, error, 2))
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


def add_offsets_to_txn(call: Call) -> dict[str, Any]:
    """Add the partition that keeps a group's offsets to a transaction."""
    body = call.body
    if not body["group_id"]:
        return {"error_code": ErrorCode.INVALID_GROUP_ID}
    number = coordinator_of(call).book.partition_of(body["group_id"])
    if not body["transactional_id"]:
        return {"error_code": ErrorCode.INVALID_REQUEST}
    try:
        _check_id(call, body["transactional_id"], body["producer_id"])
        _transactions(call).add_partitions(
            body["transactional_id"],
            (body["producer_id"], body["producer_epoch"]),
            [(CONSUMER_OFFSETS, number)],
        )
    except EXPECTED as error:
        return {"error_code": _code(call, error, 2)}
    return {}


def txn_offset_commit(call: Call) -> dict[str, Any]:
    """Commit offsets of a group as a part of a transaction."""
    body = call.body
    offsets, answer = checked_offsets(call, body["topics"])
    group, producer = body["group_id"], (body["producer_id"], body["producer_epoch"])
    if not group:
        return {"topics": fill(answer, ErrorCode.INVALID_GROUP_ID)}
    groups = coordinator_of(call)
    code = ErrorCode.NONE
    try:
        if not body["transactional_id"]:
            raise KafkaError(ErrorCode.INVALID_REQUEST)
        _check_id(call, body["transactional_id"], producer[0])
        place = (CONSUMER_OFFSETS, groups.book.partition_of(group))
        _transactions(call).verify(*producer, place)
        if body["generation_id"] >= 0 and not groups.knows(group):
            raise KafkaError(ErrorCode.ILLEGAL_GENERATION)
        if offsets:
            groups.commit_in_transaction(
                group,
                offsets,
                producer_id=producer[0],
                producer_epoch=producer[1],
                member_id=body["member_id"],
                generation=body["generation_id"],
                instance_id=body["group_instance_id"],
            )
    except (FencedError, TransactionAbortedError):
        code = ErrorCode.INVALID_PRODUCER_EPOCH
    except TransactionStateError as error:
        code = error_code(error)
        if code is ErrorCode.INVALID_TXN_STATE and call.version >= 4:
            code = ErrorCode.TRANSACTION_ABORTABLE
    except (*EXPECTED, RebalanceError) as error:
        code = error.code if isinstance(error, KafkaError) else group_error(error)
    return {"topics": fill(answer, code)}


def end_txn(call: Call) -> dict[str, Any]:
    """Commit or abort; answered when the markers are in all partitions."""
    body = call.body
    if not body["transactional_id"]:
        return {"error_code": ErrorCode.INVALID_REQUEST}
    producer = body["producer_id"], body["producer_epoch"]
    try:
        _check_id(call, body["transactional_id"], producer[0])
        _transactions(call).end(body["transactional_id"], producer, commit=body["committed"])
    except EXPECTED as error:
        return {"error_code": _code(call, error, 2)}
    return {}


def write_txn_markers(call: Call) -> dict[str, Any]:
    """End transactions in single partitions: for an operator, after a coordinator was lost."""
    markers = []
    for marker in call.body["markers"]:
        topics = []
        for topic in marker["topics"]:
            rows = []
            for number in topic["partition_indexes"]:
                code = ErrorCode.NONE
                try:
                    partition_of(call, topic["name"], number).end_transaction(
                        marker["producer_id"],
                        marker["producer_epoch"],
                        commit=marker["transaction_result"],
                        coordinator_epoch=max(0, marker["coordinator_epoch"]),
                    )
                except EXPECTED as error:
                    code = error_code(error)
                rows.append({"partition_index": number, "error_code": code})
            topics.append({"name": topic["name"], "partitions": rows})
        markers.append({"producer_id": marker["producer_id"], "topics": topics})
    return {"markers": markers}


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
