"""NodeConfig: the settings of a node, with Kafka's names and defaults."""

from __future__ import annotations

import dataclasses

from logstore.config import INT32_MAX, INT64_MAX, Settings, integer, setting

__all__ = ["NodeConfig"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig(Settings):
    """The settings of a Node.  A field's comment is its consequence."""

    # Where the node is: the replicas of a partition are put on different racks.
    broker_rack: str = setting("")
    # Of topics that are created without a number of replicas.
    default_replication_factor: int = integer(1, 1, INT32_MAX)
    # A follower that lags for longer is not in sync: acks=all does not wait for it any more.
    replica_lag_time_max_ms: int = integer(30_000, 1)
    # Of one partition in one answer to a follower; a batch that is larger is sent alone.
    replica_fetch_max_bytes: int = integer(1 << 20, 1, INT32_MAX)
    # Of all partitions in one answer.
    replica_fetch_response_max_bytes: int = integer(10 << 20, 1, INT32_MAX)
    # How long a leader keeps a fetch that finds no records.
    replica_fetch_wait_max_ms: int = integer(500, 1, INT32_MAX)
    # The longest wait of a follower after an error.  The first is 50 ms, and it doubles.
    replica_fetch_backoff_ms: int = integer(1000, 1, INT32_MAX)
    # Connections to each leader; each has one request under way.
    num_replica_fetchers: int = integer(1, 1, 64)
    # Bytes per second, for replicas that a topic lists as throttled and that are not in sync: what
    # this node sends as a leader, and what it copies.  The tree may have other values.
    leader_replication_throttled_rate: int = integer(INT64_MAX, 1)
    follower_replication_throttled_rate: int = integer(INT64_MAX, 1)
    # A leader that does not answer for longer is asked again, over another connection.
    replica_socket_timeout_ms: int = integer(30_000, 1, INT32_MAX)
    # Where other nodes are reached, if not at the address that they advertise: 2=host:port,...
    logstore_peer_addresses: str = setting("")
    # How old the high watermark may be that a restarted node shows to readers.
    replica_high_watermark_checkpoint_interval_ms: int = integer(5000, 1)
    # A node that died is noticed after this time.  Kafka has 18000 since 2.5.
    zookeeper_session_timeout_ms: int = integer(6000, 100, INT32_MAX)
    # How long an append with acks=all waits by default.
    request_timeout_ms: int = integer(30_000, 1, INT32_MAX)
    # Of the topics that hold groups and transactions; at most as many replicas as nodes.
    offsets_topic_num_partitions: int = integer(50, 1, INT32_MAX)
    offsets_topic_replication_factor: int = integer(3, 1, INT32_MAX)
    transaction_state_log_num_partitions: int = integer(50, 1, INT32_MAX)
    transaction_state_log_replication_factor: int = integer(3, 1, INT32_MAX)
    transaction_state_log_min_isr: int = integer(2, 1, INT32_MAX)
    # Whether leaderships return to the first replica of each partition.
    auto_leader_rebalance_enable: bool = setting(True)
    leader_imbalance_check_interval_seconds: int = integer(300, 1, INT32_MAX)
    # The share of a node's partitions that may be led elsewhere.
    leader_imbalance_per_broker_percentage: int = integer(10, 0, 100)
    # Whether `close` moves the leaderships first, and how long it waits: retries times backoff.
    controlled_shutdown_enable: bool = setting(True)
    controlled_shutdown_max_retries: int = integer(3, 1, INT32_MAX)
    controlled_shutdown_retry_backoff_ms: int = integer(5000, 1, INT32_MAX)
