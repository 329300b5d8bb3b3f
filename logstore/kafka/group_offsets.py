"""OffsetCommit, OffsetFetch, OffsetDelete: the committed offsets of groups."""

from __future__ import annotations

from typing import Any

from logstore.coordinators.offset_records import CommittedOffset, TopicPartition
from logstore.errors import LogStoreError, RebalanceError
from logstore.kafka.calls import Call
from logstore.kafka.errors import ErrorCode
from logstore.kafka.groups import coordinator_of, group_error

__all__ = ["checked_offsets", "fill", "offset_commit", "offset_delete", "offset_fetch"]


def checked_offsets(
    call: Call, topics: list[dict[str, Any]], retention_ms: int = -1
) -> tuple[dict[TopicPartition, CommittedOffset], list[dict[str, Any]]]:
    """Return the offsets of a request that can be committed, and the rows of the answer.

    A row of an offset that cannot be committed has its error; the others have none yet.
    """
    store, limit = call.broker.store, call.broker.config.offset_metadata_max_bytes
    offsets: dict[TopicPartition, CommittedOffset] = {}
    expires = -1 if retention_ms < 0 else call.broker.clock.time_ms() + retention_ms
    answer = []
    for topic in topics:
        known = store.get(topic["name"])
        rows = []
        for each in topic["partitions"]:
            row: dict[str, Any] = {"partition_index": each["partition_index"]}
            rows.append(row)
            metadata = each["committed_metadata"] or ""
            if known is None or each["partition_index"] not in call.broker.declared_partitions(
                known
            ):
                row["error_code"] = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            elif len(metadata.encode()) > limit:
                row["error_code"] = ErrorCode.OFFSET_METADATA_TOO_LARGE
            elif each["committed_offset"] < 0:
                row["error_code"] = ErrorCode.INVALID_REQUEST
            else:
                offsets[TopicPartition(topic["name"], each["partition_index"])] = CommittedOffset(
                    each["committed_offset"],
                    leader_epoch=each["committed_leader_epoch"],
                    metadata=metadata,
                    expires=expires,
                )
        answer.append({"name": topic["name"], "partitions": rows})
    return offsets, answer


def fill(answer: list[dict[str, Any]], code: ErrorCode) -> list[dict[str, Any]]:
    """Give the rows without an error this one."""
    for topic in answer:
        for row in topic["partitions"]:
            row.setdefault("error_code", code)
    return answer


def offset_commit(call: Call) -> dict[str, Any]:
    """Commit offsets of a group."""
    body = call.body
    retention = body["retention_time_ms"]
    offsets, answer = checked_offsets(call, body["topics"], retention)
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
    code = ErrorCode.NONE
    if offsets:
        try:
            groups.commit(
                group,
                offsets,
                member_id=body["member_id"],
                generation=generation,
                instance_id=body["group_instance_id"],
            )
        except (RebalanceError, LogStoreError, OSError) as error:
            code = group_error(error)
    return {"topics": fill(answer, code)}


def offset_fetch(call: Call) -> dict[str, Any]:
    """Answer with committed offsets."""
    body = call.body
    if call.version >= 8:
        groups = []
        for each in body["groups"]:
            topics, code = _fetched(call, each["group_id"], each["topics"])
            groups.append({"group_id": each["group_id"], "topics": topics, "error_code": code})
        return {"groups": groups}
    topics, code = _fetched(call, body["group_id"], body["topics"])
    return {"topics": topics, "error_code": code}


def _fetched(
    call: Call, group: str, asked: list[dict[str, Any]] | None
) -> tuple[list[dict[str, Any]], ErrorCode]:
    book = coordinator_of(call).book
    committed = book.committed(group)
    pending = book.pending(group) if call.body["require_stable"] else set()
    if asked is None:
        names: dict[str, list[int]] = {}
        for tp in sorted(committed):
            names.setdefault(tp.topic, []).append(tp.partition)
        asked = [{"name": name, "partition_indexes": rows} for name, rows in names.items()]
    return [
        {
            "name": topic["name"],
            "partitions": [
                _row(TopicPartition(topic["name"], number), committed, pending)
                for number in topic["partition_indexes"]
            ],
        }
        for topic in asked
    ], ErrorCode.NONE


def _row(
    tp: TopicPartition,
    committed: dict[TopicPartition, CommittedOffset],
    pending: set[TopicPartition],
) -> dict[str, Any]:
    found = committed.get(tp)
    row: dict[str, Any] = {"partition_index": tp.partition, "committed_offset": -1, "metadata": ""}
    if tp in pending:
        row["error_code"] = ErrorCode.UNSTABLE_OFFSET_COMMIT
    elif found is not None:
        row["committed_offset"] = found.offset
        row["committed_leader_epoch"] = found.leader_epoch
        row["metadata"] = found.metadata
    return row


def offset_delete(call: Call) -> dict[str, Any]:
    """Forget committed offsets; those of topics that members read stay."""
    body = call.body
    group = body["group_id"]
    groups = coordinator_of(call)
    if not group:
        return {"error_code": ErrorCode.INVALID_GROUP_ID}
    if not groups.knows(group):
        return {"error_code": ErrorCode.GROUP_ID_NOT_FOUND}
    with groups.locked(group) as machine:
        read = groups.subscribed(machine) if machine.members else set()
    if read is None:
        return {"error_code": ErrorCode.NON_EMPTY_GROUP}
    topics = []
    for topic in body["topics"]:
        known = call.broker.store.get(topic["name"])
        declared = () if known is None else call.broker.declared_partitions(known)
        rows: dict[int, ErrorCode] = {
            each["partition_index"]: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            for each in topic["partitions"]
        }
        there = [number for number in rows if number in declared]
        code = ErrorCode.NONE
        if topic["name"] in read:
            code = ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC
        elif there:
            try:
                groups.delete_offsets(group, [(topic["name"], number) for number in there])
            except (RebalanceError, LogStoreError, OSError) as error:
                code = group_error(error)
        rows |= dict.fromkeys(there, code)
        topics.append(
            {
                "name": topic["name"],
                "partitions": [
                    {"partition_index": number, "error_code": code} for number, code in rows.items()
                ],
            }
        )
    return {"topics": topics}
