"""LocalQuorum: a store without replicas, as coordinators see it.

Every partition is led here.  An append is written at once, and counts when it is as durable as its
partition asks.  Everything ends in the caller's thread; errors are raised, not passed to `done`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from logstore.coordinators.internal_topics import PARTITIONS, internal_topic
from logstore.errors import LogStoreError
from logstore.format.batch import split, with_producer
from logstore.format.encoder import BatchEncoder
from logstore.partition.partition import Partition
from logstore.record import Record
from logstore.store.store import Store

__all__ = ["LocalQuorum", "transactional_batches"]


def transactional_batches(records: Sequence[Record], producer: tuple[int, int]) -> list[bytes]:
    """Return records as batches of a producer's transaction.

    Each batch starts at sequence 0: append it with origin "coordinator", which checks no sequence.
    """
    encoder = BatchEncoder()
    for record in records:
        encoder.append(record.value, key=record.key, timestamp=record.timestamp)
    return [
        with_producer(
            raw, producer_id=producer[0], producer_epoch=producer[1], base_sequence=0,
            transactional=True,
        )
        for _, raw in split(encoder.take())
    ]  # fmt: skip


class LocalQuorum:
    """The partitions of one store.  It has no state."""

    answers_later = False

    def __init__(self, store: Store) -> None:
        self._store = store

    def _log(self, topic: str, partition: int) -> Partition:
        known = self._store.get(topic) or internal_topic(self._store, topic)
        return self._store.topic_changes.make_partition(known, partition)

    def owned_epoch(self, topic: str, partition: int) -> int | None:
        """Return the leader epoch of the log, which is made if it does not exist."""
        return self._log(topic, partition).leader_epoch

    def partition_count(self, topic: str) -> int:
        """Return how many partitions the topic has, or will have."""
        if topic not in self._store:
            return PARTITIONS
        return self._store.topic_changes.declared_partitions(self._store[topic])

    def append(
        self,
        topic: str,
        partition: int,
        epoch: int,
        records: Sequence[Record],
        done: Callable[[range | BaseException], object],
        *,
        producer: tuple[int, int] | None = None,
        durability: str | None = None,
    ) -> Callable[[], object]:
        """Append now; the function that is returned makes the records durable."""
        log = self._log(topic, partition)
        if producer is None and len(records) == 1:
            (record,) = records
            at = log.append(
                record.value, key=record.key, headers=record.headers, timestamp=record.timestamp,
                durability="os",
            )  # fmt: skip
            offsets = range(at, at + 1)
        elif producer is None:
            offsets = log.extend(records, durability="os")
        else:
            start = log.end_offset
            for raw in transactional_batches(records, producer):
                log.append_batch(raw, origin="coordinator", durability="os")
            offsets = range(start, log.end_offset)
        fsync = (durability or log.durability) == "fsync"

        def finish() -> None:
            # Not in `append`: the caller holds locks there, and concurrent appends share an fsync.
            if fsync:
                log.parts.appender.make_durable(offsets)
            done(offsets)

        return finish

    def mark(
        self,
        partitions: Collection[tuple[str, int]],
        *,
        producer_id: int,
        producer_epoch: int,
        commit: bool,
        coordinator_epoch: int,
        done: Callable[[Mapping[tuple[str, int], BaseException]], object],
    ) -> None:
        """Write all markers, then make all of them durable: they share fsyncs."""
        marked: list[tuple[Partition, int]] = []
        failed: dict[tuple[str, int], BaseException] = {}
        for topic, number in sorted(partitions):
            try:
                partition = self._store[topic][number]
                at = partition.end_transaction(
                    producer_id,
                    producer_epoch,
                    commit=commit,
                    coordinator_epoch=coordinator_epoch,
                    durability="os",
                )
            except (LogStoreError, IndexError, OSError) as error:
                failed[topic, number] = error  # mark the other partitions first
            else:
                marked.append((partition, at))
        for partition, at in marked:
            if partition.durability == "fsync":
                partition.parts.appender.make_durable(range(at, at + 1))
        done(failed)
