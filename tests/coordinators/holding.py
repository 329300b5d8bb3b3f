"""HoldingQuorum: a quorum on real logs that commits, refuses and loses appends when it is told to.

An append waits in the queue of its partition, in the sequence of the calls.  `commit` writes the
first one to the log and answers; so what is in the log is what is committed.  Partitions are
independent: a test commits them in any sequence.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence

from logstore import NotCoordinatorError, NotEnoughReplicasError, Record, Store
from logstore.coordinators.internal_topics import PARTITIONS, internal_topic
from logstore.coordinators.quorum.local import transactional_batches
from logstore.coordinators.quorum.quorum import Appended, Coordination, Marked
from logstore.errors import IndeterminateAppendError
from logstore.partition.partition import Partition

Place = tuple[str, int]


@dataclasses.dataclass(slots=True)
class Held:
    """An append that waits."""

    place: Place
    epoch: int
    records: Sequence[Record]
    producer: tuple[int, int] | None
    done: Appended


@dataclasses.dataclass(slots=True)
class HeldMarkers:
    """Markers that wait."""

    partitions: list[Place]
    producer: tuple[int, int]
    commit: bool
    coordinator_epoch: int
    done: Marked


class HoldingQuorum:
    """The replicas of a store's partitions, moved by hand."""

    answers_later = True

    def __init__(self, store: Store) -> None:
        self.store = store
        self.epochs: dict[Place, int] = {}  # of the partitions that this node leads
        self.held: defaultdict[Place, deque[Held]] = defaultdict(deque)
        self.markers: list[HeldMarkers] = []
        self.late: list[Held] = []  # appends of a reign that has ended
        self.next_id = 1000
        Coordination.of(store).replace(self, self.take_producer_id)

    def take_producer_id(self, above: int) -> int:
        self.next_id = max(self.next_id, above) + 1
        return self.next_id

    # ---- what coordinators call ----

    def owned_epoch(self, topic: str, partition: int) -> int | None:
        return self.epochs.get((topic, partition))

    def partition_count(self, topic: str) -> int:
        return PARTITIONS

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
        place = topic, partition
        if self.epochs.get(place) != epoch:
            return lambda: done(NotCoordinatorError(*place))
        self.held[place].append(Held(place, epoch, records, producer, done))
        return lambda: None

    def mark(
        self,
        partitions: Collection[Place],
        *,
        producer_id: int,
        producer_epoch: int,
        commit: bool,
        coordinator_epoch: int,
        done: Marked,
    ) -> None:
        producer = producer_id, producer_epoch
        self.markers.append(
            HeldMarkers(sorted(partitions), producer, commit, coordinator_epoch, done)
        )

    # ---- what tests call ----

    def log(self, place: Place) -> Partition:
        topic = internal_topic(self.store, place[0])
        return self.store.topic_changes.make_partition(topic, place[1])

    def lead(self, place: Place, epoch: int) -> None:
        """Begin a reign of this node."""
        self.log(place).become_leader(epoch)
        self.epochs[place] = epoch

    def lose(self, place: Place) -> int:
        """End the reign: what waits is neither committed nor refused.  Return its epoch."""
        self.late += self.held.pop(place, ())
        return self.epochs.pop(place)

    def places(self) -> list[Place]:
        """Return the partitions with appends that wait."""
        # A copy: another thread may append.
        return sorted(place for place, queue in list(self.held.items()) if queue)

    def write(self, held: Held) -> range:
        """Write an append to the log of its partition."""
        log = self.log(held.place)
        start = log.end_offset
        if held.producer is None:
            log.extend(held.records, durability="os")
        else:
            for raw in transactional_batches(held.records, held.producer):
                log.append_batch(raw, origin="coordinator", durability="os")
        return range(start, log.end_offset)

    def commit(self, place: Place) -> None:
        """Commit the first append of a partition."""
        held = self.held[place].popleft()
        held.done(self.write(held))

    def refuse(self, place: Place) -> None:
        """Refuse the first append of a partition: too few replicas are in sync."""
        self.held[place].popleft().done(NotEnoughReplicasError(1, 2, where=f"{place}"))

    def break_off(self, place: Place) -> None:
        """Answer the first append of a partition as if the reign had ended."""
        held = self.held[place].popleft()
        held.done(IndeterminateAppendError("deposed", offsets=range(1), leader_epoch=held.epoch))

    def commit_all(self) -> None:
        """Commit all that waits, and all that follows from it."""
        while self.places() or self.markers:
            while self.places():
                self.commit(self.places()[0])
            if self.markers:
                self.write_markers()

    def write_markers(self, failing: Collection[Place] = (), error: BaseException | None = None
                      ) -> HeldMarkers:  # fmt: skip
        """Write the markers that wait longest, except in some partitions; return them."""
        held = self.markers.pop(0)
        missing: dict[Place, BaseException] = {}
        for place in held.partitions:
            if place in failing:
                missing[place] = error or TimeoutError("no answer")
                continue
            self.store[place[0]][place[1]].end_transaction(
                *held.producer, commit=held.commit, coordinator_epoch=held.coordinator_epoch,
                durability="os",
            )  # fmt: skip
        held.done(missing)
        return held

    def answer_late(self) -> None:
        """Answer the appends of reigns that have ended, as if they had been committed."""
        late, self.late = self.late, []
        for held in late:
            held.done(range(10**6, 10**6 + len(held.records)))
