"""OffsetCommit, OffsetFetch, OffsetDelete: the committed offsets of groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from logstore.config import INT64_MAX
from logstore.coordinators.consumer_group.heartbeats import ConsumerGroups
from logstore.coordinators.group_coordinator import GroupCoordinator
from logstore.coordinators.offset_records import CommittedOffset, TopicPartition
from logstore.coordinators.quorum.outcome import Outcome
from logstore.errors import CoordinatorError, LogStoreError, RebalanceError
from logstore.kafka.calls import Call, Pending, answer_when
from logstore.kafka.handlers.groups import COMMIT_SECONDS, code_of, coordinator_of, group_error
from logstore.kafka.protocol.errors import ErrorCode

__all__ = ["checked_offsets", "fill", "offset_commit", "offset_delete", "offset_fetch"]


def checked_offsets(
    call: Call, topics: list[dict[str, Any]], retention_ms: int = -1
) -> tuple[dict[TopicPartition, CommittedOffset], list[dict[str, Any]]]:
    """Return the offsets of a request that can be committed, and the rows of the answer.

    A row of an offset that cannot be committed has its error; the others have none yet.
    """
    limit = call.broker.config.offset_metadata_max_bytes
    offsets: dict[TopicPartition, CommittedOffset] = {}
    expires = -1
    if retention_ms >= 0:
        expires = min(call.broker.clock.time_ms() + retention_ms, INT64_MAX)
    answer = []
    for topic in topics:
        name = topic["name"]  # None: the id of no topic
        known = () if name is None else call.broker.topology.numbers(name)
        missing = (
            ErrorCode.UNKNOWN_TOPIC_ID if name is None else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        )
        rows = []
        for each in topic["partitions"]:
            row: dict[str, Any] = {"partition_index": each["partition_index"]}
            rows.append(row)
            metadata = each["committed_metadata"] or ""
            if each["partition_index"] not in known:
                row["error_code"] = missing
            elif len(metadata.encode()) > limit:
                row["error_code"] = ErrorCode.OFFSET_METADATA_TOO_LARGE
            else:
                offsets[TopicPartition(name, each["partition_index"])] = CommittedOffset(
                    each["committed_offset"],
                    leader_epoch=each["committed_leader_epoch"],
                    metadata=metadata,
                    expires=expires,
                )
        answer.append({"name": name, "topic_id": topic.get("topic_id"), "partitions": rows})
    return offsets, answer


def _named(call: Call, topics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the topics of a request with their names; None is the name of an unknown id."""
    if call.version < 10:
        return topics
    return [each | {"name": call.broker.topic_name(each["topic_id"])} for each in topics]


def fill(answer: list[dict[str, Any]], code: ErrorCode) -> list[dict[str, Any]]:
    """Give the rows without an error this one."""
    for topic in answer:
        for row in topic["partitions"]:
            row.setdefault("error_code", code)
    return answer


def offset_commit(call: Call) -> dict[str, Any] | Pending:
    """Commit offsets of a group."""
    body = call.body
    retention = body["retention_time_ms"]
    offsets, answer = checked_offsets(call, _named(call, body["topics"]), retention)
    group = body["group_id"]
    generation = body["generation_id_or_member_epoch"]
    if not group:
        return {"topics": fill(answer, ErrorCode.INVALID_GROUP_ID)}
    groups = coordinator_of(call)
    if generation >= 0 and not groups.knows(group):
        missing = (
            ErrorCode.GROUP_ID_NOT_FOUND if call.version >= 9 else ErrorCode.ILLEGAL_GENERATION
        )
        return {"topics": fill(answer, missing)}
    if call.version < 9 and _is_consumer_member(groups, group, body["member_id"]):
        return {"topics": fill(answer, ErrorCode.UNSUPPORTED_VERSION)}
    if not offsets:
        return {"topics": fill(answer, ErrorCode.NONE)}
    try:
        committed = groups.commit_later(
            group,
            offsets,
            member_id=body["member_id"],
            generation=generation,
            instance_id=body["group_instance_id"],
        )
    except (RebalanceError, LogStoreError, OSError) as error:
        return {"topics": fill(answer, group_error(error))}
    return answer_when(
        call, committed, lambda end: {"topics": fill(answer, code_of(end))}, COMMIT_SECONDS
    )


def _is_consumer_member(groups: GroupCoordinator, group: str, member_id: str) -> bool:
    """Return whether this is a member of the consumer protocol, which commits by version 9."""
    if not member_id or not groups.knows(group):
        return False
    with groups.locked_room(group) as room:
        return room.consumer is not None and member_id in room.consumer.members


def offset_fetch(call: Call) -> dict[str, Any]:
    """Answer with committed offsets."""
    body = call.body
    if call.version >= 8:
        groups = []
        for each in body["groups"]:
            topics: list[dict[str, Any]] = []
            code = _member_error(call, each)
            if code is ErrorCode.NONE:
                topics, code = _fetched(call, each["group_id"], each["topics"])
            groups.append({"group_id": each["group_id"], "topics": topics, "error_code": code})
        return {"groups": groups}
    topics, code = _fetched(call, body["group_id"], body["topics"])
    return {"topics": topics, "error_code": code}


def _member_error(call: Call, asked: dict[str, Any]) -> ErrorCode:
    if call.version < 9:
        return ErrorCode.NONE
    groups = ConsumerGroups(coordinator_of(call))
    try:
        groups.check_member(asked["group_id"], asked["member_id"], asked["member_epoch"])
    except (RebalanceError, CoordinatorError) as error:
        return group_error(error)
    return ErrorCode.NONE


def _fetched(
    call: Call, group: str, asked: list[dict[str, Any]] | None
) -> tuple[list[dict[str, Any]], ErrorCode]:
    book = coordinator_of(call).book
    try:
        committed = book.committed(group)
    except CoordinatorError as error:
        return [], group_error(error)
    pending = book.pending(group) if call.body["require_stable"] else set()
    if asked is None:
        names: dict[str, list[int]] = {}
        for tp in sorted(committed):
            names.setdefault(tp.topic, []).append(tp.partition)
        asked = [{"name": name, "partition_indexes": rows} for name, rows in names.items()]
        if call.version >= 10:
            asked = list(_with_ids(call, asked))
    else:
        asked = _named(call, asked)
    return [
        {
            "name": topic["name"],
            "topic_id": topic.get("topic_id"),
            "partitions": [
                _row(topic["name"], number, committed, pending)
                for number in topic["partition_indexes"]
            ],
        }
        for topic in asked
    ], ErrorCode.NONE


def _with_ids(call: Call, topics: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the topics that exist, with their ids."""
    for each in topics:
        topic_id = call.broker.topology.topic_id(each["name"])
        if topic_id is not None:
            yield each | {"topic_id": topic_id}


def _row(
    topic: str | None,
    number: int,
    committed: dict[TopicPartition, CommittedOffset],
    pending: set[TopicPartition],
) -> dict[str, Any]:
    row: dict[str, Any] = {"partition_index": number, "committed_offset": -1, "metadata": ""}
    if topic is None:
        row["error_code"] = ErrorCode.UNKNOWN_TOPIC_ID
        return row
    tp = TopicPartition(topic, number)
    found = committed.get(tp)
    if tp in pending:
        row["error_code"] = ErrorCode.UNSTABLE_OFFSET_COMMIT
    elif found is not None:
        row["committed_offset"] = found.offset
        row["committed_leader_epoch"] = found.leader_epoch
        row["metadata"] = found.metadata
    return row


def offset_delete(call: Call) -> dict[str, Any] | Pending:
    """Forget committed offsets; those of topics that members read stay."""
    body = call.body
    group = body["group_id"]
    groups = coordinator_of(call)
    if not group:
        return {"error_code": ErrorCode.INVALID_GROUP_ID}
    if not groups.knows(group):
        return {"error_code": ErrorCode.GROUP_ID_NOT_FOUND}
    with groups.locked_room(group) as room:
        read = room.subscribed()
    if read is None:
        return {"error_code": ErrorCode.NON_EMPTY_GROUP}
    rows_of: dict[str, dict[int, ErrorCode]] = {}
    begun: list[tuple[str, list[int], Outcome[range]]] = []
    for topic in body["topics"]:
        declared = call.broker.topology.numbers(topic["name"])
        rows: dict[int, ErrorCode] = {
            each["partition_index"]: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            for each in topic["partitions"]
        }
        rows_of[topic["name"]] = rows
        there = [number for number in rows if number in declared]
        if topic["name"] in read:
            rows |= dict.fromkeys(there, ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC)
        elif there:
            gone = [(topic["name"], number) for number in there]
            try:
                begun.append((topic["name"], there, groups.delete_offsets(group, gone)))
            except (RebalanceError, LogStoreError, OSError) as error:
                rows |= dict.fromkeys(there, group_error(error))

    def answer(ends: list[range | BaseException] | BaseException) -> dict[str, Any]:
        results = [ends] * len(begun) if isinstance(ends, BaseException) else ends
        for (name, there, _), end in zip(begun, results, strict=True):
            rows_of[name] |= dict.fromkeys(there, code_of(end))
        topics = [
            {
                "name": name,
                "partitions": [
                    {"partition_index": number, "error_code": code} for number, code in rows.items()
                ],
            }
            for name, rows in rows_of.items()
        ]
        return {"topics": topics}

    deleted = Outcome.all_of([outcome for *_, outcome in begun])
    return answer_when(call, deleted, answer, COMMIT_SECONDS)
