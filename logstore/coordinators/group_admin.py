"""Groups: inspect and change the groups of a store, without being a member.

    groups = Groups(store)
    groups.commit("nightly", {("orders", 0): 1200})          # without a consumer
    groups.describe("workers").state                         # 'Stable'
    groups.reset_offsets("workers", to="earliest", dry_run=True)

Of a store that is open readonly, groups can be inspected and not changed.  The GroupCoordinator
makes each change under the lock of its group; this class has no state.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import os
from collections.abc import Iterable, Iterator, Mapping

from logstore.clock import Clock, SystemClock
from logstore.config import ConfigError
from logstore.coordinators.consumer_group.machine import ConsumerGroupMachine
from logstore.coordinators.consumer_group.room import StoreTopics
from logstore.coordinators.group_coordinator import GroupCoordinator
from logstore.coordinators.group_events import GroupState, Transition
from logstore.coordinators.group_protocol import PROTOCOL_TYPE, Assignment, Subscription
from logstore.coordinators.lag import Lag, lag_of
from logstore.coordinators.offset_book import OffsetBook, Offsets, as_committed
from logstore.coordinators.offset_records import CommittedOffset, GroupMetadata, TopicPartition
from logstore.errors import LogStoreError, RebalanceError, UnknownTopicError
from logstore.partition.partition import Partition
from logstore.store.store import Store

__all__ = ["GroupDescription", "GroupMemberDescription", "Groups", "OffsetReset"]


@dataclasses.dataclass(frozen=True, slots=True)
class GroupMemberDescription:
    """One member of a group."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    topics: tuple[str, ...]
    assignment: tuple[TopicPartition, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class GroupDescription:
    """A group: Kafka's name of its state, its members, and the latest changes of its state."""

    group_id: str
    state: str
    generation: int
    protocol_type: str
    protocol: str | None
    leader: str | None
    coordinator_partition: int
    members: tuple[GroupMemberDescription, ...]
    history: tuple[Transition, ...] = ()
    group_type: str = "classic"  # or "consumer": a group of KIP-848, see `Groups.describe`


@dataclasses.dataclass(frozen=True, slots=True)
class OffsetReset:
    """The change of one partition by a reset; `before` is None if no offset was committed."""

    partition: TopicPartition
    before: int | None
    after: int
    start: int
    end: int

    def __str__(self) -> str:
        before = "-" if self.before is None else self.before
        return f"{self.partition}: {before} -> {self.after} of [{self.start}, {self.end})"


class Groups:
    """The groups of a store.  Iterating gives their names.  Threads may share one."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._book = OffsetBook.of(store)
        self._clock: Clock = store.clock or SystemClock()

    @property
    def _coordinator(self) -> GroupCoordinator:
        # Looked up when it is needed: a readonly store has none, and can be inspected without it.
        return GroupCoordinator.of(self._store)

    # ---- inspecting ----

    def names(self) -> list[str]:
        """Return the names of all groups that have members or committed offsets."""
        if self._store.readonly:
            return self._book.groups()
        return self._coordinator.group_ids()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __contains__(self, group_id: object) -> bool:
        return group_id in self.names()

    def describe(self, group_id: str) -> GroupDescription:
        """Return state, members and history; the state of an unknown group is Dead, as in Kafka.

        Of a group of the consumer protocol, `generation` is the epoch, `protocol` the assignor, and
        it has no leader and no history.
        """
        number = self._book.partition_of(group_id) if self._book.partitions else 0
        saved = self._book.consumer_group(group_id)
        if saved is not None:
            topics = StoreTopics(self._store)
            return _consumer_description(
                ConsumerGroupMachine(group_id, topics, state=saved), number
            )
        if self._store.readonly:
            known = self._book.knows(group_id)
            metadata = self._book.metadata(group_id) or GroupMetadata("", 0, None, None)
            state = GroupState.STABLE if metadata.members else GroupState.EMPTY
            history: tuple[Transition, ...] = ()
        else:
            # One lock for all reads: state, members and history belong to one moment.
            with self._coordinator.locked(group_id) as machine:
                known = bool(machine.members or machine.history) or self._book.knows(group_id)
                metadata, state = machine.metadata(), machine.state
                history = tuple(machine.history)
        return GroupDescription(
            group_id=group_id,
            state=str(state if known else GroupState.DEAD),
            generation=metadata.generation,
            protocol_type=metadata.protocol_type,
            protocol=metadata.protocol,
            leader=metadata.leader,
            coordinator_partition=number,
            members=tuple(
                GroupMemberDescription(
                    member.member_id,
                    member.instance_id,
                    member.client_id,
                    member.client_host,
                    _topics(member.subscription),
                    _assignment(member.assignment),
                )
                for member in metadata.members
            ),
            history=history,
        )

    def history(self, group_id: str) -> tuple[Transition, ...]:
        """Return the latest changes of a group's state, oldest first, each with its reason."""
        return self.describe(group_id).history

    def committed(self, group_id: str) -> dict[TopicPartition, CommittedOffset]:
        """Return the committed offsets of a group."""
        return self._book.committed(group_id)

    def lag(self, group_id: str) -> dict[TopicPartition, Lag]:
        """Return the distance from a group's committed offsets to the ends of their partitions."""
        now = self._clock.time_ms()
        found = {}
        for tp, committed in sorted(self.committed(group_id).items()):
            log = self._log(tp)
            if log is not None and committed.offset >= 0:
                found[tp] = lag_of(log, committed.offset, now_ms=now)
        return found

    def _log(self, tp: TopicPartition) -> Partition | None:
        try:
            return self._store[tp.topic][tp.partition]
        except (UnknownTopicError, IndexError):
            return None

    # ---- changing ----

    def commit(
        self,
        group_id: str,
        offsets: Offsets,
        *,
        metadata: str = "",
    ) -> None:
        """Commit offsets without a consumer, all or none; they are durable when it returns.

        `offsets`: the next offset to read, by (topic, partition).  Raises UnknownTopicError or
        IndexError if a partition does not exist, and RebalanceError if the group has members: then
        only members may commit.
        """
        told = as_committed(offsets, self._clock.time_ms(), metadata)
        for topic, number in told:
            self._store[topic][number]  # raises if it does not exist
        self._coordinator.commit(group_id, told)

    def delete(self, group_id: str) -> None:
        """Remove a group and its committed offsets.  Raises RebalanceError if it has members."""
        self._coordinator.delete_group(group_id).result()

    def delete_offsets(self, group_id: str, partitions: Iterable[tuple[str, int]]) -> None:
        """Delete committed offsets.  Raises RebalanceError if a member reads one of the topics."""
        self._coordinator.delete_offsets(group_id, partitions).result()

    def remove_member(
        self, group_id: str, *, member_id: str = "", instance_id: str | None = None,
        reason: str = "removed by an administrator",
    ) -> None:  # fmt: skip
        """Remove a member from a group, by its id or, for a static member, its instance id."""
        error = self._coordinator.leave(
            group_id, member_id=member_id, instance_id=instance_id, reason=reason
        )
        if error:
            who = member_id or instance_id
            raise RebalanceError(f"no member {who!r} to remove", group=group_id, code=error)

    def expire_offsets(
        self, now: int | datetime.datetime | None = None
    ) -> dict[str, list[TopicPartition]]:
        """Delete offsets that were not committed for seven days; return them by group."""
        now_ms = round(now.timestamp() * 1000) if isinstance(now, datetime.datetime) else now
        return self._coordinator.expire_offsets(now_ms)

    # ---- reset ----

    def reset_offsets(
        self,
        group_id: str,
        partitions: Iterable[str | tuple[str, int]] | None = None,
        *,
        to: str | None = None,
        offset: int | None = None,
        shift: int | None = None,
        at: int | datetime.datetime | None = None,
        ago: datetime.timedelta | float | None = None,
        file: str | os.PathLike[str] | None = None,
        dry_run: bool = False,
    ) -> list[OffsetReset]:
        """Set a group's offsets in one of Kafka's eight ways; return the change of each partition.

        - ``to="earliest"``, ``to="latest"``: the first record, or the end;
        - ``to="current"``: the committed offset, moved into the log if it is outside of it;
        - ``offset=n``: this offset;
        - ``shift=n``: the committed offset plus n, which may be negative;
        - ``at=``: the first record at or after a time (a datetime, or int milliseconds);
        - ``ago=``: the same, for a time before now (a timedelta, or seconds);
        - ``file=``: a CSV of topic,partition,offset, as Kafka's tool exports.

        An offset outside of the log is replaced by the nearest end of the log.  `partitions` are
        topics or (topic, partition); by default all partitions with a committed offset.
        ``dry_run=True`` changes nothing.  Raises RebalanceError if the group has members, or if it
        does not exist and no partitions are named.
        """
        given = [name for name, value in (("to", to), ("offset", offset), ("shift", shift),
                 ("at", at), ("ago", ago), ("file", file)) if value is not None]  # fmt: skip
        if len(given) != 1:
            raise ConfigError(
                f"reset_offsets takes one of to, offset, shift, at, ago, file; not "
                f"{' and '.join(given) or 'none'}"
            )
        if to is not None and to not in ("earliest", "latest", "current"):
            raise ConfigError(f"to is 'earliest', 'latest' or 'current', not {to!r}")
        if group_id not in self and partitions is None and file is None:
            raise RebalanceError(
                "no such group, so that it has no offsets to move: name the partitions",
                group=group_id,
                code="GROUP_ID_NOT_FOUND",
            )
        before = self.committed(group_id)
        wanted = _from_file(file) if file is not None else {}
        chosen = list(wanted) if file is not None else self._scope(partitions, before)
        if ago is not None:
            at = self._clock.time_ms() - round(_span(ago).total_seconds() * 1000)
        resets = []
        for tp in sorted(chosen):
            log = self._store[tp.topic][tp.partition]
            start, end = log.start_offset, log.high_watermark
            known = before.get(tp)
            if file is not None:
                target = wanted[tp]
            elif offset is not None:
                target = offset
            elif at is not None:
                target = log.offset_for_time(at)
            elif shift is not None or to == "current":
                if known is None and shift is not None:
                    raise ConfigError(f"{tp} has no committed offset of {group_id!r} to shift")
                target = (end if known is None else known.offset) + (shift or 0)
            else:
                target = start if to == "earliest" else end
            # As Kafka's tool does; retention may still pass the offset before a member reads there.
            after = min(max(target, start), end)
            resets.append(
                OffsetReset(tp, None if known is None else known.offset, after, start, end)
            )
        if not dry_run and resets:
            # One append for all partitions.  The coordinator refuses it if a member has joined
            # since.
            self._coordinator.commit(group_id, {each.partition: each.after for each in resets})
        return resets

    def _scope(
        self,
        partitions: Iterable[str | tuple[str, int]] | None,
        committed: Mapping[TopicPartition, CommittedOffset],
    ) -> Iterable[TopicPartition]:
        if partitions is None:
            return list(committed)
        found = []
        for each in [partitions] if isinstance(partitions, str) else partitions:
            if isinstance(each, str):
                found += [TopicPartition(each, log.number) for log in self._store[each]]
            else:
                self._store[each[0]][each[1]]  # raises if it does not exist
                found.append(TopicPartition(*each))
        return found

    def __repr__(self) -> str:
        return f"<Groups of {str(self._store.path)!r}>"


def _consumer_description(machine: ConsumerGroupMachine, number: int) -> GroupDescription:
    members = tuple(
        GroupMemberDescription(
            member_id,
            member.instance_id,
            member.client_id,
            member.client_host,
            tuple(sorted(machine.topics_of(member_id))),
            tuple(machine.named(machine.current(member_id).assigned)),
        )
        for member_id, member in machine.members.items()
    )
    return GroupDescription(
        machine.group_id, machine.state_name, machine.epoch, PROTOCOL_TYPE, machine.assignor, None,
        number, members, group_type="consumer",
    )  # fmt: skip


def _span(ago: datetime.timedelta | float) -> datetime.timedelta:
    if isinstance(ago, datetime.timedelta):
        return ago
    try:
        return datetime.timedelta(seconds=ago)
    except TypeError:
        raise TypeError(f"ago is a timedelta or seconds, not {ago!r}") from None
    except (OverflowError, ValueError):
        raise ConfigError(f"ago is a timedelta or seconds, not {ago!r}") from None


def _topics(subscription: bytes) -> tuple[str, ...]:
    try:
        return Subscription.decode(subscription).topics
    except LogStoreError:
        return ()  # of another protocol type than "consumer"


def _assignment(assignment: bytes) -> tuple[TopicPartition, ...]:
    try:
        return Assignment.decode(assignment).partitions
    except LogStoreError:
        return ()


def _from_file(path: str | os.PathLike[str]) -> dict[TopicPartition, int]:
    """Read offsets from a CSV of topic,partition,offset."""
    found = {}
    with open(path, newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.reader(file), 1):
            if not row:
                continue
            try:
                topic, partition, offset = (field.strip().strip('"') for field in row)
                found[TopicPartition(topic, int(partition))] = int(offset)
            except ValueError:
                raise ConfigError(
                    f"{os.fspath(path)}, line {number}: topic,partition,offset is expected, not "
                    f"{','.join(row)!r}"
                ) from None
    return found
