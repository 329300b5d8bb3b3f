"""The APIs that make, change and delete topics, move their replicas, and describe their files."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from logstore.config import ConfigError
from logstore.coordinators.internal_topics import INTERNAL_TOPICS
from logstore.errors import ClosedError, LogStoreError, TopicExistsError, UnknownTopicError
from logstore.kafka.calls import Call, Pending
from logstore.kafka.clustering.topology import ZERO_ID
from logstore.kafka.handlers.offsets import partition_of
from logstore.kafka.handlers.topic_settings import described, taken
from logstore.kafka.protocol.errors import ErrorCode, KafkaError, error_code, error_message
from logstore.store.topic import check_topic_name

Key = tuple[str, int]  # topic and partition

__all__ = [
    "alter_partition_reassignments",
    "alter_replica_log_dirs",
    "create_partitions",
    "create_topics",
    "delete_records",
    "delete_topics",
    "describe_log_dirs",
    "elect_leaders",
    "list_partition_reassignments",
]

CLUSTER_METADATA = "__cluster_metadata"
PARTITIONS_IN_REQUEST = 10_000
LOOK_SECONDS = 0.02  # between two looks at what the replicas have done
EXPECTED = (KafkaError, LogStoreError, ConfigError, OSError)


def _refused(error: BaseException) -> dict[str, Any]:
    return {"error_code": error_code(error), "error_message": error_message(error)}


# ---- CreateTopics ----


def create_topics(call: Call) -> dict[str, Any]:
    """Make topics, each on its own."""
    asked = call.body["topics"]
    names = Counter(each["name"] for each in asked)
    in_all = sum(max(0, each["num_partitions"]) for each in asked)
    topics = []
    for each in {each["name"]: each for each in asked}.values():
        row: dict[str, Any] = {"name": each["name"], "error_message": None}
        topics.append(row)
        try:
            if names[each["name"]] > 1:
                raise KafkaError(ErrorCode.INVALID_REQUEST, "the topic is named twice")
            if in_all > PARTITIONS_IN_REQUEST:
                raise KafkaError(
                    ErrorCode.POLICY_VIOLATION,
                    f"{in_all} partitions in a request; at most {PARTITIONS_IN_REQUEST} are made",
                )
            row |= _create(call, each)
        except EXPECTED as error:
            row |= _refused(error) | {"num_partitions": -1, "replication_factor": -1}
    return {"topics": topics}


def _create(call: Call, asked: dict[str, Any]) -> dict[str, Any]:
    topology, name = call.broker.topology, asked["name"]
    if name == CLUSTER_METADATA:
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"{name} is a broker's own")
    if name in INTERNAL_TOPICS:
        raise KafkaError(ErrorCode.INVALID_TOPIC_EXCEPTION, f"{name} is made by the server")
    check_topic_name(name, topology.names())
    if topology.topic_id(name) is not None:
        raise TopicExistsError(name)
    settings = taken({each["name"]: each["value"] for each in asked["configs"]})
    count, factor, assignment = _wanted(call, asked)
    made = topology.create(
        name,
        count,
        factor,
        assignment,
        settings,
        timeout=_timeout(call),
        validate_only=call.body["validate_only"],
    )
    return {
        "topic_id": made.topic_id,
        "num_partitions": made.partitions,
        "replication_factor": made.replication_factor,
        "configs": [
            {key: row[key] for key in ("name", "value", "read_only", "config_source")}
            for row in described(made.config, settings)
        ],
    }


def _timeout(call: Call) -> float:
    """Return the seconds that a client waits for a change."""
    return max(0.1, int(call.body["timeout_ms"]) / 1000)


def _wanted(call: Call, asked: dict[str, Any]) -> tuple[int, int, dict[int, Sequence[int]] | None]:
    """Return partitions, replication factor and replicas of a topic that is to be made."""
    count, factor, assignments = (
        asked["num_partitions"], asked["replication_factor"], asked["assignments"]
    )  # fmt: skip
    if assignments:
        if count != -1 or factor != -1:
            raise KafkaError(
                ErrorCode.INVALID_REQUEST, "assignments exclude partitions and replication factor"
            )
        numbers = [each["partition_index"] for each in assignments]
        if sorted(numbers) != list(range(len(numbers))):
            raise KafkaError(
                ErrorCode.INVALID_REPLICA_ASSIGNMENT, "partitions are 0 and those after it"
            )
        given = {each["partition_index"]: each["broker_ids"] for each in assignments}
        return len(assignments), -1, given
    if count != -1 and count < 1:
        raise KafkaError(
            ErrorCode.INVALID_PARTITIONS, f"a topic has 1 partition or more, not {count}"
        )
    config = call.broker.config
    if factor > 1 and config.logstore_any_replication_factor:
        factor = -1
    return config.num_partitions if count == -1 else count, factor, None


# ---- DeleteTopics ----


def delete_topics(call: Call) -> dict[str, Any]:
    """Delete topics by name or, from version 6 on, by id."""
    asked = (
        call.body["topics"]
        if call.version >= 6
        else [{"name": name, "topic_id": ZERO_ID} for name in call.body["topic_names"]]
    )
    found = [_looked_up(call, each) for each in asked]
    times = Counter(found)
    rows: dict[object, dict[str, Any]] = {}
    for each, topic in zip(asked, found, strict=True):
        if topic in rows:  # named twice
            row = rows[topic]
            row["name"] = row["name"] or each["name"]
            row["topic_id"] = max(row["topic_id"], each["topic_id"])
            continue
        row = rows[topic] = {"name": each["name"], "topic_id": each["topic_id"]}
        try:
            if times[topic] > 1:
                raise KafkaError(ErrorCode.INVALID_REQUEST, "the topic is named twice")
            if not isinstance(topic, str):
                raise _not_found(each)
            row |= {"name": topic, "topic_id": call.broker.topology.topic_id(topic) or ZERO_ID}
            if topic in INTERNAL_TOPICS:
                raise KafkaError(
                    ErrorCode.INVALID_TOPIC_EXCEPTION, f"{topic} holds the server's own state"
                )
            if not call.broker.config.delete_topic_enable:
                raise KafkaError(
                    ErrorCode.TOPIC_DELETION_DISABLED
                    if call.version >= 3
                    else ErrorCode.INVALID_REQUEST
                )
            call.broker.topology.delete(topic, timeout=_timeout(call))
        except EXPECTED as error:
            row |= _refused(error)
    return {"responses": list(rows.values())}


def _looked_up(call: Call, asked: dict[str, Any]) -> object:
    """Return the topic that is named; its name and id if there is none, or if both are given."""
    name, id_bytes = asked["name"], asked["topic_id"]
    topic = None
    if name is None and id_bytes != ZERO_ID:
        topic = call.broker.topic_name(id_bytes)
    elif id_bytes == ZERO_ID and call.broker.topology.topic_id(name) is not None:
        topic = name
    return (name, id_bytes) if topic is None else topic


def _not_found(asked: dict[str, Any]) -> Exception:
    by_id = asked["topic_id"] != ZERO_ID
    if by_id == (asked["name"] is not None):
        return KafkaError(ErrorCode.INVALID_REQUEST, "a topic is named by its name or by its id")
    return KafkaError(ErrorCode.UNKNOWN_TOPIC_ID) if by_id else UnknownTopicError(asked["name"])


# ---- CreatePartitions ----


def create_partitions(call: Call) -> dict[str, Any]:
    """Add partitions to topics."""
    names = Counter(each["name"] for each in call.body["topics"])
    results = []
    for each in {each["name"]: each for each in call.body["topics"]}.values():
        row: dict[str, Any] = {"name": each["name"]}
        results.append(row)
        try:
            if names[each["name"]] > 1:
                raise KafkaError(ErrorCode.INVALID_REQUEST, "the topic is named twice")
            _grow(call, each)
        except EXPECTED as error:
            row |= _refused(error)
    return {"results": results}


def _grow(call: Call, asked: dict[str, Any]) -> None:
    topology, name = call.broker.topology, asked["name"]
    if topology.topic_id(name) is None:
        raise UnknownTopicError(name)
    if name in INTERNAL_TOPICS:
        raise KafkaError(ErrorCode.INVALID_TOPIC_EXCEPTION, f"{name} has a fixed number")
    now, count = len(topology.numbers(name)), asked["count"]
    if count <= now:
        raise KafkaError(
            ErrorCode.INVALID_PARTITIONS, f"{name} has {now} partitions; {count} is not more"
        )
    assignment = None
    if asked["assignments"] is not None:
        if len(asked["assignments"]) != count - now:
            raise KafkaError(
                ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"assignments for {count - now} partitions"
            )
        assignment = {
            number: each["broker_ids"] for number, each in enumerate(asked["assignments"], now)
        }
    topology.grow(
        name,
        count,
        assignment,
        timeout=_timeout(call),
        validate_only=call.body["validate_only"],
    )


# ---- DeleteRecords ----


def delete_records(call: Call) -> dict[str, Any] | Pending:
    """Raise the start of logs; answer when every live replica has raised its own."""
    topics = []
    waiting: dict[Key, tuple[dict[str, Any], int]] = {}  # the row, and the offset to reach
    for topic in call.body["topics"]:
        rows = []
        for each in topic["partitions"]:
            key = topic["name"], each["partition_index"]
            row: dict[str, Any] = {"partition_index": key[1], "low_watermark": -1}
            rows.append(row)
            try:
                offset, row["low_watermark"] = _trim(call, key, each["offset"])
                if row["low_watermark"] < offset:
                    waiting[key] = row, offset
            except (*EXPECTED, IndexError) as error:
                row["error_code"] = error_code(error)
        topics.append({"name": topic["name"], "partitions": rows})
    answer = {"topics": topics}
    return _when_trimmed(call, answer, waiting) if waiting else answer


def _trim(call: Call, key: Key, offset: int) -> tuple[int, int]:
    """Trim a log; return where it is to start, and where the replica with the least starts."""
    partition = partition_of(call, *key)
    if key[0] in INTERNAL_TOPICS:
        raise KafkaError(ErrorCode.INVALID_TOPIC_EXCEPTION)
    if not partition.config.deletes:
        raise KafkaError(ErrorCode.POLICY_VIOLATION)
    offset = partition.high_watermark if offset == -1 else offset
    if not 0 <= offset <= partition.high_watermark:
        raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE)
    return offset, call.broker.topology.trim(*key, offset)


def _when_trimmed(
    call: Call, answer: dict[str, Any], waiting: dict[Key, tuple[dict[str, Any], int]]
) -> Pending:
    pending, loop = Pending(call), call.broker.loop
    until = loop.time() + _timeout(call)
    lost: list[bool] = []

    def look() -> None:  # in the loop's thread, until all is done or the time is up
        for key, (row, offset) in list(waiting.items()):
            try:
                row["low_watermark"] = call.broker.topology.low_watermark(*key)
                row["error_code"] = ErrorCode.REQUEST_TIMED_OUT
                if row["low_watermark"] >= offset:
                    row["error_code"] = ErrorCode.NONE
                    del waiting[key]
            except KafkaError as error:  # another node leads now
                row["error_code"] = error.code
                del waiting[key]
        if not waiting or loop.time() >= until:
            pending.answer(answer)
        elif not lost:
            loop.call_later(LOOK_SECONDS, look)

    pending.when_lost(lambda: lost.append(True))
    call.broker.calls.put(look)
    return pending


# ---- log directories ----


def _shown_path(call: Call) -> str:
    store = call.broker.store
    return (
        str(store.path)
        if call.broker.config.logstore_show_paths
        else f"/{store.identity.directory_id}"
    )


def describe_log_dirs(call: Call) -> dict[str, Any]:
    """Answer with the sizes of logs in the one directory."""
    store = call.broker.store
    asked = call.body["topics"]
    wanted = (
        dict.fromkeys(store)
        if asked is None
        else {each["topic"]: set(each["partitions"]) for each in asked}
    )
    topics = []
    for name, numbers in sorted(wanted.items()):
        topic = store.get(name)
        if topic is None:
            continue
        rows = []
        for number in topic.partition_numbers:
            if numbers is None or number in numbers:
                try:
                    size = sum(segment.size_bytes for segment in topic[number].segments)
                except ClosedError:
                    continue  # deleted meanwhile
                rows.append({"partition_index": number, "partition_size": size, "offset_lag": 0})
        topics.append({"name": name, "partitions": rows})
    disk = os.statvfs(store.path)
    return {
        "results": [
            {
                "log_dir": _shown_path(call),
                "topics": topics,
                "total_bytes": disk.f_blocks * disk.f_frsize,
                "usable_bytes": disk.f_bavail * disk.f_frsize,
            }
        ]
    }


def alter_replica_log_dirs(call: Call) -> dict[str, Any]:
    """There is one directory: moving to it is done, moving to another is refused."""
    answers: dict[str, list[dict[str, Any]]] = {}
    for directory in call.body["dirs"]:
        here = directory["path"] == _shown_path(call)
        for topic in directory["topics"]:
            for number in topic["partitions"]:
                code = ErrorCode.NONE if here else ErrorCode.LOG_DIR_NOT_FOUND
                known = call.broker.store.get(topic["name"])
                if here and (known is None or number not in known.partition_numbers):
                    code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                row = {"partition_index": number, "error_code": code}
                answers.setdefault(topic["name"], []).append(row)
    return {
        "results": [
            {"topic_name": name, "partitions": partitions} for name, partitions in answers.items()
        ]
    }


# ---- leaders and replicas ----


def elect_leaders(call: Call) -> dict[str, Any]:
    """Elect the preferred leaders, or, if no replica in sync is alive, any live replica."""
    topology, asked = call.broker.topology, call.body["topic_partitions"]
    if call.body["election_type"] not in (0, 1):
        refused = {"error_code": ErrorCode.INVALID_REQUEST, "error_message": "no such election"}
        rows_of = [
            {
                "topic": topic["topic"],
                "partition_result": [{"partition_id": n} | refused for n in topic["partitions"]],
            }
            for topic in asked or ()
        ]
        return {"error_code": ErrorCode.INVALID_REQUEST, "replica_election_results": rows_of}
    everything = asked is None
    if everything:
        asked = [{"topic": name, "partitions": topology.numbers(name)} for name in topology.names()]
    keys = [(topic["topic"], number) for topic in asked for number in topic["partitions"]]
    outcomes = topology.elect(keys, unclean=call.body["election_type"] == 1, timeout=_timeout(call))
    results = []
    for topic in asked:
        rows = []
        for number in topic["partitions"]:
            code, text = outcomes[topic["topic"], number]
            # Of all partitions, Kafka leaves out those that needed no election.
            if not (everything and code is ErrorCode.ELECTION_NOT_NEEDED):
                rows.append({"partition_id": number, "error_code": code, "error_message": text})
        results.append({"topic": topic["topic"], "partition_result": rows})
    return {"replica_election_results": results}


def alter_partition_reassignments(call: Call) -> dict[str, Any]:
    """Move replicas to other nodes, or cancel a move."""
    targets = {
        (topic["name"], each["partition_index"]): each["replicas"]
        for topic in call.body["topics"]
        for each in topic["partitions"]
    }
    outcomes = call.broker.topology.reassign(targets, timeout=_timeout(call))
    responses = []
    for topic in call.body["topics"]:
        rows = []
        for each in topic["partitions"]:
            code, text = outcomes[topic["name"], each["partition_index"]]
            row = {"partition_index": each["partition_index"], "error_code": code}
            rows.append(row | {"error_message": text})
        responses.append({"name": topic["name"], "partitions": rows})
    return {"error_message": None, "responses": responses}


def list_partition_reassignments(call: Call) -> dict[str, Any]:
    """Answer with the replicas that are being moved."""
    asked = call.body["topics"]
    wanted = None
    if asked is not None:
        wanted = {(each["name"], n) for each in asked for n in each["partition_indexes"]}
    topics: dict[str, list[dict[str, Any]]] = {}
    for (name, number), (replicas, adding, removing) in call.broker.topology.moving().items():
        if wanted is None or (name, number) in wanted:
            row = {"partition_index": number, "replicas": replicas}
            row |= {"adding_replicas": adding, "removing_replicas": removing}
            topics.setdefault(name, []).append(row)
    rows_of = [{"name": name, "partitions": rows} for name, rows in topics.items()]
    return {"error_message": None, "topics": rows_of}
