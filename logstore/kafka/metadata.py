"""Metadata, DescribeCluster, FindCoordinator: which node leads what.  It is always this one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from logstore.config import ConfigError
from logstore.coordinators.internal_topics import INTERNAL_TOPICS
from logstore.errors import InvalidNameError, LogStoreError, TopicExistsError
from logstore.kafka.calls import Call
from logstore.kafka.errors import ErrorCode, error_code
from logstore.store.topic import Topic, check_topic_name

__all__ = [
    "ZERO_ID",
    "describe_cluster",
    "describe_topic_partitions",
    "find_coordinator",
    "metadata",
    "topic_id",
]

ZERO_ID = bytes(16)
OPERATIONS_NOT_ASKED = -(1 << 31)
PARTITIONS_IN_PAGE = 2000  # of DescribeTopicPartitions


def topic_id(topic: Topic) -> bytes:
    """Return the id of a topic as it is sent; zero for one that has none."""
    return ZERO_ID if topic.id is None else topic.id.bytes


def metadata(call: Call) -> dict[str, Any]:
    """Answer with this node and the topics that were asked for; make those that may be made."""
    broker, body = call.broker, call.body
    asked = body["topics"]
    if asked is None or (call.version == 0 and not asked):
        topics = [_described(call, name) for name in sorted(broker.store)]
    else:
        topics = list(_asked_for(call, asked))
    host, port = broker.address_for(call.connection)
    identity = broker.store.identity
    return {
        "brokers": [{"node_id": identity.node_id, "host": host, "port": port, "rack": None}],
        "cluster_id": identity.cluster_id,
        "controller_id": identity.node_id,
        "topics": topics,
        "cluster_authorized_operations": OPERATIONS_NOT_ASKED,
    }


def _asked_for(call: Call, asked: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    may_create = call.broker.config.auto_create_topics_enable and (
        call.version < 4 or call.body["allow_auto_topic_creation"]
    )
    left = call.broker.config.logstore_auto_create_max_per_request
    for each in asked:
        name, id_bytes = each["name"], each["topic_id"]
        if id_bytes != ZERO_ID:
            topic = call.broker.topic_by_id(id_bytes)
            if topic is None:
                yield {"error_code": ErrorCode.UNKNOWN_TOPIC_ID, "name": None, "topic_id": id_bytes}
            else:
                yield _described(call, topic.name)
            continue
        if name is None:
            yield {"error_code": ErrorCode.INVALID_REQUEST, "name": None}
        elif name in call.broker.store:
            yield _described(call, name)
        elif not may_create or name in INTERNAL_TOPICS:
            yield _unknown(name)
        elif left <= 0:
            yield {"error_code": ErrorCode.POLICY_VIOLATION, "name": name}
        else:
            left -= 1
            yield _created(call, name)


def _unknown(name: str) -> dict[str, Any]:
    try:
        check_topic_name(name)
    except InvalidNameError:
        return {"error_code": ErrorCode.INVALID_TOPIC_EXCEPTION, "name": name}
    return {"error_code": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "name": name}


def _created(call: Call, name: str) -> dict[str, Any]:
    """Make a topic that a client asked for."""
    call.wait()
    try:
        call.broker.store.create_topic(name, partitions=call.broker.config.num_partitions)
    except TopicExistsError:
        pass  # another client was first
    except (LogStoreError, ConfigError, OSError) as error:
        return {"error_code": error_code(error), "name": name}
    return _described(call, name)


def _described(call: Call, name: str) -> dict[str, Any]:
    store = call.broker.store
    topic = store.get(name)
    if topic is None:  # deleted meanwhile
        return {"error_code": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "name": name}
    node = store.identity.node_id
    partitions = []
    for number in call.broker.declared_partitions(topic):
        opened = topic.opened(number)
        partitions.append(
            {
                "partition_index": number,
                "leader_id": node,
                "leader_epoch": -1 if opened is None else opened.leader_epoch,
                "replica_nodes": [node],
                "isr_nodes": [node],
                "eligible_leader_replicas": [],
                "last_known_elr": [],
            }
        )
    return {
        "name": name,
        "topic_id": topic_id(topic),
        "is_internal": name in INTERNAL_TOPICS,
        "partitions": partitions,
        "topic_authorized_operations": OPERATIONS_NOT_ASKED,
    }


def describe_cluster(call: Call) -> dict[str, Any]:
    """Answer with this node."""
    if call.body["endpoint_type"] == 2:
        return {
            "error_code": ErrorCode.MISMATCHED_ENDPOINT_TYPE,
            "error_message": "this is a broker, not a controller",
        }
    if call.body["endpoint_type"] != 1:
        return {
            "error_code": ErrorCode.UNSUPPORTED_ENDPOINT_TYPE,
            "error_message": f"no endpoint type {call.body['endpoint_type']}",
        }
    host, port = call.broker.address_for(call.connection)
    identity = call.broker.store.identity
    return {
        "cluster_id": identity.cluster_id,
        "controller_id": identity.node_id,
        "brokers": [{"broker_id": identity.node_id, "host": host, "port": port}],
        "cluster_authorized_operations": OPERATIONS_NOT_ASKED,
    }


def find_coordinator(call: Call) -> dict[str, Any]:
    """Answer with this node: it coordinates every group and every transaction."""
    host, port = call.broker.address_for(call.connection)
    node = {"node_id": call.broker.store.identity.node_id, "host": host, "port": port}
    known = call.body["key_type"] in (0, 1)
    refusal = {
        "error_code": ErrorCode.INVALID_REQUEST,
        "error_message": f"no coordinator of type {call.body['key_type']}",
        "node_id": -1,
        "host": "",
        "port": -1,
    }
    answer = node if known else refusal
    if call.version < 4:
        return {"error_message": "NONE"} | answer
    return {"coordinators": [{"key": key, **answer} for key in call.body["coordinator_keys"]]}


# Empty, not null: Java's AdminClient fails on null.
NO_ELIGIBLE_LEADERS: dict[str, list[int]] = {"eligible_leader_replicas": [], "last_known_elr": []}


def describe_topic_partitions(call: Call) -> dict[str, Any]:
    """Answer with topics page by page."""
    names = sorted({each["name"] for each in call.body["topics"]}) or sorted(call.broker.store)
    cursor = call.body["cursor"]
    first = 0
    if cursor is not None:
        asked = {each["name"] for each in call.body["topics"]}
        if cursor["partition_index"] < 0 or (asked and cursor["topic_name"] not in asked):
            refused = {"error_code": ErrorCode.INVALID_REQUEST}
            return {"topics": [{"name": name} | refused for name in sorted(asked)]}
        names = [name for name in names if name >= cursor["topic_name"]]
        if names and names[0] == cursor["topic_name"]:
            first = cursor["partition_index"]
    left = min(max(1, call.body["response_partition_limit"]), PARTITIONS_IN_PAGE)
    topics = []
    following = None
    for name in names:
        found = _described(call, name) if name in call.broker.store else _unknown(name)
        rows = found.get("partitions", [])[first:]
        if left == 0 or len(rows) > left:
            following = {"topic_name": name, "partition_index": first + left}
            if left == 0:
                break
            rows = rows[:left]
        left -= len(rows)
        topics.append(found | {"partitions": [row | NO_ELIGIBLE_LEADERS for row in rows]})
        if following is not None:
            break
        first = 0
    return {"topics": topics, "next_cursor": following}
