"""KafkaSource: a Kafka, or our own listener, as the source of a copy.

It is a consumer there (replica id -1): it reads below the high watermark and is in no ISR.  Each
fetch carries the leader epoch that the metadata named and the epoch of the last record of the copy,
so a leader answers with DivergingEpoch if its history is another one.

It has one connection for each leader.  All leaders are asked before the first answer is waited for.
An error that a change of leaders causes makes it ask for the metadata again.
"""

from __future__ import annotations

import contextlib
import errno
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from logstore.config import ConfigError, PartitionConfig
from logstore.kafka.client import KafkaPeer, PeerGoneError, parse_servers
from logstore.kafka.protocol.errors import ErrorCode
from logstore.log.epochs import EpochEnd
from logstore.replication.source import Fetched, Place, SourceTopic, Wanted, whole_batches

__all__ = ["KafkaSource"]

FETCH, LIST_OFFSETS, METADATA, OFFSET_FOR_EPOCH, DESCRIBE_CONFIGS = 1, 2, 3, 23, 32
FETCH_BYTES = 16 << 20  # of one answer
EARLIEST, LATEST = -2, -1
TOPIC, TOPIC_CONFIG = 2, 1  # of DescribeConfigs: the kind of a resource; the source of a setting
STALE_WAIT_SECONDS = 0.1  # before the metadata is asked for again
_OUT_OF_RANGE = ErrorCode.OFFSET_OUT_OF_RANGE
_DENIED = (ErrorCode.TOPIC_AUTHORIZATION_FAILED, ErrorCode.CLUSTER_AUTHORIZATION_FAILED)


class _Leader(NamedTuple):
    node: int
    epoch: int


class KafkaSource:
    """The topics of a cluster.  `servers` is ``kafka://host:port[,host:port]``.

    It connects when it is used first: a Kafka that is started later is waited for by Follow.
    """

    def __init__(
        self, servers: str, *, timeout: float = 30.0, refresh_seconds: float = 5.0
    ) -> None:
        self.name = servers if servers.startswith("kafka://") else f"kafka://{servers}"
        self.refresh_seconds = refresh_seconds
        self._servers = parse_servers(servers)
        self._timeout = timeout
        self._peers: dict[int, KafkaPeer] = {}
        self._nodes: dict[int, tuple[str, int]] = {}
        self._leaders: dict[Place, _Leader] = {}
        self._ids: dict[str, bytes] = {}
        self._topics: dict[str, SourceTopic] = {}
        self._stale = True

    def close(self) -> None:
        """Close the connections."""
        while self._peers:
            self._peers.popitem()[1].close()

    # ---- connections and metadata ----

    def _peer(self, node: int) -> KafkaPeer:
        peer = self._peers.get(node)
        if peer is None or peer.closed:
            host, port = self._nodes[node]
            peer = self._peers[node] = KafkaPeer(host, port, timeout=self._timeout)
        return peer

    def _any_peer(self) -> KafkaPeer:
        """Return a connection to any node, or one to a server of the first list."""
        for peer in self._peers.values():
            if not peer.closed:
                return peer
        fault: PeerGoneError | None = None
        for host, port in (*self._servers, *self._nodes.values()):
            try:
                return KafkaPeer(host, port, timeout=self._timeout)
            except PeerGoneError as error:
                fault = fault or error
        assert fault is not None  # the list of servers is not empty
        raise fault

    def topics(self) -> dict[str, SourceTopic]:
        """See Source."""
        peer = self._any_peer()
        try:
            version = peer.version(METADATA, 9, 12)
            asked = {"topics": None, "allow_auto_topic_creation": False}
            answer = peer.request(METADATA, version, asked)
        finally:
            if peer not in self._peers.values():
                peer.close()
        self._nodes = {each["node_id"]: (each["host"], each["port"]) for each in answer["brokers"]}
        for node in [each for each in self._peers if each not in self._nodes]:
            self._peers.pop(node).close()
        found, leaders = {}, {}
        for topic in answer["topics"]:
            if topic["error_code"] or topic["is_internal"] or topic["name"].startswith("__"):
                continue
            name = topic["name"]
            number = uuid.UUID(bytes=topic["topic_id"])
            self._ids[name] = topic["topic_id"]
            rows = topic["partitions"]
            partitions = tuple(sorted(each["partition_index"] for each in rows))
            found[name] = SourceTopic(number if number.int else None, partitions)
            for each in rows:
                if each["leader_id"] in self._nodes:
                    leader = _Leader(each["leader_id"], each["leader_epoch"])
                    leaders[Place(name, each["partition_index"])] = leader
        self._topics, self._leaders, self._stale = found, leaders, False
        return found

    def settings(self, topic: str) -> Mapping[str, Any]:
        """See Source.  Settings that logstore does not have are left out."""
        peer = self._any_peer()
        try:
            version = peer.version(DESCRIBE_CONFIGS, 1, 4)
            resource = {"resource_type": TOPIC, "resource_name": topic, "configuration_keys": None}
            answer = peer.request(DESCRIBE_CONFIGS, version, {"resources": [resource]})
        finally:
            if peer not in self._peers.values():
                peer.close()
        found: dict[str, Any] = {}
        for each in answer["results"][0]["configs"] or ():
            if each["config_source"] == TOPIC_CONFIG and each["value"] is not None:
                with contextlib.suppress(ConfigError):
                    PartitionConfig.of({each["name"]: each["value"]})
                    found[each["name"]] = each["value"]
        return found

    def _leader_of(self, place: Place) -> tuple[KafkaPeer, int]:
        """Return the connection to the leader of a partition, and its epoch."""
        if self._stale:
            self.topics()
        leader = self._leaders.get(place)
        if leader is None:
            self._stale = True
            raise ConnectionError(f"{self.name}: {place} has no leader")
        return self._peer(leader.node), leader.epoch

    def _refused(self, place: Place, code: int) -> OSError:
        """Return the error to raise for an answer with this code."""
        self._stale = True
        name = ErrorCode(code).name if code in ErrorCode._value2member_map_ else f"error {code}"
        if code in _DENIED:
            return PermissionError(errno.EACCES, f"{name} of {place}", self.name)
        return ConnectionError(f"{self.name}: {place}: {name}")

    # ---- reading ----

    def fetch(self, wanted: Sequence[Wanted], wait: float) -> list[Fetched]:
        """See Source."""
        if self._stale:
            self.topics()
        by_node: dict[int, list[Wanted]] = {}
        for each in wanted:
            leader = self._leaders.get(each.place)
            if leader is None:
                self._stale = True
            else:
                by_node.setdefault(leader.node, []).append(each)
        if not by_node:
            time.sleep(min(wait, STALE_WAIT_SECONDS))
            return []
        asked: list[tuple[KafkaPeer, list[Wanted]]] = []
        fault: PeerGoneError | None = None
        # All leaders are asked first: they wait for records at the same time.
        for node, rows in by_node.items():
            try:
                peer = self._peer(node)
                self._send(peer, rows, wait)
                asked.append((peer, rows))
            except PeerGoneError as error:
                fault = fault or error
        answers = []
        try:
            while asked:
                peer, rows = asked.pop(0)
                try:
                    answers += self._answers(peer.receive(), rows)
                except PeerGoneError as error:
                    fault = fault or error
        finally:
            for peer, _ in asked:  # their answers would be taken for those of later requests
                peer.close()
        if fault is not None:
            self._stale = True
            if not answers:  # else the leaders that are there go on
                raise fault
        elif self._stale:
            time.sleep(STALE_WAIT_SECONDS)
        return answers

    def _send(self, peer: KafkaPeer, rows: Sequence[Wanted], wait: float) -> None:
        by_id = all(self._topics[each.place.topic].id is not None for each in rows)
        version = peer.version(FETCH, 12, 16 if by_id else 12)
        topics: dict[str, list[dict[str, Any]]] = {}
        for each in rows:
            topics.setdefault(each.place.topic, []).append(
                {
                    "partition": each.place.partition,
                    "current_leader_epoch": self._leaders[each.place].epoch,
                    "fetch_offset": each.offset,
                    "last_fetched_epoch": each.last_epoch,
                    "partition_max_bytes": each.max_bytes,
                }
            )
        body = {
            "max_wait_ms": round(wait * 1000),
            "min_bytes": 1,
            "max_bytes": FETCH_BYTES,
            "topics": [
                {"topic": name, "topic_id": self._ids[name], "partitions": partitions}
                for name, partitions in topics.items()
            ],
        }
        peer.send(FETCH, version, body, timeout=wait + self._timeout)

    def _answers(self, answer: dict[str, Any], rows: Sequence[Wanted]) -> list[Fetched]:
        if answer["error_code"]:
            raise self._refused(rows[0].place, answer["error_code"])
        names = {self._ids[each.place.topic]: each.place.topic for each in rows}
        asked = {each.place for each in rows}
        found = []
        size = sum(
            memoryview(each["records"] or b"").nbytes
            for topic in answer["responses"]
            for each in topic["partitions"]
        )
        for topic in answer["responses"]:
            name = topic["topic"] or names.get(topic["topic_id"], "")
            for each in topic["partitions"]:
                place = Place(name, each["partition_index"])
                if place in asked:
                    row = self._answer(place, each, is_full=size > 0)
                    if row is not None:
                        found.append(row)
        return found

    def _answer(self, place: Place, row: dict[str, Any], *, is_full: bool) -> Fetched | None:
        start, end = row["log_start_offset"], row["high_watermark"]
        code = row["error_code"]
        if code == _OUT_OF_RANGE:
            return Fetched(place, start, end, end, out_of_range=True)
        if code in _DENIED:
            raise self._refused(place, code)
        if code:
            self._stale = True  # the leader moved, or the topic is gone
            return None
        diverging = row["diverging_epoch"]
        if diverging["epoch"] >= 0 or diverging["end_offset"] >= 0:
            parting = EpochEnd(diverging["epoch"], diverging["end_offset"])
            return Fetched(place, start, end, end, diverging=parting)
        records = memoryview(row["records"] or b"")
        # A broker sends a part of a file: the last batch may be cut off.
        size, _ = whole_batches(records)
        return Fetched(place, start, end, end, records[:size], is_full=is_full and not size)

    # ---- comparing ----

    def bounds(self, place: Place) -> tuple[int, int]:
        """See Source."""
        return self._offset(place, EARLIEST), self._offset(place, LATEST)

    def _offset(self, place: Place, when: int) -> int:
        peer, epoch = self._leader_of(place)
        row = {
            "partition_index": place.partition,
            "current_leader_epoch": epoch,
            "timestamp": when,
        }
        body = {
            "replica_id": -1,
            "isolation_level": 0,
            "topics": [{"name": place.topic, "partitions": [row]}],
        }
        answer = peer.request(LIST_OFFSETS, peer.version(LIST_OFFSETS, 6, 7), body)
        found = answer["topics"][0]["partitions"][0]
        if found["error_code"]:
            raise self._refused(place, found["error_code"])
        offset: int = found["offset"]
        return offset

    def batch_at(self, place: Place, offset: int) -> bytes | None:
        """See Source."""
        peer, _ = self._leader_of(place)
        wanted = [Wanted(place, offset, -1, 1)]  # one byte: the first batch is sent whole
        self._send(peer, wanted, 0.0)
        for each in self._answers(peer.receive(), wanted):
            records = memoryview(each.batches)
            if records.nbytes:
                length = int.from_bytes(records[8:12], "big") + 12
                return bytes(records[:length])
        return None

    def end_of_epoch(self, place: Place, epoch: int) -> EpochEnd | None:
        """See Source."""
        peer, current = self._leader_of(place)
        row = {
            "partition": place.partition,
            "current_leader_epoch": current,
            "leader_epoch": epoch,
        }
        body = {"replica_id": -1, "topics": [{"topic": place.topic, "partitions": [row]}]}
        answer = peer.request(OFFSET_FOR_EPOCH, peer.version(OFFSET_FOR_EPOCH, 3, 4), body)
        found = answer["topics"][0]["partitions"][0]
        if found["error_code"]:
            raise self._refused(place, found["error_code"])
        if found["end_offset"] < 0:
            return None
        return EpochEnd(found["leader_epoch"], found["end_offset"])

    def bytes_from(self, place: Place, offset: int) -> int | None:
        """See Source: a Kafka does not answer this."""
        return None
