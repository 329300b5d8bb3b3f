"""Metadata, DescribeCluster, FindCoordinator: which node leads what; see Topology."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from logstore.config import ConfigError
from logstore.coordinators.internal_topics import INTERNAL_TOPICS
from logstore.errors import InvalidNameError, LogStoreError, TopicExistsError
from logstore.kafka.calls import Call
from logstore.kafka.clustering.topology import ZERO_ID, NodeRow
from logstore.kafka.protocol.errors import ErrorCode, KafkaError, error_code
from logstore.store.topic import check_topic_name

__all__ = [
    "describe_cluster",
    "describe_topic_partitions",
    "find_coordinator",
    "metadata",
]

INLINE_TOPICS, INLINE_PARTITIONS = 50, 500  # more of them are described by a worker
PARTITIONS_IN_PAGE = 2000  # of DescribeTopicPartitions


def metadata(call: Call) -> dict[str, Any]:
    """Answer with the nodes and the topics that were asked for; make those that may be made."""
    topology, asked = call.broker.topology, call.body["topics"]
    if asked is None or (call.version == 0 and not asked):
        names = topology.names()
        if len(names) > INLINE_TOPICS:
            call.wait()
        topics = [_described(call, name) for name in names]
    else:
        if len(asked) > INLINE_TOPICS:
            call.wait()
        topics = list(_asked_for(call, asked))
    return {
        "brokers": [node._asdict() for node in topology.nodes(call.connection)],
        "cluster_id": topology.cluster_id,
        "controller_id": topology.controller_id,
        "topics": topics,
    }


def _asked_for(call: Call, asked: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    may_create = call.broker.config.auto_create_topics_enable and (
        call.version < 4 or call.body["allow_auto_topic_creation"]
    )
    left = call.broker.config.logstore_auto_create_max_per_request
    # A topic that is asked for twice is answered once, as Kafka does.
    for name, id_bytes in dict.fromkeys((each["name"], each["topic_id"]) for each in asked):
        if call.version < 12 and (name is None or id_bytes != ZERO_ID):
            raise KafkaError(ErrorCode.INVALID_REQUEST, "topics have names below version 12")
        if id_bytes != ZERO_ID:
            found = call.broker.topic_name(id_bytes)
            if found is None:
                yield {"error_code": ErrorCode.UNKNOWN_TOPIC_ID, "name": None, "topic_id": id_bytes}
            else:
                yield _described(call, found)
            continue
        if name is None:
            yield {"error_code": ErrorCode.INVALID_REQUEST, "name": None}
        elif call.broker.topology.topic_id(name) is not None:
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
        call.broker.topology.create(
            name, call.broker.config.num_partitions, -1, None, {}, timeout=10.0, validate_only=False
        )
    except TopicExistsError:
        pass  # another client was first
    except (KafkaError, LogStoreError, ConfigError, OSError) as error:
        return {"error_code": error_code(error), "name": name}
    return _described(call, name)


def _described(call: Call, name: str) -> dict[str, Any]:
    topology = call.broker.topology
    id_bytes = topology.topic_id(name)
    if id_bytes is None:  # deleted meanwhile
        return {"error_code": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "name": name}
    numbers = topology.numbers(name)
    if len(numbers) > INLINE_PARTITIONS:
        call.wait()
    partitions = []
    for number in numbers:
        place = topology.place(name, number)
        partitions.append(
            {
                "error_code": place.code,
                "partition_index": number,
                "leader_id": place.leader,
                "leader_epoch": place.leader_epoch,
                "replica_nodes": place.replicas,
                "isr_nodes": place.isr,
                "offline_replicas": place.offline,
                "eligible_leader_replicas": place.elr,
                "last_known_elr": place.last_known,
            }
        )
    return {
        "name": name,
        "topic_id": id_bytes,
        "is_internal": name in INTERNAL_TOPICS,
        "partitions": partitions,
    }


def describe_cluster(call: Call) -> dict[str, Any]:
    """Answer with the nodes."""
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
    topology = call.broker.topology
    fenced = call.version >= 2 and call.body["include_fenced_brokers"]
    return {
        "cluster_id": topology.cluster_id,
        "controller_id": topology.controller_id,
        "brokers": [
            {"broker_id": node.node_id, "host": node.host, "port": node.port, "rack": node.rack,
             "is_fenced": node.fenced}
            for node in topology.nodes(call.connection)
            if fenced or not node.fenced
        ],
    }  # fmt: skip


def find_coordinator(call: Call) -> dict[str, Any]:
    """Answer with the nodes that coordinate groups (type 0) or transactions (type 1)."""
    if call.version < 4:
        return {"error_message": "NONE"} | _coordinator(call, call.body["key"])
    keys = call.body["coordinator_keys"]
    return {"coordinators": [{"key": key, **_coordinator(call, key)} for key in keys]}


def _coordinator(call: Call, key: str) -> dict[str, Any]:
    kind = call.body["key_type"]
    found: object = ErrorCode.INVALID_REQUEST
    if kind in (0, 1):
        found = call.broker.topology.coordinator(kind, key, call.connection)
    if isinstance(found, ErrorCode):
        text = f"no coordinator of type {kind}"
        if found is not ErrorCode.INVALID_REQUEST:
            text = "the coordinator is not available yet"
        return {
            "error_code": found, "error_message": text, "node_id": -1, "host": "", "port": -1,
        }  # fmt: skip
    assert isinstance(found, NodeRow)
    return {"node_id": found.node_id, "host": found.host, "port": found.port}


def describe_topic_partitions(call: Call) -> dict[str, Any]:
    """Answer with topics page by page."""
    names = sorted({each["name"] for each in call.body["topics"]}) or call.broker.topology.names()
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
        known = call.broker.topology.topic_id(name) is not None
        found = _described(call, name) if known else _unknown(name)
        rows = found.get("partitions", [])[first:]
        if left == 0 or len(rows) > left:
            following = {"topic_name": name, "partition_index": first + left}
            if left == 0:
                break
            rows = rows[:left]
        left -= len(rows)
        topics.append(found | {"partitions": rows})
        if following is not None:
            break
        first = 0
    return {"topics": topics, "next_cursor": following}
