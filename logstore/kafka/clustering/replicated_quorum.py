"""ReplicatedQuorum: the partitions of a node, as coordinators see them.

Records of a coordinator are appended with acks=all, without a time-out: within one leader epoch the
record is in the log of the leader, so it is committed in the end, or the epoch ends.  The markers
of a transaction are written at the leaders of its partitions, here or on other nodes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from logstore.coordinators.internal_topics import PARTITIONS
from logstore.coordinators.quorum.local import transactional_batches
from logstore.coordinators.quorum.quorum import Appended, Marked
from logstore.errors import (
    CoordinatorNotAvailableError,
    FencedError,
    IndeterminateAppendError,
    NotCoordinatorError,
    NotEnoughReplicasError,
    UnknownTopicError,
)
from logstore.format.encoder import BatchEncoder
from logstore.kafka.clustering.peers import TcpPeers
from logstore.kafka.protocol.errors import ErrorCode, KafkaError
from logstore.record import Record
from logstore.replication.hosting.later import holding, run_later
from logstore.replication.hosting.produced import Produced
from logstore.replication.machines.image import PRODUCER_IDS, Key, as_json
from logstore.replication.metadata import Committed, Create, Op, Outcome, Set
from logstore.replication.node import Node

__all__ = ["ProducerIdBlocks", "ReplicatedQuorum"]

ALL = -1  # acks
WRITE_TXN_MARKERS, WRITE_TXN_MARKERS_VERSION = 27, 1
BLOCK_IDS = 1000
BLOCK_SECONDS = 5.0


class ReplicatedQuorum:
    """What coordinators write with; see Quorum."""

    answers_later = True

    def __init__(self, node: Node, peers: TcpPeers) -> None:
        self._node = node
        self._peers = peers

    def owned_epoch(self, topic: str, partition: int) -> int | None:
        """Return the epoch in which this node leads a partition; None if another node does."""
        replica = self._node.replica((topic, partition))
        leader = None if replica is None else replica.machine.leader
        return None if leader is None else leader.view.leader_epoch

    def partition_count(self, topic: str) -> int:
        """Return how many partitions an internal topic has."""
        known = self._node.image.topics.get(topic)
        return PARTITIONS if known is None else len(known.partitions)

    # ---- records ----

    def append(
        self,
        topic: str,
        partition: int,
        epoch: int,
        records: Sequence[Record],
        done: Appended,
        *,
        producer: tuple[int, int] | None = None,
        durability: str | None = None,
    ) -> Callable[[], object]:
        """Append records as the leader in this epoch; see Quorum."""
        answer = _Answer(topic, partition, epoch, done)
        replica = self._node.replica((topic, partition))
        if replica is None:
            return lambda: done(NotCoordinatorError(topic, partition))
        # The caller holds locks: calls that the append causes are made by `finish`.
        with holding():
            replica.produce(
                _encoded(records, producer),
                ALL,
                answer.settle,
                origin="coordinator",
                leader_epoch=epoch,
            )

        def finish() -> None:
            answer.release()
            run_later()

        return finish

    # ---- markers ----

    def mark(
        self,
        partitions: Collection[Key],
        *,
        producer_id: int,
        producer_epoch: int,
        commit: bool,
        coordinator_epoch: int,
        done: Marked,
    ) -> None:
        """Write the markers of a transaction; see Quorum."""
        marker = {
            "producer_id": producer_id,
            "producer_epoch": producer_epoch,
            "transaction_result": commit,
            "coordinator_epoch": coordinator_epoch,
        }
        image = self._node.image
        by_leader: dict[int, list[Key]] = {}
        markers = _Markers(set(partitions), done)
        for key in sorted(partitions):
            state = image.states.get(key)
            if image.assignment(key) is None:
                markers.settle(key, UnknownTopicError(key[0]))
            elif state is None or state.leader not in image.nodes:
                markers.settle(key, TimeoutError(f"{key[0]}-{key[1]} has no leader"))
            else:
                by_leader.setdefault(state.leader, []).append(key)
        for leader, keys in by_leader.items():
            if leader == self._node.id:
                for key in keys:
                    self.mark_here(key, marker, markers.settle)
            else:
                self._mark_there(leader, keys, marker, markers)

    def mark_here(
        self,
        key: Key,
        marker: Mapping[str, Any],
        done: Callable[[Key, BaseException | None], object],
    ) -> None:
        """Write a marker into a partition that this node leads; `done` when it is committed."""
        replica = self._node.replica(key)
        if replica is None:
            done(key, KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER))
            return
        partition = replica.log.partition

        def append() -> range:
            at = partition.end_transaction(
                marker["producer_id"],
                marker["producer_epoch"],
                commit=marker["transaction_result"],
                coordinator_epoch=max(0, marker["coordinator_epoch"]),
                durability="os",
            )
            return range(at, at + 1)

        def ended(outcome: Produced) -> None:
            if not outcome.code:
                done(key, None)
            elif isinstance(outcome.error, FencedError):
                done(key, _fenced(key, partition, marker, outcome.error))
            else:
                done(key, outcome.error or KafkaError(ErrorCode(outcome.code)))

        replica.append(append, ALL, ended)

    def _mark_there(
        self, leader: int, keys: list[Key], marker: Mapping[str, Any], markers: _Markers
    ) -> None:
        topics: dict[str, list[int]] = {}
        for topic, number in keys:
            topics.setdefault(topic, []).append(number)
        rows = [{"name": name, "partition_indexes": each} for name, each in topics.items()]
        body = {"markers": [{**marker, "topics": rows}]}

        def answered(answer: dict[str, Any] | None) -> None:
            found: dict[Key, int] = {}
            for each in [] if answer is None else answer["markers"]:
                for topic in each["topics"]:
                    for row in topic["partitions"]:
                        found[topic["name"], row["partition_index"]] = row["error_code"]
            for key in keys:
                markers.settle(key, _refusal(key, found.get(key), marker["producer_epoch"]))

        version = WRITE_TXN_MARKERS_VERSION
        self._peers.request(leader, WRITE_TXN_MARKERS, version, body, answered)


def _encoded(records: Sequence[Record], producer: tuple[int, int] | None) -> bytes:
    if producer is not None:
        return b"".join(transactional_batches(records, producer))
    encoder = BatchEncoder()
    for record in records:
        encoder.append(
            record.value, key=record.key, headers=record.headers, timestamp=record.timestamp
        )
    return encoder.take()


def _fenced(
    key: Key, partition: Any, marker: Mapping[str, Any], error: FencedError
) -> BaseException:
    """Tell a marker of an old producer epoch from one of an old coordinator."""
    known = partition.parts.reader.known_producer(marker["producer_id"])
    if known is not None and known.epoch <= marker["producer_epoch"]:
        return NotCoordinatorError(*key)
    return error


def _refusal(key: Key, code: int | None, producer_epoch: int) -> BaseException | None:
    """Return what an error code of another node means for a marker; None: it is written."""
    if code == ErrorCode.NONE:
        return None
    where = f"{key[0]}-{key[1]}"
    if code is None:
        return TimeoutError(f"{where}: its leader did not answer")
    if code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
        return UnknownTopicError(key[0])
    if code == ErrorCode.INVALID_PRODUCER_EPOCH:
        return FencedError(producer_epoch, producer_epoch + 1, where=where)
    if code == ErrorCode.TRANSACTION_COORDINATOR_FENCED:
        return NotCoordinatorError(*key)
    return KafkaError(ErrorCode(code))


class _Answer:
    """The outcome of an append, which the caller gets after it has released its locks."""

    def __init__(self, topic: str, partition: int, epoch: int, done: Appended) -> None:
        self._place = topic, partition
        self._epoch = epoch
        self._done = done
        self._lock = threading.Lock()
        self._released = False
        self._result: range | BaseException | None = None

    def settle(self, outcome: Produced) -> None:
        self._end(self._of(outcome), release=False)

    def release(self) -> None:
        self._end(None, release=True)

    def _end(self, result: range | BaseException | None, *, release: bool) -> None:
        with self._lock:
            self._released = self._released or release
            if result is not None:
                self._result = result
            if not self._released or self._result is None:
                return
            result = self._result
        self._done(result)

    def _of(self, outcome: Produced) -> range | BaseException:
        topic, partition = self._place
        if not outcome.code:
            return outcome.offsets
        if outcome.offsets:
            return IndeterminateAppendError(
                f"{topic}-{partition}: epoch {self._epoch} has ended",
                offsets=outcome.offsets,
                leader_epoch=self._epoch,
            )
        if outcome.error is not None:
            return outcome.error
        if outcome.code == ErrorCode.NOT_ENOUGH_REPLICAS:
            return NotEnoughReplicasError(0, 0, where=f"{topic}-{partition}")
        return NotCoordinatorError(topic, partition)


class _Markers:
    """The partitions of a transaction whose markers are being written."""

    def __init__(self, left: set[Key], done: Marked) -> None:
        self._left = left
        self._done = done
        self._lock = threading.Lock()
        self._failed: dict[Key, BaseException] = {}
        if not left:
            done({})

    def settle(self, key: Key, error: BaseException | None) -> None:
        with self._lock:
            if key not in self._left:
                return
            self._left.discard(key)
            if error is not None:
                self._failed[key] = error
            if self._left:
                return
        self._done(self._failed)


class ProducerIdBlocks:
    """Producer ids of a cluster, in blocks of 1,000 that a node takes from the metadata tree."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._next = self._end = 0

    def take(self, above: int) -> int:
        """Return an id above `above` that no other producer has.  Waits for the tree."""
        with self._lock:
            while self._next >= self._end or self._next <= above:
                if self._next < self._end and self._end > above + 1:
                    self._next = above + 1
                    break
                self._take_block(above)
            found = self._next
            self._next += 1
            return found

    def _take_block(self, above: int) -> None:
        node = self._node
        before = node.image.producer_ids
        last = -1 if before is None else int(before[0]["block_end"])
        start = max(last, above) + 1
        data = as_json(
            {
                "version": 1,
                "broker": node.id,
                "block_start": str(start),
                "block_end": str(start + BLOCK_IDS - 1),
            }
        )
        op: Op = (
            Create(PRODUCER_IDS, data) if before is None else Set(PRODUCER_IDS, data, before[1])
        )
        ended = threading.Event()
        outcomes: list[Outcome] = []

        def done(outcome: Outcome) -> None:
            outcomes.append(outcome)
            ended.set()

        node.commit((op,), done)
        if not ended.wait(BLOCK_SECONDS):
            why = "no producer id: the metadata did not answer"
            raise CoordinatorNotAvailableError("producer ids", 0, why)
        if isinstance(outcomes[0], Committed):
            self._next, self._end = start, start + BLOCK_IDS
