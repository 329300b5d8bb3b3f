"""The APIs of consumer groups: join, sync, heartbeat, leave, describe, list, delete.

The groups are those of the store's GroupCoordinator: members of this process and clients of the
listener may be in one group.  A join and a sync are answered by the coordinator's callback, when
the group is ready.  A connection that is lost while its join waits does not leave the group: the
session time-out of the member does that, as with a broker.
"""

from __future__ import annotations

from typing import Any

from logstore.config import ConfigError
from logstore.coordinators.group_coordinator import GroupCoordinator
from logstore.coordinators.group_events import GroupState, JoinReply, SyncReply
from logstore.coordinators.quorum.outcome import Outcome
from logstore.errors import CoordinatorError, LogStoreError, RebalanceError
from logstore.kafka.calls import Call, Pending, answer_when
from logstore.kafka.protocol.errors import ErrorCode, KafkaError, error_code

__all__ = [
    "delete_groups",
    "describe_groups",
    "group_error",
    "heartbeat",
    "join_group",
    "leave_group",
    "list_groups",
    "sync_group",
]


# How long a request waits until other nodes have committed its records.  Kafka's
# offsets.commit.timeout.ms is the same.
COMMIT_SECONDS = 5.0


def coordinator_of(call: Call) -> GroupCoordinator:
    """Return the groups of the store, with the listener's settings."""
    return call.broker.groups()


def _code(name: str) -> ErrorCode:
    return ErrorCode[name] if name else ErrorCode.NONE


_OF_LOGS = {
    *(ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.POLICY_VIOLATION),
    ErrorCode.KAFKA_STORAGE_ERROR,
}


def group_error(error: BaseException) -> ErrorCode:
    """Return the code for an exception of the coordinator: a closed store has no coordinator.

    Neither has one on a full disk.  Clients try again then; other codes of a log end them.
    """
    if isinstance(error, ConfigError):
        return ErrorCode.INVALID_GROUP_ID
    code = error_code(error)
    return ErrorCode.COORDINATOR_NOT_AVAILABLE if code in _OF_LOGS else code


def code_of(result: object) -> ErrorCode:
    """Return the code for the result of a coordinator: its exception, or a value."""
    return group_error(result) if isinstance(result, BaseException) else ErrorCode.NONE


# ---- members ----


def join_group(call: Call) -> dict[str, Any] | Pending:
    """Join a group; answered when all members have joined."""
    body, config = call.body, call.broker.config
    refused = {"member_id": body["member_id"], "protocol_name": None if call.version >= 7 else ""}
    timeout = body["session_timeout_ms"]
    if not body["group_id"]:
        return refused | {"error_code": ErrorCode.INVALID_GROUP_ID}
    if not config.group_min_session_timeout_ms <= timeout <= config.group_max_session_timeout_ms:
        return refused | {"error_code": ErrorCode.INVALID_SESSION_TIMEOUT}
    if not body["protocols"] or not body["protocol_type"]:
        return refused | {"error_code": ErrorCode.INCONSISTENT_GROUP_PROTOCOL}
    groups = coordinator_of(call)
    if body["member_id"] and not groups.knows(body["group_id"]):
        return refused | {"error_code": ErrorCode.UNKNOWN_MEMBER_ID}
    pending = Pending(call)
    rebalance = body["rebalance_timeout_ms"] if call.version >= 1 else timeout
    former = ""
    if body["group_instance_id"] is not None and groups.knows(body["group_id"]):
        with groups.locked(body["group_id"]) as machine:
            former = machine.members.static.get(body["group_instance_id"], "")

    def done(reply: JoinReply) -> None:
        pending.answer(_joined(call.version, body["protocol_type"], reply, former))

    groups.join(
        body["group_id"],
        done,
        member_id=body["member_id"],
        instance_id=body["group_instance_id"],
        client_id=call.client_id,
        client_host=f"/{call.connection.peer[0]}",
        session_timeout_ms=timeout,
        rebalance_timeout_ms=rebalance,
        protocol_type=body["protocol_type"],
        protocols=[(each["name"], each["metadata"]) for each in body["protocols"]],
        id_first=call.version >= 4,
        reason=body["reason"] or "",
    )
    return pending


def _joined(version: int, protocol_type: str, reply: JoinReply, former: str) -> dict[str, Any]:
    """Return the answer for a member; `former`: the id that its static instance had before.

    A static leader that comes back to a stable group must not assign.  Version 9 has a field for
    that.  Below it, the answer names the former id as the leader.
    """
    leads = reply.leader == reply.member_id
    hidden = reply.skip_assignment and leads and version < 9
    return {
        "error_code": _code(reply.error),
        "generation_id": reply.generation,
        "protocol_type": None if reply.error else protocol_type,
        "protocol_name": (
            reply.protocol if reply.protocol is not None else None if version >= 7 else ""
        ),
        "leader": former if hidden else reply.leader,
        "skip_assignment": reply.skip_assignment and leads,
        "member_id": reply.member_id,
        "members": [
            {"member_id": member, "group_instance_id": instance, "metadata": metadata}
            for member, instance, metadata in (() if hidden else reply.members)
        ],
    }


def sync_group(call: Call) -> dict[str, Any] | Pending:
    """Bring or get the assignment of a generation."""
    body = call.body
    if call.version >= 5 and None in (body["protocol_type"], body["protocol_name"]):
        return {"error_code": ErrorCode.INCONSISTENT_GROUP_PROTOCOL}
    if not body["group_id"]:
        return {"error_code": ErrorCode.INVALID_GROUP_ID}
    groups = coordinator_of(call)
    if not groups.knows(body["group_id"]):
        return {"error_code": ErrorCode.UNKNOWN_MEMBER_ID}
    with groups.locked(body["group_id"]) as machine:
        protocol_type, protocol = machine.protocol_type, machine.protocol
        of_member = (
            not machine.members.check(body["member_id"], body["group_instance_id"])
            and machine.generation == body["generation_id"]
        )
    for given, known in (
        (body["protocol_type"], protocol_type), (body["protocol_name"], protocol),
    ):  # fmt: skip
        if of_member and given is not None and known is not None and given != known:
            return {"error_code": ErrorCode.INCONSISTENT_GROUP_PROTOCOL}
    pending = Pending(call)

    def done(reply: SyncReply) -> None:
        failed = bool(reply.error)
        pending.answer(
            {
                "error_code": _code(reply.error),
                "protocol_type": None if failed else protocol_type,
                "protocol_name": None if failed else reply.protocol or protocol,
                "assignment": reply.assignment,
            }
        )

    groups.sync(
        body["group_id"],
        done,
        member_id=body["member_id"],
        generation=body["generation_id"],
        instance_id=body["group_instance_id"],
        assignments=[(each["member_id"], each["assignment"]) for each in body["assignments"]],
    )
    return pending


def heartbeat(call: Call) -> dict[str, Any]:
    """Renew the session of a member."""
    body = call.body
    if not body["group_id"]:
        return {"error_code": ErrorCode.INVALID_GROUP_ID}
    groups = coordinator_of(call)
    if not groups.knows(body["group_id"]):
        return {"error_code": ErrorCode.UNKNOWN_MEMBER_ID}
    error = groups.heartbeat(
        body["group_id"],
        member_id=body["member_id"],
        generation=body["generation_id"],
        instance_id=body["group_instance_id"],
    )
    return {"error_code": _code(error)}


def leave_group(call: Call) -> dict[str, Any] | Pending:
    """Take members out of a group."""
    body = call.body
    if not body["group_id"]:
        return {"error_code": ErrorCode.INVALID_GROUP_ID}
    groups = coordinator_of(call)
    known = groups.knows(body["group_id"])

    def leave(member: str, instance: str | None, reason: str) -> Outcome[str]:
        if not known:
            return Outcome.of(ErrorCode.UNKNOWN_MEMBER_ID.name)
        return groups.leave_later(
            body["group_id"], member_id=member, instance_id=instance, reason=reason
        )

    def code(left: str | BaseException) -> ErrorCode:
        return group_error(left) if isinstance(left, BaseException) else _code(left)

    if call.version < 3:
        one = leave(body["member_id"], None, "")
        return answer_when(call, one, lambda left: {"error_code": code(left)}, COMMIT_SECONDS)
    all_left = Outcome.all_of(
        [
            leave(each["member_id"], each["group_instance_id"], each["reason"] or "")
            for each in body["members"]
        ]
    )

    def answer(left: list[str | BaseException] | BaseException) -> dict[str, Any]:
        results = [left] * len(body["members"]) if isinstance(left, BaseException) else left
        return {
            "members": [
                {
                    "member_id": each["member_id"],
                    "group_instance_id": each["group_instance_id"],
                    "error_code": code(result),
                }
                for each, result in zip(body["members"], results, strict=True)
            ]
        }

    return answer_when(call, all_left, answer, COMMIT_SECONDS)


# ---- administration ----


def describe_groups(call: Call) -> dict[str, Any]:
    """Answer with the state and the members of groups."""
    groups = coordinator_of(call)
    return {"groups": [_described(call, groups, name) for name in call.body["groups"]]}


def _described(call: Call, groups: GroupCoordinator, name: str) -> dict[str, Any]:
    row: dict[str, Any] = {"group_id": name}
    try:
        known = groups.knows(name)
    except CoordinatorError as error:
        return row | {"error_code": error_code(error)}
    if not known:
        row["group_state"] = "Dead"
        if call.version >= 6:
            row["error_code"] = ErrorCode.GROUP_ID_NOT_FOUND
            row["error_message"] = f"there is no group {name}"
        return row
    with groups.locked_room(name) as room:
        machine = room.machine
        if room.consumer is not None:
            row["group_state"] = "Dead"
            if call.version >= 6:
                row["error_code"] = ErrorCode.GROUP_ID_NOT_FOUND
                row["error_message"] = f"Group {name} is not a classic group."
            return row
        stable = machine.state is GroupState.STABLE
        protocol = machine.protocol if stable else None
        return row | {
            "group_state": str(machine.state),
            "protocol_type": machine.protocol_type or "",
            "protocol_data": protocol or "",
            "members": [
                {
                    "member_id": member.member_id,
                    "group_instance_id": member.instance_id,
                    "client_id": member.client_id,
                    "client_host": member.client_host,
                    "member_metadata": member.subscription(protocol) if stable else b"",
                    "member_assignment": member.assignment,
                }
                for member in machine.members.values()
            ],
        }


def list_groups(call: Call) -> dict[str, Any]:
    """Answer with the names and states of all groups."""
    groups = coordinator_of(call)
    states = {state.lower() for state in call.body["states_filter"]}
    types = {kind.lower() for kind in call.body["types_filter"]}
    rows = []
    for name in groups.group_ids():
        with groups.locked_room(name) as room:
            row = {
                "group_id": name,
                "protocol_type": room.protocol_type,
                "group_state": room.state_name,
                "group_type": room.group_type,
            }
        if states and row["group_state"].lower() not in states:
            continue
        if not types or row["group_type"] in types:
            rows.append(row)
    return {"groups": rows}


def delete_groups(call: Call) -> dict[str, Any] | Pending:
    """Delete groups without members, and their offsets."""
    groups = coordinator_of(call)
    names = list(dict.fromkeys(call.body["groups_names"]))

    def delete(name: str) -> Outcome[range]:
        try:
            if not groups.knows(name):
                raise KafkaError(ErrorCode.GROUP_ID_NOT_FOUND)
            return groups.delete_group(name)
        except (KafkaError, RebalanceError, LogStoreError, OSError) as error:
            return Outcome.failed(error)

    def answer(deleted: list[range | BaseException] | BaseException) -> dict[str, Any]:
        ends = [deleted] * len(names) if isinstance(deleted, BaseException) else deleted
        return {
            "results": [
                {"group_id": name, "error_code": code_of(end)}
                for name, end in zip(names, ends, strict=True)
            ]
        }

    return answer_when(call, Outcome.all_of([*map(delete, names)]), answer, COMMIT_SECONDS)
