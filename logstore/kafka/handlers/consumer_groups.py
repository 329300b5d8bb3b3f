"""The APIs of the consumer protocol (KIP-848): ConsumerGroupHeartbeat, ConsumerGroupDescribe.

A member of such a group sends heartbeats only.  The coordinator assigns the partitions; see
`logstore.coordinators.consumer_group.machine`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from logstore.coordinators.consumer_group.heartbeats import ConsumerGroups
from logstore.coordinators.consumer_group.machine import (
    ConsumerGroupMachine,
    Heartbeat,
    HeartbeatReply,
)
from logstore.coordinators.consumer_group.records import TopicIdPartition
from logstore.errors import CoordinatorError, LogStoreError, RebalanceError
from logstore.kafka.calls import Call, Pending, answer_when
from logstore.kafka.handlers.groups import COMMIT_SECONDS, coordinator_of, group_error
from logstore.kafka.protocol.errors import ErrorCode, KafkaError, error_message

__all__ = ["consumer_group_describe", "consumer_group_heartbeat"]

CONSUMER_MEMBER = 1  # the type of a member of this protocol; 0 is a classic one


def consumer_group_heartbeat(call: Call) -> dict[str, Any] | Pending:
    """Renew the session of a member, take its changes, and answer with its assignment."""
    body = call.body
    try:
        _check(body, call.version)
        beaten = ConsumerGroups(coordinator_of(call)).heartbeat_later(
            body["group_id"],
            Heartbeat(
                member_id=body["member_id"] or str(uuid.uuid4()),
                epoch=body["member_epoch"],
                instance_id=body["instance_id"],
                rack_id=body["rack_id"],
                rebalance_timeout_ms=body["rebalance_timeout_ms"],
                topics=_tuple(body["subscribed_topic_names"]),
                regex=body["subscribed_topic_regex"],
                assignor=body["server_assignor"],
                owned=_owned(body["topic_partitions"]),
                client_id=call.client_id,
                client_host=f"/{call.connection.peer[0]}",
            ),
        )
    except (KafkaError, RebalanceError, LogStoreError, OSError) as error:
        return _beaten(error)
    return answer_when(call, beaten, _beaten, COMMIT_SECONDS)


def _beaten(reply: HeartbeatReply | BaseException) -> dict[str, Any]:
    if isinstance(reply, BaseException):
        return {"error_code": group_error(reply), "error_message": error_message(reply)}
    return {
        "member_id": reply.member_id,
        "member_epoch": reply.epoch,
        "heartbeat_interval_ms": reply.interval_ms,
        "assignment": None if reply.assignment is None else _rows(reply.assignment),
    }


def _check(body: dict[str, Any], version: int) -> None:
    """Raise KafkaError if a field of a heartbeat is missing."""
    epoch = body["member_epoch"]
    for name in ("group_id", "instance_id", "rack_id"):
        if body[name] == "":
            raise _invalid(f"{name} must not be empty")
    if not body["member_id"] and (version >= 1 or epoch != 0):
        raise _invalid("member_id must not be empty")
    if epoch == -2 and body["instance_id"] is None:
        raise _invalid("instance_id must be given with member epoch -2")
    if epoch < -2:
        raise _invalid(f"member epoch {epoch} has no meaning")
    if epoch == 0:
        if body["rebalance_timeout_ms"] == -1:
            raise _invalid("rebalance_timeout_ms must be given with a join")
        if body["topic_partitions"] is None or body["topic_partitions"]:
            raise _invalid("topic_partitions must be empty with a join")
        if body["subscribed_topic_names"] is None and body["subscribed_topic_regex"] is None:
            raise _invalid("a join subscribes to topics, by names or by a regular expression")


def _invalid(text: str) -> KafkaError:
    return KafkaError(ErrorCode.INVALID_REQUEST, text)


def _tuple(names: list[str] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(names)


def _owned(rows: list[dict[str, Any]] | None) -> frozenset[TopicIdPartition] | None:
    if rows is None:
        return None
    return frozenset(
        (uuid.UUID(bytes=bytes(row["topic_id"])), number)
        for row in rows
        for number in row["partitions"]
    )


def _rows(partitions: Iterable[TopicIdPartition]) -> dict[str, Any]:
    found: dict[bytes, list[int]] = {}
    for topic_id, number in sorted(partitions):
        found.setdefault(topic_id.bytes, []).append(number)
    rows = [{"topic_id": topic_id, "partitions": numbers} for topic_id, numbers in found.items()]
    return {"topic_partitions": rows}


def consumer_group_describe(call: Call) -> dict[str, Any]:
    """Answer with the epochs, the members and the assignments of groups."""
    return {"groups": [_described(call, name) for name in call.body["group_ids"]]}


def _described(call: Call, name: str) -> dict[str, Any]:
    groups = coordinator_of(call)
    row: dict[str, Any] = {"group_id": name}
    if not name:
        return row | {"error_code": ErrorCode.INVALID_GROUP_ID}
    missing = row | {"error_code": ErrorCode.GROUP_ID_NOT_FOUND}
    try:
        known = groups.knows(name)
    except CoordinatorError as error:
        return row | {"error_code": group_error(error), "error_message": error_message(error)}
    if not known:
        return missing | {"error_message": f"Group {name} not found."}
    with groups.locked_room(name) as room:
        machine = room.consumer
        if machine is None:
            return missing | {"error_message": f"Group {name} is not a consumer group."}
        return row | {
            "group_state": machine.state_name,
            "group_epoch": machine.epoch,
            "assignment_epoch": machine.target_epoch,
            "assignor_name": machine.assignor,
            "members": [_member(machine, member_id) for member_id in machine.members],
        }


def _member(machine: ConsumerGroupMachine, member_id: str) -> dict[str, Any]:
    member, current = machine.members[member_id], machine.current(member_id)
    return {
        "member_id": member_id,
        "instance_id": member.instance_id,
        "rack_id": member.rack_id,
        "member_epoch": current.epoch,
        "client_id": member.client_id,
        "client_host": member.client_host,
        "subscribed_topic_names": list(member.topics),
        "subscribed_topic_regex": member.regex,
        "assignment": _named_rows(machine, (*current.assigned, *current.revoking)),
        "target_assignment": _named_rows(machine, machine.target(member_id)),
        "member_type": CONSUMER_MEMBER,
    }


def _named_rows(
    machine: ConsumerGroupMachine, partitions: Iterable[TopicIdPartition]
) -> dict[str, Any]:
    found: dict[str, list[int]] = {}
    for topic, number in machine.named(partitions):
        found.setdefault(topic, []).append(number)
    return {
        "topic_partitions": [
            {"topic_id": machine.topics[topic].id.bytes, "topic_name": topic, "partitions": numbers}
            for topic, numbers in found.items()
        ]
    }
