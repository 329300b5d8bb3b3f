"""Router: finds the lane of a partition for a topic and a key.

A route is a topic with its lanes.  The routes are a dict of the producer's C half, whose `send`
uses them without a call of Python.  Router makes a route, and makes it again if the topic has
changed.

Invariant: routes and lanes are made under `_making`, so that a partition has one lane.  A route
is not changed except for its lanes: a new one replaces it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

from logstore import _native
from logstore.config import ConfigError
from logstore.coordinators.internal_topics import INTERNAL_TOPICS, RESERVED_TOPICS
from logstore.errors import InvalidNameError
from logstore.format.batch import increment_sequence
from logstore.partitioner import (
    KeyPartitioner,
    Partitioner,
    RandomPartitioner,
    RoundRobinPartitioner,
)
from logstore.producer.lane import Lane, LaneOwner
from logstore.store.companions import expect_store
from logstore.store.store import Store
from logstore.store.topic import Topic, partition_number

__all__ = ["Route", "Router", "partitioner_of"]

PARTITIONERS: dict[str, Callable[[], Partitioner]] = {
    "default": KeyPartitioner,
    "round_robin": RoundRobinPartitioner,
    "random": RandomPartitioner,
}


class Route(_native.Route):
    """A topic, its lanes, and the partitioner that chooses among them."""

    topic: Topic
    partitioner: Partitioner


class RoutedProducer(LaneOwner, Protocol):
    """What a Router needs of its producer."""

    _making: threading.RLock  # held while a route or a lane is made

    @property
    def _routes(self) -> dict[str, Any]: ...
    def _set_route(self, topic: str, route: _native.Route, /) -> None: ...
    def _check_usable(self) -> None: ...


class Router:
    """The routes and lanes of one producer.  Threads may share it."""

    def __init__(
        self,
        producer: RoutedProducer,
        store: Store,
        partitioner: Partitioner | None,
        *,
        batch_bytes: int,
        compression: str | None,
        compression_level: int | None,
    ) -> None:
        self._producer = producer
        self._store = expect_store(store, "Producer")
        self._partitioner = partitioner
        self._batch_bytes = batch_bytes
        self._compression = compression
        self._compression_level = compression_level

    def find(self, name: str, *, internal: bool = False) -> Route:
        """Return the route to a topic; make one if the topic has changed.

        Raises InvalidNameError for an internal topic, unless its owner calls with `internal`.
        """
        # `send` finds routes by the names of topics.  No topic has a space in its name.
        known_as = f"{name} internal" if internal else name
        route = cast("Route | None", self._producer._routes.get(known_as))
        if route is not None:
            topic = route.topic
            # The route is valid unless partitions were added or the topic's partitioner was set.
            known = not topic.deleted and topic.partition_numbers[-1] + 1 == len(route.lanes)
            if known and (self._partitioner or route.partitioner is topic.partitioner):
                return route
        with self._producer._making:
            if name in INTERNAL_TOPICS and not internal:
                owner = "logstore" if name in RESERVED_TOPICS else "the coordinators"
                raise InvalidNameError(f"{name!r} is written by {owner} only")
            topic = self._store[name]
            numbers = topic.partition_numbers
            # Indexed by partition number, which C uses directly.  Numbers may be missing.
            lanes: list[Lane | None] = [None] * (max(numbers, default=-1) + 1)
            # Lanes hold records and sequences: a new route takes over those of the old one.
            if route is not None and route.topic is topic:
                for number, lane in enumerate(route.lanes[: len(lanes)]):
                    lanes[number] = lane
            partitioner = self._partitioner or topic.partitioner
            made = Route(lanes, len(numbers) == len(lanes) and type(partitioner) is KeyPartitioner)
            made.topic = topic
            made.partitioner = partitioner
            # Published last, as a whole: `send` reads routes without a lock.
            self._producer._set_route(known_as, made)
            return made

    def choose(self, route: Route, key: Any, value: Any, partition: int | None) -> int:
        """Return the number of the partition for a record."""
        topic = route.topic
        if partition is not None:
            number = partition_number(partition)
            _ = topic[number]  # raises IndexError if there is no such partition
            return number
        if not route.hashed or key is not None:
            return topic.choose_partition(key, value, route.partitioner)
        if route.left <= 0:
            sticky = cast(KeyPartitioner, route.partitioner)
            route.current = sticky.move(len(route.lanes))
            # Stay on the partition for the bytes of a batch; for ever if it is the only one.
            alone = len(route.lanes) == 1
            route.left = 1 << 62 if alone else max(sticky.batch_bytes, self._batch_bytes)
        route.left -= max(1, 0 if value is None else len(value))
        return route.current

    def lane(self, route: Route, number: int) -> Lane:
        """Return the lane of a partition; make one if there is none, or its partition was closed.

        The partition holds the lane and closes it with itself (`Writers.add`).
        """
        lane = cast("Lane | None", route.lanes[number])
        if lane is None or lane.partition.closed:
            with self._producer._making:
                # Look again: another thread may have made the lane before we got the lock.
                lane = cast("Lane | None", route.lanes[number])
                if lane is None or lane.partition.closed:
                    self._producer._check_usable()
                    try:
                        partition = route.topic[number]
                    except OSError as error:
                        self._producer.explain(error)  # adds a note if descriptors ran out
                        raise
                    lane = Lane(
                        self._producer,
                        partition,
                        batch_bytes=self._batch_bytes,
                        compression=self._compression,
                        compression_level=self._compression_level,
                    )
                    # Before the lane is published: the first record may be written at once.
                    lane.sequence = self._first_sequence(lane)
                    partition.parts.appender.writers.add(lane)
                    route.lanes[number] = lane
        return lane

    def _first_sequence(self, lane: Lane) -> int:
        """Return 0, or the next sequence if the producer wrote to the partition before a reopen."""
        producer_id, epoch = self._producer.identity
        entry = None if producer_id < 0 else lane.partition.parts.reader.known_producer(producer_id)
        if entry is None or entry.epoch != epoch:
            return 0
        return increment_sequence(entry.last_sequence, 1)

    def lanes(self) -> Iterator[Lane]:
        """Yield all lanes that were made."""
        # Copies: other threads make routes and lanes during the iteration.
        for route in list(self._producer._routes.values()):
            for lane in list(route.lanes):
                if lane is not None:
                    yield lane


def partitioner_of(given: Partitioner | str | None) -> Partitioner | None:
    """Return the partitioner of a producer's setting; None: the topic's partitioner."""
    if given is None or callable(given):
        return given
    if given not in PARTITIONERS:
        raise ConfigError(
            f"no partitioner {given!r}: pass a callable, or one of "
            f"{', '.join(map(repr, PARTITIONERS))}"
        )
    return PARTITIONERS[given]()
