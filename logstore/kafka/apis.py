"""The table of APIs: key, versions, handler, and where the handler runs."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from logstore.kafka.broker import Broker
    from logstore.kafka.calls import Call, Pending
    from logstore.kafka.network.connection import Connection
    from logstore.kafka.network.outgoing import Pieces

__all__ = ["APIS", "Api", "Handler"]

# A response, an answer that comes later, or None: no answer is sent.
Handler: TypeAlias = "Callable[[Call], dict[str, Any] | Pending | None]"

# Answers a request of the common shape in fewer steps: the frame's pieces, and their size in all.
# None: nothing is done, and the request has to be decoded.
QuickHandler: TypeAlias = (
    "Callable[[Broker, Connection, bytearray, int, int], tuple[Pieces, int] | None]"
)

# Where a handler runs: in the loop's thread; in a worker's; in the loop's unless it would wait.
INLINE, WORKER, EITHER = "inline", "worker", "either"


class Api(NamedTuple):
    """A row of the table."""

    key: int
    name: str
    first: int  # version that is served
    last: int
    where: str
    function: str  # module of `handlers`, and function
    advertised_first: int = -1  # if older versions are named to clients than are served

    @property
    def versions(self) -> tuple[int, int]:
        """The range that ApiVersions answers."""
        first = self.first if self.advertised_first < 0 else self.advertised_first
        return first, self.last


_ROWS = (
    # librdkafka before 2.11.1 sends records uncompressed if Produce does not start at 0.
    Api(0, "Produce", 3, 13, EITHER, "produce.produce", advertised_first=0),
    Api(1, "Fetch", 4, 18, INLINE, "fetch.fetch"),
    Api(2, "ListOffsets", 1, 11, EITHER, "offsets.list_offsets"),
    Api(3, "Metadata", 0, 13, EITHER, "metadata.metadata"),
    Api(8, "OffsetCommit", 2, 10, WORKER, "group_offsets.offset_commit"),
    Api(9, "OffsetFetch", 1, 10, WORKER, "group_offsets.offset_fetch"),
    Api(10, "FindCoordinator", 0, 6, INLINE, "metadata.find_coordinator"),
    Api(11, "JoinGroup", 0, 9, WORKER, "groups.join_group"),
    Api(12, "Heartbeat", 0, 4, WORKER, "groups.heartbeat"),
    Api(13, "LeaveGroup", 0, 5, WORKER, "groups.leave_group"),
    Api(14, "SyncGroup", 0, 5, WORKER, "groups.sync_group"),
    Api(15, "DescribeGroups", 0, 6, WORKER, "groups.describe_groups"),
    Api(16, "ListGroups", 0, 5, WORKER, "groups.list_groups"),
    Api(18, "ApiVersions", 0, 4, INLINE, "versions.api_versions"),
    Api(19, "CreateTopics", 2, 7, WORKER, "topics.create_topics"),
    Api(20, "DeleteTopics", 1, 6, WORKER, "topics.delete_topics"),
    Api(21, "DeleteRecords", 0, 2, WORKER, "topics.delete_records"),
    Api(22, "InitProducerId", 0, 5, WORKER, "transactions.init_producer_id"),
    Api(23, "OffsetForLeaderEpoch", 2, 4, EITHER, "offsets.offset_for_leader_epoch"),
    Api(24, "AddPartitionsToTxn", 0, 3, WORKER, "transactions.add_partitions_to_txn"),
    Api(25, "AddOffsetsToTxn", 0, 4, WORKER, "transactions.add_offsets_to_txn"),
    Api(26, "EndTxn", 0, 5, WORKER, "transactions.end_txn"),
    Api(27, "WriteTxnMarkers", 1, 2, WORKER, "transactions.write_txn_markers"),
    Api(28, "TxnOffsetCommit", 0, 5, WORKER, "transactions.txn_offset_commit"),
    Api(32, "DescribeConfigs", 1, 4, WORKER, "configs.describe_configs"),
    Api(33, "AlterConfigs", 0, 2, WORKER, "configs.alter_configs"),
    Api(34, "AlterReplicaLogDirs", 1, 2, INLINE, "topics.alter_replica_log_dirs"),
    Api(35, "DescribeLogDirs", 1, 5, WORKER, "topics.describe_log_dirs"),
    Api(37, "CreatePartitions", 0, 3, WORKER, "topics.create_partitions"),
    Api(42, "DeleteGroups", 0, 2, WORKER, "groups.delete_groups"),
    Api(43, "ElectLeaders", 0, 2, WORKER, "topics.elect_leaders"),
    Api(44, "IncrementalAlterConfigs", 0, 1, WORKER, "configs.incremental_alter_configs"),
    Api(45, "AlterPartitionReassignments", 0, 1, WORKER, "topics.alter_partition_reassignments"),
    Api(46, "ListPartitionReassignments", 0, 0, INLINE, "topics.list_partition_reassignments"),
    Api(47, "OffsetDelete", 0, 0, WORKER, "group_offsets.offset_delete"),
    Api(60, "DescribeCluster", 0, 2, INLINE, "metadata.describe_cluster"),
    Api(61, "DescribeProducers", 0, 0, WORKER, "transactions.describe_producers"),
    Api(65, "DescribeTransactions", 0, 0, WORKER, "transactions.describe_transactions"),
    Api(66, "ListTransactions", 0, 2, WORKER, "transactions.list_transactions"),
    Api(68, "ConsumerGroupHeartbeat", 0, 1, WORKER, "consumer_groups.consumer_group_heartbeat"),
    Api(69, "ConsumerGroupDescribe", 0, 1, WORKER, "consumer_groups.consumer_group_describe"),
    Api(75, "DescribeTopicPartitions", 0, 0, WORKER, "metadata.describe_topic_partitions"),
)

APIS: dict[int, Api] = {row.key: row for row in _ROWS}


@functools.cache
def handler(key: int) -> Handler:
    """Return the handler of an API.  Its module is imported when the API is first used."""
    module, function = APIS[key].function.split(".")
    found: Handler = getattr(importlib.import_module(f"logstore.kafka.handlers.{module}"), function)
    return found


@functools.cache
def quick_handler(key: int) -> QuickHandler:
    """Return the short way of Produce or Fetch.  Its module is imported when it is first used."""
    if key == 0:
        from logstore.kafka.handlers.produce import produce_now

        return produce_now
    from logstore.kafka.handlers.fetch import fetch_now

    return fetch_now
