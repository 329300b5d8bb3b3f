"""Subscription: the partitions of a path that a query reads, opened for reading.

A path is a store (or a broker's log directory), one of its topics (``store/orders``), or one
partition (``store/orders-0``).  The last two choose what is read; a store needs ``subscribe``,
``subscribePattern`` or ``assign``.  Nothing is written, and no lock is taken: a writer or a broker
may be at work in the same directory.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, Self

import logstore
from logstore import NotALogError, Partition, Store, Topic, UnknownTopicError
from pyspark_logstore.options import OptionError, SourceOptions
from pyspark_logstore.pattern import java_pattern

__all__ = ["Subscription", "TopicPartition", "cannot_see"]

# Kafka's own: a pattern does not mean them.
INTERNAL = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state"})
PARTITION_NAME = re.compile(r"(?P<topic>.+)-(?P<number>\d+)")


class TopicPartition(NamedTuple):
    """A partition by its topic's name and its number."""

    topic: str
    number: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.number}"


def cannot_see(path: str | Path, who: str) -> FileNotFoundError:
    """The error of a process that looks for files that are on another machine, or nowhere."""
    return FileNotFoundError(
        f"{who} on host {socket.gethostname()} cannot see {path}: the path must be there, under "
        f"the same name, on the driver and on every executor (a shared file system, or one "
        f"machine); a log on another machine is read through its broker, with format('kafka')"
    )


class Subscription:
    """The partitions a query reads.  ``with`` closes what it opened."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._store: Store | None = None
        self._alone: Partition | None = None  # a partition whose directory above is no store
        self._topics: tuple[str, ...] = options.subscribe
        self._assigned = dict(options.assign)
        self._pattern = None if options.pattern is None else java_pattern(options.pattern)
        self._open(Path(options.path))

    # ---- opening ----

    def _open(self, path: Path) -> None:
        chosen = bool(self._topics or self._assigned or self._pattern)
        if path.is_dir():
            named = PARTITION_NAME.fullmatch(path.resolve().name)
            if named is not None and any(path.glob("*.log")):
                self._refuse_choice(chosen, "one partition")
                self._open_partition(path, named["topic"], int(named["number"]))
                return
            if not chosen:
                raise OptionError(
                    "subscribe",
                    f"is missing: {path} is a directory of topics; name some with subscribe, "
                    f"subscribePattern or assign, or give {path}/TOPIC as the path",
                )
            self._store = logstore.open(path, readonly=True)
            return
        if any(path.parent.glob(f"{_literal(path.name)}-[0-9]*")):
            self._refuse_choice(chosen, "one topic")
            self._store = logstore.open(path.parent, readonly=True)
            self._topics = (path.name,)
            return
        raise cannot_see(path, "the driver")

    def _open_partition(self, path: Path, topic: str, number: int) -> None:
        """In its store if there is one: only there are the topic's id and Kafka's checkpoints."""
        try:
            self._store = logstore.open(path.resolve().parent, readonly=True)
        except NotALogError:
            self._alone = Partition.open(path, readonly=True)
        self._assigned = {topic: (number,)}

    def _refuse_choice(self, chosen: bool, what: str) -> None:
        if chosen:
            raise OptionError(
                "path",
                f"{self._options.path} is {what}, which leaves nothing to choose: leave subscribe, "
                f"subscribePattern and assign out, or give the directory above as the path",
            )

    def close(self) -> None:
        """Close what was opened."""
        if self._store is not None:
            self._store.close()
        if self._alone is not None:
            self._alone.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close()

    # ---- what is there now ----

    @property
    def store(self) -> Path | None:
        """The store that the partitions are in; None for one that is in none."""
        return None if self._store is None else Path(self._store.path)

    def names(self, *, missing_ok: bool = False) -> list[TopicPartition]:
        """The subscribed partitions as they are now, in order.  Opens none of them.

        OptionError for a topic or a partition that was named and is not there, unless `missing_ok`.
        """
        if self._alone is not None:
            return [TopicPartition(self._alone.topic, self._alone.number)]
        found = []
        for topic in self._subscribed(missing_ok):
            there = topic.partition_numbers
            for number in self._assigned.get(topic.name, there):
                if number in there:
                    found.append(TopicPartition(topic.name, number))
                elif not missing_ok:
                    raise OptionError(
                        "assign",
                        f"topic {topic.name!r} has no partition {number}: it has "
                        f"{', '.join(map(str, there))}; assign only what is there",
                    )
        return sorted(found)

    def partitions(
        self,
        *,
        missing_ok: bool = False,
        wanted: Callable[[TopicPartition], bool] | None = None,
    ) -> dict[TopicPartition, Partition]:
        """Those of `names` that are `wanted`; opened, and kept open."""
        names = self.names(missing_ok=missing_ok)
        if self._alone is not None:
            return dict.fromkeys(names, self._alone)
        assert self._store is not None
        return {
            which: self._store[which.topic][which.number]
            for which in names
            if wanted is None or wanted(which)
        }

    def committed(self, group: str) -> dict[TopicPartition, int]:
        """The offsets a group has committed, of all partitions of the store."""
        if self._store is None:
            return {}
        from logstore import Groups

        committed = Groups(self._store).committed(group)
        return {TopicPartition(*which): found.offset for which, found in committed.items()}

    def ids(self) -> dict[str, str]:
        """The id of each subscribed topic that has one: made again, a topic has another."""
        if self._alone is not None:
            return {}
        topics = self._subscribed(missing_ok=True)
        return {topic.name: str(topic.id) for topic in topics if topic.id is not None}

    def _subscribed(self, missing_ok: bool) -> Iterable[Topic]:
        store = self._store
        assert store is not None
        if self._pattern is not None:
            pattern = self._pattern
            return [
                store[name]
                for name in sorted(store)
                if pattern.fullmatch(name) and name not in INTERNAL
            ]
        topics = []
        for name in sorted(self._assigned) or self._topics:
            try:
                topics.append(store[name])
            except UnknownTopicError:
                if missing_ok:
                    continue
                there = ", ".join(sorted(set(store) - INTERNAL)) or "none"
                option = "assign" if self._assigned else "subscribe"
                raise OptionError(
                    option, f"{store.path} has no topic {name!r}; it has {there}"
                ) from None
        return topics


def _literal(name: str) -> str:
    """A name as `glob` takes it literally."""
    return re.sub(r"([*?[])", r"[\1]", name)
