"""KafkaConfig: the settings of a listener, with Kafka's names where Kafka has them.

A setting that Kafka does not have starts with ``logstore.``; its field starts with ``logstore_``.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from logstore.config import INT32_MAX, INT64_MAX, Settings, choice, integer, setting

__all__ = ["KafkaConfig"]

MIB = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KafkaConfig(Settings):
    """The settings of a KafkaServer.  A field's comment is its consequence."""

    # ---- sockets ----

    # The address that clients are sent to, as host:port.  Empty: the one that they connected to.
    advertised_listeners: str = setting("")
    # Above this many connections, further ones wait in the backlog.
    max_connections: int = integer(1000, 1, INT32_MAX)
    # Above this many from one address, further ones are closed.  Loopback is not counted.
    max_connections_per_ip: int = integer(100, 1, INT32_MAX)
    # An address that connects more often than this a second waits.  Loopback does not.
    max_connection_creation_rate: int = integer(50, 1, INT32_MAX)
    socket_listen_backlog_size: int = integer(128, 1, 65_535)
    # A connection without a request for this long is closed.
    connections_max_idle_ms: int = integer(600_000, 1)
    # A larger request closes its connection before any of it is read.
    socket_request_max_bytes: int = integer(100 * MIB, 1024, INT32_MAX)
    # The same for every API but Produce.
    logstore_control_request_max_bytes: int = integer(16 * MIB, 1024, INT32_MAX)
    # A request that has begun must be whole after this time.
    logstore_request_read_timeout_ms: int = integer(30_000, 1)
    # Memory of requests that are being read or worked on.  Above it, connections wait.
    queued_max_request_bytes: int = integer(64 * MIB, MIB, INT64_MAX)
    # The most that one fetch is answered with.
    fetch_max_bytes: int = integer(57_671_680, 1024, INT32_MAX)
    # Threads for requests that wait for the disk or for a lock.
    num_io_threads: int = integer(4, 1, 64)

    # ---- topics ----

    # Whether a client that asks for a topic makes it.
    auto_create_topics_enable: bool = setting(True)
    logstore_auto_create_max_per_request: int = integer(100, 0, INT32_MAX)
    num_partitions: int = integer(1, 1, 100_000)
    delete_topic_enable: bool = setting(True)
    # Whether a topic may be asked for with more replicas than one; it gets one.
    logstore_any_replication_factor: bool = setting(False)
    # Whether clients are shown the store's path.
    logstore_show_paths: bool = setting(False)

    # ---- groups ----

    # How long the first rebalance of an empty group waits for more members.  Kafka: 3000.
    group_initial_rebalance_delay_ms: int = integer(0, 0, INT32_MAX)
    group_min_session_timeout_ms: int = integer(6_000, 1, INT32_MAX)
    group_max_session_timeout_ms: int = integer(1_800_000, 1, INT32_MAX)
    group_max_size: int = integer(1000, 1, INT32_MAX)
    # The same for groups of the consumer protocol (KIP-848), whose clients do not set these times.
    group_consumer_session_timeout_ms: int = integer(45_000, 1, INT32_MAX)
    group_consumer_heartbeat_interval_ms: int = integer(5_000, 1, INT32_MAX)
    group_consumer_max_size: int = integer(INT32_MAX, 1, INT32_MAX)
    # The least time between two assignments of a group.  Kafka: 1000.
    group_consumer_assignment_interval_ms: int = integer(0, 0, 15_000)
    # The assignors that a member may ask for.  The first one is the default.
    group_consumer_assignors: Literal["uniform,range", "range,uniform", "uniform", "range"] = (
        choice("uniform,range", "uniform,range", "range,uniform", "uniform", "range")
    )
    offset_metadata_max_bytes: int = integer(4096, 0, INT32_MAX)

    # ---- transactions ----

    # The longest transaction.timeout.ms that a client may ask for.
    transaction_max_timeout_ms: int = integer(900_000, 1, INT32_MAX)
    # Whether a transactional batch needs its partition in an open transaction (KIP-890).
    transaction_partition_verification_enable: bool = setting(True)

    # ---- fetch sessions ----

    # Above this many sessions, further clients send all their partitions with each fetch.
    max_incremental_fetch_session_cache_slots: int = integer(1000, 0, INT32_MAX)

    # ---- the protocol of the listener ----

    security_protocol: Literal["PLAINTEXT"] = choice("PLAINTEXT", "PLAINTEXT")
