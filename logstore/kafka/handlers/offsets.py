"""ListOffsets and OffsetForLeaderEpoch: where a log starts, ends, and was at a time."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from logstore.coordinators.internal_topics import INTERNAL_TOPICS
from logstore.errors import LogStoreError
from logstore.kafka.calls import Call
from logstore.kafka.protocol.errors import ErrorCode, KafkaError, error_code
from logstore.partition.partition import Partition
from logstore.partition.reader import TimedOffset
from logstore.store.topic import Topic

if TYPE_CHECKING:
    from logstore.replication.hosting.hosted import HostedReplica

__all__ = [
    "check_leader_epoch",
    "list_offsets",
    "offset_for_leader_epoch",
    "opened_partition",
    "partition_of",
]

LATEST, EARLIEST, MAX_TIMESTAMP, EARLIEST_LOCAL, LATEST_TIERED, EARLIEST_PENDING = range(-1, -7, -1)
CLIENT, DEBUGGING = -1, -2  # as a replica id; the second may ask any replica, as with Kafka
# The first version of ListOffsets that knows a special time.
SINCE = {LATEST: 1, EARLIEST: 1, MAX_TIMESTAMP: 7, EARLIEST_LOCAL: 8, LATEST_TIERED: 9}
SINCE |= {EARLIEST_PENDING: 11}


def partition_of(call: Call, name: str, number: int, *, leads: bool = True) -> Partition:
    """Return an open partition.  One that would have to be opened is left to a worker.

    ``leads=False``: also one that this node only follows.
    """
    topology = call.broker.topology
    topic = call.broker.store.get(name)
    if topic is None or number not in call.broker.local_partitions(topic):
        raise KafkaError(topology.missing(name, number))
    if leads:
        topology.check_leads(name, number)
    return opened_partition(call, topic, number)


def opened_partition(call: Call, topic: Topic, number: int) -> Partition:
    """As `partition_of`.  A declared partition of an internal topic is made: Metadata shows it."""
    opened = topic.opened(number)
    if opened is None:
        if number < 0:  # a `Topic` counts it from the end
            raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        call.wait()
        if topic.name in INTERNAL_TOPICS:
            return call.broker.store.topic_changes.make_partition(topic, number)
        opened = topic[number]
    return opened


def check_leader_epoch(partition: Partition, epoch: int) -> None:
    """Refuse a client that knows an older or a newer leader epoch; -1 is not checked."""
    if epoch < 0:
        return
    ours = partition.leader_epoch
    if epoch < ours:
        raise KafkaError(ErrorCode.FENCED_LEADER_EPOCH)
    if epoch > ours:
        raise KafkaError(ErrorCode.UNKNOWN_LEADER_EPOCH)


def list_offsets(call: Call) -> dict[str, Any]:
    """Answer with an offset for each partition and time."""
    isolation = "read_committed" if call.body["isolation_level"] == 1 else "read_uncommitted"
    asked = Counter(
        (topic["name"], each["partition_index"])
        for topic in call.body["topics"]
        for each in topic["partitions"]
    )
    topics = []
    for topic in call.body["topics"]:
        rows = []
        for each in {row["partition_index"]: row for row in topic["partitions"]}.values():
            row: dict[str, Any] = {"partition_index": each["partition_index"], "offset": -1}
            rows.append(row)
            try:
                if asked[topic["name"], each["partition_index"]] > 1:
                    raise KafkaError(ErrorCode.INVALID_REQUEST)
                when = each["timestamp"]
                if when < 0 and call.version < SINCE.get(when, 1 << 15):
                    raise KafkaError(ErrorCode.UNSUPPORTED_VERSION)
                if when >= 0 or when == MAX_TIMESTAMP:
                    call.wait()  # reads the log
                leads = call.body["replica_id"] != DEBUGGING
                partition = partition_of(call, topic["name"], each["partition_index"], leads=leads)
                check_leader_epoch(partition, each["current_leader_epoch"])
                replica = call.broker.topology.replica(topic["name"], each["partition_index"])
                if when == LATEST and replica is not None:
                    found: TimedOffset | None = _latest(call, partition, replica, isolation)
                else:
                    found = _offset(partition, when, isolation)
                if found is not None:
                    row["offset"], row["timestamp"], row["leader_epoch"] = found
            except (KafkaError, LogStoreError, OSError, IndexError) as error:
                row["error_code"] = error_code(error)
        topics.append({"name": topic["name"], "partitions": rows})
    return {"topics": topics}


def _offset(partition: Partition, when: int, isolation: str) -> TimedOffset | None:
    """Return the offset for a time or a special time; None if there is none."""
    reader = partition.parts.reader
    if when >= 0:
        return reader.find_time(when, isolation=isolation)
    if when == MAX_TIMESTAMP:
        return reader.latest_time(isolation="read_uncommitted")  # for either isolation, as Kafka
    if when in (LATEST_TIERED, EARLIEST_PENDING):
        return None  # nothing is tiered
    if when in (EARLIEST, EARLIEST_LOCAL):
        offset = partition.start_offset
    elif isolation == "read_committed":
        offset = partition.last_stable_offset
    else:
        offset = partition.high_watermark
    return TimedOffset(offset, -1, _epoch_at(partition, offset))


def _latest(
    call: Call, partition: Partition, replica: HostedReplica, isolation: str
) -> TimedOffset:
    """Return the end of a replicated log: a client is told what is committed, others all."""
    leader = replica.machine.leader
    if call.body["replica_id"] != CLIENT:
        offset = partition.end_offset
    elif leader is not None and not leader.is_settled:
        raise KafkaError(ErrorCode.OFFSET_NOT_AVAILABLE)  # records of the last epoch may be cut
    elif isolation == "read_committed":
        offset = partition.last_stable_offset
    else:
        offset = partition.high_watermark
    return TimedOffset(offset, -1, _epoch_at(partition, offset))


def _epoch_at(partition: Partition, offset: int) -> int:
    epoch = partition.leader_epochs.epoch_for(offset)
    return -1 if epoch is None else epoch


def offset_for_leader_epoch(call: Call) -> dict[str, Any]:
    """Answer with the end of a leader epoch, for clients that look for a truncation."""
    topics = []
    for topic in call.body["topics"]:
        rows = []
        for each in topic["partitions"]:
            row: dict[str, Any] = {"partition": each["partition"], "leader_epoch": -1}
            row["end_offset"] = -1
            rows.append(row)
            try:
                partition = partition_of(call, topic["topic"], each["partition"])
                check_leader_epoch(partition, each["current_leader_epoch"])
                latest = partition.leader_epochs.latest
                if latest is None or not 0 <= each["leader_epoch"] <= latest:
                    continue
                found = partition.end_offset_for_epoch(each["leader_epoch"])
                if found is not None:
                    row["leader_epoch"], row["end_offset"] = found.epoch, found.end_offset
            except (KafkaError, LogStoreError, OSError, IndexError) as error:
                row["error_code"] = error_code(error)
        topics.append({"topic": topic["topic"], "partitions": rows})
    return {"topics": topics}
