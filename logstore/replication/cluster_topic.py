"""ClusterTopic, ClusterPartition: topics of a Cluster, read and appended to at their leaders."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol

from logstore.errors import NotLeaderError, UnknownTopicError
from logstore.partition.partition import Partition
from logstore.partition.scan import Scan
from logstore.partitioner import KeyPartitioner, Partitioner
from logstore.record import Record
from logstore.replication.hosting.hosted import HostedReplica
from logstore.replication.machines.image import ClusterImage, Key
from logstore.replication.status import ClusterStatus, PartitionStatus
from logstore.store.topic import Position

__all__ = ["Acks", "ClusterPartition", "ClusterTopic", "Home", "Reassignment"]

Acks = Literal["all", 0, 1, -1]


class Home(Protocol):
    """The Cluster, as its topics use it."""

    path: Path
    timeout: float

    @property
    def image(self) -> ClusterImage: ...
    def status(self) -> ClusterStatus: ...
    def leader(self, key: Key) -> HostedReplica | None: ...
    def moving(self, keys: Sequence[Key]) -> list[Key]: ...
    def reassign(self, targets: Mapping[Key, Sequence[int] | None]) -> Reassignment: ...
    def produce(
        self,
        key: Key,
        append: Callable[[Partition], range],
        acks: Acks,
        timeout: float | None,
    ) -> range: ...


class ClusterTopic(Sequence["ClusterPartition"]):
    """A topic of a cluster: the sequence of its partitions, by number."""

    def __init__(self, cluster: Home, name: str) -> None:
        self.name = name
        self.partitioner: Partitioner = KeyPartitioner()
        self._cluster = cluster
        self._partitions: dict[int, ClusterPartition] = {}

    def __repr__(self) -> str:
        return f"<ClusterTopic {self.name!r} of {len(self)} partitions>"

    def __len__(self) -> int:
        found = self._cluster.image.topics.get(self.name)
        if found is None:
            raise UnknownTopicError(self.name, where=f"the cluster {self._cluster.path}")
        return len(found.partitions)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        if not 0 <= number < len(self):
            raise IndexError(f"topic {self.name!r} has no partition {number}")
        found = self._partitions.get(number)
        if found is None:
            made = ClusterPartition(self._cluster, self.name, number)
            found = self._partitions.setdefault(number, made)
        return found

    def append(
        self,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Iterable[tuple[str, bytes | None]] = (),
        timestamp: int | datetime.datetime | None = None,
        partition: int | None = None,
        acks: Acks = "all",
        timeout: float | None = None,
    ) -> Position:
        """Append one record at the leader of its partition; return its position.

        ``acks="all"``: returns when every replica in sync has it.  ``acks=1``: when the leader has
        it.  ``acks=0``: when it is in the leader's log.  Raises, with nothing appended,
        NotEnoughReplicasError and NotLeaderError, or IndeterminateAppendError if the record may be
        committed later.
        """
        number = self.partitioner(key, value, len(self)) if partition is None else partition

        def append(log: Partition) -> range:
            offset = log.append(
                value, key=key, headers=headers, timestamp=timestamp, durability="os"
            )
            return range(offset, offset + 1)

        offsets = self._cluster.produce((self.name, number), append, acks, timeout)
        return Position(self.name, number, offsets.start)

    def extend(
        self,
        records: Iterable[bytes | Record],
        *,
        partition: int | None = None,
        acks: Acks = "all",
        timeout: float | None = None,
    ) -> list[Position]:
        """Append many records, each to the partition of its key; return their positions."""
        given = list(records)
        shares: dict[int, list[int]] = {}
        for place, record in enumerate(given):
            number = partition
            if number is None:
                if isinstance(record, Record):
                    number = self.partitioner(record.key, record.value, len(self))
                else:
                    number = self.partitioner(None, record, len(self))
            shares.setdefault(number, []).append(place)
        positions: dict[int, Position] = {}
        for number, places in shares.items():
            chosen = [given[place] for place in places]
            offsets = self._cluster.produce(
                (self.name, number),
                lambda log, chosen=chosen: log.extend(chosen, durability="os"),  # type: ignore[misc]
                acks,
                timeout,
            )
            for place, offset in zip(places, offsets, strict=True):
                positions[place] = Position(self.name, number, offset)
        return [positions[place] for place in range(len(given))]


class ClusterPartition:
    """A partition of a cluster, read at its leader: records below the high watermark."""

    def __init__(self, cluster: Home, topic: str, number: int) -> None:
        self.topic = topic
        self.number = number
        self._cluster = cluster

    def __repr__(self) -> str:
        return f"<ClusterPartition {self.topic}-{self.number}>"

    @property
    def status(self) -> PartitionStatus:
        """Its leader, its replicas and the end of each log."""
        for row in self._cluster.status().partitions:
            if (row.topic, row.partition) == (self.topic, self.number):
                return row
        raise UnknownTopicError(self.topic, where=f"the cluster {self._cluster.path}")

    @property
    def leader(self) -> int:
        """The node that leads it; -1: none."""
        return self.status.leader

    @property
    def leader_epoch(self) -> int:
        """The number of the reign of its leader."""
        return self.status.leader_epoch

    @property
    def isr(self) -> tuple[int, ...]:
        """The nodes that are in sync."""
        return self.status.isr

    @property
    def elr(self) -> tuple[int, ...]:
        """The nodes that are not in sync, and have every committed record nevertheless."""
        return self.status.elr

    @property
    def ends(self) -> Mapping[int, int]:
        """The end offset of the log of each node that runs."""
        return self.status.ends

    def log(self) -> Partition:
        """Return the leader's log, to read: an append to it would not be replicated."""
        until = time.monotonic() + self._cluster.timeout
        while True:
            replica = self._cluster.leader((self.topic, self.number))
            if replica is not None and replica.shows_committed:
                return replica.log.partition
            if time.monotonic() >= until:
                raise NotLeaderError(f"{self.topic}-{self.number}", epoch=self.leader_epoch)
            time.sleep(0.005)

    @property
    def start_offset(self) -> int:
        """The first offset at the leader."""
        return self.log().start_offset

    @property
    def high_watermark(self) -> int:
        """The end of the committed records, as the leader has it."""
        return self.log().high_watermark

    def scan(self, start: int | None = None, stop: int | None = None, **options: Any) -> Scan:
        """Read committed records at the leader; see `Partition.scan`."""
        return self.log().scan(start, stop, **options)


class Reassignment:
    """A move of replicas.  ``with`` waits for nothing: an error inside cancels the move."""

    def __init__(self, cluster: Home, keys: Sequence[Key]) -> None:
        self._cluster = cluster
        self._keys = tuple(keys)

    @property
    def moving(self) -> list[Key]:
        """The partitions whose replicas are still being moved."""
        return self._cluster.moving(self._keys)

    def wait(self, timeout: float | None = None) -> None:
        """Return when all replicas are moved; raise TimeoutError after `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        while self.moving:
            if until is not None and time.monotonic() >= until:
                raise TimeoutError(f"still moving after {timeout:g} s: {self.moving}")
            time.sleep(0.01)

    def cancel(self) -> None:
        """Move the replicas back to where they were."""
        self._cluster.reassign(dict.fromkeys(self.moving))

    def __enter__(self) -> Reassignment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and self.moving:
            self.cancel()
