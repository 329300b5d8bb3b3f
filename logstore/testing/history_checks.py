"""The checks of a history, one method for each kind of finding."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from logstore.testing.cycles import circular, way
from logstore.testing.history_findings import Copy, Finding, offset_of
from logstore.testing.operations import (
    COMMITTED,
    Assign,
    Commit,
    Committed,
    End,
    History,
    Operation,
    Poll,
    Read,
    Seek,
    Send,
    Snapshot,
)

_Stretch = tuple[int, int, Operation]


@dataclass(slots=True)
class _Partition:
    sends: list[tuple[Operation, Send]] = field(default_factory=list)
    # Operations that may have written a value, once a send; and those that certainly did not.
    writers: dict[Hashable, list[Operation]] = field(default_factory=dict)
    refused: dict[Hashable, list[Operation]] = field(default_factory=dict)
    # offset -> value -> who says so: acknowledgements and reads.
    at: dict[int, dict[Hashable, Operation]] = field(default_factory=dict)
    read: set[tuple[int, Hashable]] = field(default_factory=set)
    values_seen: set[Hashable] = field(default_factory=set)
    # offset -> the first committed reader that got something there.
    seen_committed: dict[int, Operation] = field(default_factory=dict)
    # Offsets that a committed reader must not pass over.
    certain: set[int] = field(default_factory=set)
    # (first, last, operation): a reader came from `first` to `last`, where it got something.
    stretches: list[_Stretch] = field(default_factory=list)
    stretches_committed: list[_Stretch] = field(default_factory=list)
    snapshots: list[tuple[Operation, Snapshot]] = field(default_factory=list)

    def claim(self, offset: int, value: Hashable, operation: Operation) -> None:
        values = self.at.get(offset)
        if values is None:
            self.at[offset] = {value: operation}
        elif value not in values:
            values[value] = operation

    def is_aborted(self, offset: int, value: Hashable) -> bool:
        """Whether a record that only uncommitted readers saw is known not to be committed."""
        known = _completion(self.at[offset][value])
        if any(s.isolation == COMMITTED and o.invoked > known for o, s in self.snapshots):
            return True  # that snapshot is of all committed records, and does not have it
        writers = self.writers.get(value, [])
        return bool(writers) and all(operation.outcome == "fail" for operation in writers)

    def came_through(self, first: int, last: int, operation: Operation, isolation: str) -> None:
        self.stretches.append((first, last, operation))
        if isolation == COMMITTED:
            self.stretches_committed.append((first, last, operation))


class Checker:
    """The history, sorted by partition; each method looks for one kind, or a few that go along."""

    def __init__(self, history: History, caught_up: bool) -> None:
        self.history = history
        self.caught_up = caught_up
        self.partitions: dict[Hashable, _Partition] = defaultdict(_Partition)
        for operation in history.operations:
            for act in operation.acts:
                if isinstance(act, Send):
                    self._sent(operation, act)
                elif isinstance(act, Poll):
                    for read in act.reads:
                        self._seen(operation, read, act.isolation)
                elif isinstance(act, Snapshot):
                    partition = self.partitions[act.partition]
                    partition.snapshots.append((operation, act))
                    for read in act.reads:
                        self._seen(operation, read, act.isolation)
                    if act.reads:
                        last = act.reads[-1].offset
                        partition.came_through(act.start, last, operation, act.isolation)
        self.positions: dict[Hashable, list[int]] = {}
        self.certain: dict[Hashable, list[int]] = {}
        for name, partition in self.partitions.items():
            self.positions[name] = sorted(partition.at)
            self.certain[name] = sorted(partition.certain)
        self.polls = list(self._polls())

    def _sent(self, operation: Operation, send: Send) -> None:
        partition = self.partitions[send.partition]
        partition.sends.append((operation, send))
        if operation.outcome == "fail" and not operation.transactional:
            partition.refused.setdefault(send.value, []).append(operation)
            return
        partition.writers.setdefault(send.value, []).append(operation)
        if send.offset is None:
            return
        if operation.outcome == "ok" or operation.transactional:
            partition.claim(send.offset, send.value, operation)
        if operation.outcome == "ok":
            partition.certain.add(send.offset)

    def _seen(self, operation: Operation, read: Read, isolation: str) -> None:
        partition = self.partitions[read.partition]
        partition.claim(read.offset, read.value, operation)
        partition.read.add((read.offset, read.value))
        partition.values_seen.add(read.value)
        if isolation == COMMITTED:
            partition.seen_committed.setdefault(read.offset, operation)
            partition.certain.add(read.offset)

    # ---- consumers ----

    def _polls(self) -> Iterator[Finding]:
        """Follow every consumer through its polls; fills the stretches as it goes."""
        # (consumer, partition) -> (next offset, operation), as far as it is known.
        at: dict[tuple[Hashable, Hashable], tuple[int, Operation, bool]] = {}
        owned: dict[Hashable, frozenset[Hashable]] = {}
        # In the order of completion: that is the order in which a consumer was told.
        for operation in sorted(self.history.operations, key=_completion):
            for act in operation.acts:
                if isinstance(act, Poll):
                    yield from self._polled(operation, act, at)
                elif isinstance(act, Seek):
                    names = act.partitions
                    for key in [k for k in at if k[0] == act.consumer]:
                        if names is None or key[1] in names:
                            del at[key]
                    _place(at, act.consumer, act.positions, operation)
                elif isinstance(act, Assign):
                    before = owned.get(act.consumer, frozenset())
                    owned[act.consumer] = act.partitions
                    stay = act.retained & act.partitions & before
                    for key in [k for k in at if k[0] == act.consumer and k[1] not in stay]:
                        del at[key]
                    _place(at, act.consumer, act.positions, operation)
            if operation.outcome != "ok":
                # Whoever gives up a transaction reads again from where it was.
                for act in operation.acts:
                    if isinstance(act, Poll):
                        for key in [k for k in at if k[0] == act.consumer]:
                            del at[key]

    def _polled(
        self,
        operation: Operation,
        poll: Poll,
        at: dict[tuple[Hashable, Hashable], tuple[int, Operation, bool]],
    ) -> Iterator[Finding]:
        for read in poll.reads:
            name = read.partition
            key = (poll.consumer, name)
            known = at.get(key)
            at[key] = (read.offset + 1, operation, True)
            partition = self.partitions[name]
            if known is None:
                partition.came_through(read.offset, read.offset, operation, poll.isolation)
                continue
            expected, earlier, has_read = known
            inside = "int-" if earlier is operation and has_read else ""
            who = (earlier, operation) if earlier is not operation else (operation,)
            if read.offset < expected:
                yield Finding(
                    f"{inside}nonmonotonic-poll",
                    f"{poll.consumer!r} got offset {read.offset} of {name!r} after it had got "
                    f"all below {expected}",
                    who,
                    name,
                    (read.offset,),
                    (read.value,),
                )
                continue
            partition.came_through(expected, read.offset, operation, poll.isolation)
            if read.offset == expected:
                continue
            # A committed reader must see all that is certain, another reader all that was read.
            offsets = self.certain[name] if poll.isolation == COMMITTED else self.positions[name]
            left_out = offsets[bisect_left(offsets, expected) : bisect_left(offsets, read.offset)]
            if left_out:
                yield Finding(
                    f"{inside}poll-skip",
                    f"{poll.consumer!r} went from offset {expected - 1} of {name!r} to "
                    f"{read.offset} and left out {_listed(left_out)}",
                    (*who, *(next(iter(partition.at[o].values())) for o in left_out[:3]
                             if o in partition.at)),
                    name,
                    tuple(left_out),
                )  # fmt: skip

    def found_by_polls(self) -> Iterator[Finding]:
        return iter(self.polls)

    # ---- producers ----

    def sends(self) -> Iterator[Finding]:
        """The order of offsets, from one operation of a process to the next and inside of one."""
        last: dict[tuple[Hashable, Hashable], tuple[int, Operation]] = {}
        for operation in self.history.operations:
            if operation.outcome != "ok" and not operation.transactional:
                continue
            inside: dict[Hashable, int] = {}
            for act in operation.acts:
                if not isinstance(act, Send) or act.offset is None:
                    continue
                name, offset = act.partition, act.offset
                before = inside.get(name)
                if before is not None:
                    if offset <= before:
                        yield Finding(
                            "int-nonmonotonic-send",
                            f"offset {offset} of {name!r} was given after {before}",
                            (operation,),
                            name,
                            (before, offset),
                            (act.value,),
                        )
                    else:
                        yield from self._sent_between(operation, name, before, offset)
                else:
                    key = (operation.process, name)
                    earlier = last.get(key)
                    if earlier is not None and offset <= earlier[0]:
                        yield Finding(
                            "nonmonotonic-send",
                            f"{operation.process!r} was given offset {offset} of {name!r} after "
                            f"{earlier[0]}",
                            (earlier[1], operation),
                            name,
                            (earlier[0], offset),
                            (act.value,),
                        )
                inside[name] = offset
            for name, offset in inside.items():
                last[(operation.process, name)] = (offset, operation)

    def _sent_between(
        self, operation: Operation, name: Hashable, before: int, offset: int
    ) -> Iterator[Finding]:
        positions = self.positions[name]
        low, high = bisect_right(positions, before), bisect_left(positions, offset)
        if low < high:
            between = positions[low:high]
            others = [next(iter(self.partitions[name].at[o].values())) for o in between[:3]]
            yield Finding(
                "int-send-skip",
                f"{_listed(between)} of {name!r} lies between two sends of one operation",
                (operation, *others),
                name,
                tuple(between),
            )

    # ---- values and offsets ----

    def offsets(self) -> Iterator[Finding]:
        """One value an offset, and one offset a send."""
        for name, partition in self.partitions.items():
            places: dict[Hashable, list[int]] = {}
            for offset, values in partition.at.items():
                if len(values) > 1:
                    yield Finding(
                        "inconsistent-offsets",
                        f"offset {offset} of {name!r} holds "
                        + " and ".join(repr(value) for value in values),
                        tuple(values.values()),
                        name,
                        (offset,),
                        tuple(values),
                    )
                for value in values:
                    places.setdefault(value, []).append(offset)
            for value, offsets in places.items():
                if len(offsets) > 1:
                    yield from self._repeated(name, partition, value, sorted(offsets))

    def _repeated(
        self, name: Hashable, partition: _Partition, value: Hashable, offsets: list[int]
    ) -> Iterator[Finding]:
        writers = partition.writers.get(value)
        if writers is None:
            return  # from before the history, when it may have been sent at will
        lasting = [writer for writer in writers if writer.outcome != "fail"]
        committed = [offset for offset in offsets if offset in partition.seen_committed]
        if len(offsets) > len(writers):
            many, sent = offsets, writers
        elif len(committed) > max(1, len(lasting)):
            many, sent = committed, lasting
        else:
            return
        witnesses = [partition.at[offset][value] for offset in many]
        yield Finding(
            "duplicate",
            f"{value!r} is in {name!r} at offsets {_listed(many)}, and was sent "
            f"{_times(len(sent))}",
            tuple(dict.fromkeys([*sent, *witnesses])),
            name,
            tuple(many),
            (value,),
        )

    def lost(self) -> Iterator[Finding]:
        """Acknowledged, and not there; or not seen; or only a part of its transaction."""
        torn: dict[Operation, list[Send]] = {}
        for name, partition in self.partitions.items():
            covered = _merged(partition.stretches)
            covered_committed = _merged(partition.stretches_committed)
            for operation, send in partition.sends:
                if operation.outcome == "fail":
                    continue
                offset = send.offset
                if (
                    operation.transactional
                    and offset is not None
                    and offset not in partition.seen_committed
                    and _reader_past(covered_committed, offset) is not None
                ):
                    torn.setdefault(operation, []).append(send)
                if operation.outcome != "ok" or send.value in (
                    partition.values_seen if offset is None else self._read_at(partition, offset)
                ):
                    continue
                reader = self._should_have_seen(partition, covered, operation, send)
                offsets = () if offset is None else (offset,)
                where = "" if offset is None else f" at offset {offset}"
                if reader is not None:
                    yield Finding(
                        "lost-write",
                        f"{send.value!r} was acknowledged{where} of {name!r}, and is not there",
                        (operation, reader),
                        name,
                        offsets,
                        (send.value,),
                    )
                elif self.caught_up:
                    yield Finding(
                        "unseen",
                        f"{send.value!r} was acknowledged{where} of {name!r}, and nobody read it",
                        (operation,),
                        name,
                        offsets,
                        (send.value,),
                    )
        yield from self._torn(torn)

    @staticmethod
    def _read_at(partition: _Partition, offset: int) -> Collection[Hashable]:
        """The values that were read at an offset: what was only acknowledged there is no proof."""
        return [value for value in partition.at[offset] if (offset, value) in partition.read]

    @staticmethod
    def _should_have_seen(
        partition: _Partition, covered: list[_Stretch], operation: Operation, send: Send
    ) -> Operation | None:
        """The operation of a reader that would have got an acknowledged value."""
        if send.offset is not None:
            reader = _reader_past(covered, send.offset)
            if reader is not None:
                return reader
        assert operation.completed is not None
        for reader, snapshot in partition.snapshots:
            begun = send.offset is None or send.offset >= snapshot.start
            if operation.completed < reader.invoked and begun:
                return reader
        return None

    def _torn(self, missing: dict[Operation, list[Send]]) -> Iterator[Finding]:
        for operation, gone in missing.items():
            there = [
                act
                for act in operation.acts
                if isinstance(act, Send)
                and act.offset in self.partitions[act.partition].seen_committed
            ]
            if there:
                yield Finding(
                    "torn-transaction",
                    f"{there[0].value!r} of {there[0].partition!r} is there, {gone[0].value!r} of "
                    f"{gone[0].partition!r} is not, and both were sent in one transaction",
                    (operation,),
                    gone[0].partition,
                    tuple(send.offset for send in gone if send.offset is not None),
                    tuple(send.value for send in gone),
                )

    # ---- what must not be read, or not yet ----

    def forbidden_reads(self) -> Iterator[Finding]:
        for operation in self.history.operations:
            for act in operation.acts:
                if not isinstance(act, Poll | Snapshot):
                    continue
                committed = act.isolation == COMMITTED
                for read in act.reads:
                    yield from self._forbidden(operation, read, committed)

    def _forbidden(self, operation: Operation, read: Read, committed: bool) -> Iterator[Finding]:
        partition = self.partitions[read.partition]
        writers = partition.writers.get(read.value, ())
        told = _completion(operation)
        if not writers:
            refused = partition.refused.get(read.value)
            if refused:
                yield self._bad_read("G1a", "was refused", operation, read, refused)
            return
        if not committed:
            return
        lasting = [writer for writer in writers if writer.outcome != "fail"]
        if not lasting:
            yield self._bad_read("G1a", "was aborted", operation, read, writers)
        elif all(
            writer is operation or (writer.transactional and _commit_asked(writer) > told)
            for writer in lasting
        ):
            yield self._bad_read("precommitted-read", "was not committed", operation, read, lasting)

    @staticmethod
    def _bad_read(
        kind: str, what: str, operation: Operation, read: Read, writers: Sequence[Operation]
    ) -> Finding:
        return Finding(
            kind,
            f"{read.value!r} at offset {read.offset} of {read.partition!r} {what}, and was read",
            tuple(dict.fromkeys((operation, *writers))),
            read.partition,
            (read.offset,),
            (read.value,),
        )

    # ---- groups ----

    def commits(self) -> Iterator[Finding]:
        """A group's offsets as they were committed and read back."""
        # What is certain when a commit has ended is compared with all that begins later.
        looks: list[tuple[int, bool, Operation, Commit | Committed]] = []
        every: dict[tuple[Hashable, Hashable], list[tuple[Operation, int, bool]]] = {}
        for operation in self.history.operations:
            for act in operation.acts:
                if isinstance(act, Commit) and operation.outcome != "fail":
                    for name, offset in act.offsets:
                        entry = (operation, offset, act.reset)
                        every.setdefault((act.group, name), []).append(entry)
                    if operation.outcome == "ok":
                        looks.append((_completion(operation), True, operation, act))
                if isinstance(act, Commit | Committed) and operation.outcome == "ok":
                    looks.append((operation.invoked, False, operation, act))
        highest: dict[tuple[Hashable, Hashable], tuple[int, Operation]] = {}
        for _, ended, operation, act in sorted(looks, key=lambda look: look[:2]):
            for name, offset in act.offsets:
                key = (act.group, name)
                known = highest.get(key)
                if ended:
                    reset = isinstance(act, Commit) and act.reset
                    if reset or known is None or offset > known[0]:
                        highest[key] = (offset, operation)
                    continue
                if known is None or offset >= known[0]:
                    continue
                if isinstance(act, Commit):
                    what = "committed"
                    if act.reset or _was_reset(every[key], known[1], operation, offset):
                        continue
                else:
                    what = "read back"
                    if _explains(every[key], operation, offset):
                        continue
                yield Finding(
                    "commit-regression",
                    f"{act.group!r} had {known[0]} of {name!r}, then {offset} was {what}",
                    (known[1], operation),
                    name,
                    (known[0], offset),
                )

    def owners(self) -> Iterator[Finding]:
        owners: dict[tuple[Hashable, int, Hashable], tuple[Hashable, Operation]] = {}
        for operation in self.history.operations:
            if operation.outcome != "ok":
                continue
            for act in operation.acts:
                if not isinstance(act, Assign) or act.generation is None:
                    continue
                for name in act.partitions:
                    consumer, earlier = owners.setdefault(
                        (act.group, act.generation, name), (act.consumer, operation)
                    )
                    if consumer != act.consumer:
                        yield Finding(
                            "two-owners",
                            f"{consumer!r} and {act.consumer!r} of {act.group!r} both had "
                            f"{name!r} in generation {act.generation}",
                            (earlier, operation),
                            name,
                        )

    def ends(self) -> Iterator[Finding]:
        """The end of a partition moves one way, as seen by who looks after another has looked."""
        looks = []
        for operation in self.history.operations:
            for act in operation.acts:
                if isinstance(act, End) and operation.outcome == "ok":
                    looks.append((_completion(operation), True, operation, act))
                    looks.append((operation.invoked, False, operation, act))
        highest: dict[Hashable, tuple[int, Operation]] = {}
        for _, ended, operation, act in sorted(looks, key=lambda look: look[:2]):
            known = highest.get(act.partition)
            if ended:
                if known is None or act.offset > known[0]:
                    highest[act.partition] = (act.offset, operation)
            elif known is not None and act.offset < known[0]:
                yield Finding(
                    "end-regression",
                    f"{act.partition!r} ended at {known[0]}, and later at {act.offset}",
                    (known[1], operation),
                    act.partition,
                    (known[0], act.offset),
                )

    # ---- copies ----

    def copy(self, copy: Copy) -> Iterator[Finding]:
        """Each committed value of the source just once in the target."""
        worked_up_to: dict[Hashable, int] = {}
        for operation in self.history.operations:
            if operation.outcome == "ok":
                for act in operation.acts:
                    if isinstance(act, Commit) and act.group == copy.group:
                        for name, offset in act.offsets:
                            worked_up_to[name] = max(offset, worked_up_to.get(name, 0))
        for name in sorted(copy.source | copy.target, key=repr):
            self._require_known(name)
        expected: Counter[Hashable] = Counter()
        possible: Counter[Hashable] = Counter()
        due: dict[Hashable, tuple[Hashable, int, Operation]] = {}
        for name in copy.source:
            if name not in self.partitions:
                continue
            partition = self.partitions[name]
            for offset in self.positions[name]:
                for value, operation in partition.at[offset].items():
                    result = value if copy.transform is None else copy.transform(value)
                    possible[result] += 1
                    if offset not in partition.certain:
                        continue  # perhaps aborted: its copy may be there or not
                    expected[result] += 1
                    if self.caught_up or offset < worked_up_to.get(name, 0):
                        due.setdefault(result, (name, offset, operation))
        there: dict[Hashable, list[tuple[Hashable, int, Operation]]] = {}
        perhaps: Counter[Hashable] = Counter()  # read uncommitted: committed, aborted or open
        for name in copy.target:
            if name in self.partitions:
                partition = self.partitions[name]
                for offset, value in sorted(partition.read, key=offset_of):
                    if offset in partition.certain:
                        claimed = partition.at[offset][value]
                        operation = partition.seen_committed.get(offset, claimed)
                        there.setdefault(value, []).append((name, offset, operation))
                    elif not partition.is_aborted(offset, value):
                        perhaps[value] += 1
        for value, places in there.items():
            if len(places) > possible[value]:
                yield Finding(
                    "exactly-once-copy",
                    f"{value!r} is in the copy {_times(len(places))}, and in the source "
                    f"{_times(possible[value])}",
                    tuple(dict.fromkeys(operation for _, _, operation in places)),
                    places[-1][0],
                    tuple(offset for _, offset, _ in places),
                    (value,),
                )
        for value, (name, offset, operation) in due.items():
            if len(there.get(value, ())) + perhaps[value] < expected[value]:
                yield Finding(
                    "exactly-once-copy",
                    f"{value!r} at offset {offset} of {name!r} is not in the copy",
                    (operation,),
                    name,
                    (offset,),
                    (value,),
                )

    def _require_known(self, name: Hashable) -> None:
        """Raise ValueError if the history cannot show which records of a partition count."""
        partition = self.partitions.get(name)
        if partition is None or not partition.read or partition.writers or partition.seen_committed:
            return
        raise ValueError(
            f"{name!r} is part of a copy, its sends are not recorded, and it was read uncommitted "
            "only, so that aborted records cannot be told from committed ones: record its "
            "snapshot with isolation='read_committed'"
        )

    # ---- cycles ----

    def cycles(self) -> Iterator[Finding]:
        """Operations that depend on themselves, by writes behind writes and reads of writes."""
        writes: dict[Operation, dict[Operation, str]] = defaultdict(dict)
        every: dict[Operation, dict[Operation, str]] = defaultdict(dict)
        for name, partition in self.partitions.items():
            before: Operation | None = None
            for offset in self.positions[name]:
                for value in partition.at[offset]:
                    writers = partition.writers.get(value, ())
                    if len(writers) != 1 or writers[0].outcome == "fail":
                        continue
                    if before is not None and before is not writers[0]:
                        what = f"{name!r} offset {offset} behind the other's"
                        writes[before].setdefault(writers[0], what)
                        every[before].setdefault(writers[0], what)
                    before = writers[0]
        for operation in self.history.operations:
            if operation.outcome == "fail":
                continue
            for act in operation.acts:
                if isinstance(act, Poll):
                    for read in act.reads:
                        writers = self.partitions[read.partition].writers.get(read.value, ())
                        if len(writers) == 1 and writers[0] is not operation:
                            what = f"{read.partition!r} offset {read.offset} read"
                            every[writers[0]].setdefault(operation, what)
        for part in circular(writes):
            source = part[0]
            target = next(target for target in writes[source] if target in part)
            yield _circle("G0", [source, *way(writes, target, source)], writes)
        for part in circular(every):
            members = set(part)
            for source in part:
                reader = next(
                    (t for t in every[source] if t in members and t not in writes.get(source, ())),
                    None,
                )
                if reader is not None:
                    yield _circle("G1c", [source, *way(every, reader, source)], every)
                    break


CHECKS: tuple[tuple[tuple[str, ...], Callable[[Checker], Iterator[Finding]]], ...] = (
    (("lost-write", "unseen", "torn-transaction"), Checker.lost),
    (("duplicate", "inconsistent-offsets"), Checker.offsets),
    (
        ("poll-skip", "nonmonotonic-poll", "int-poll-skip", "int-nonmonotonic-poll"),
        Checker.found_by_polls,
    ),
    (("nonmonotonic-send", "int-nonmonotonic-send", "int-send-skip"), Checker.sends),
    (("G1a", "precommitted-read"), Checker.forbidden_reads),
    (("commit-regression",), Checker.commits),
    (("two-owners",), Checker.owners),
    (("end-regression",), Checker.ends),
    (("G0", "G1c"), Checker.cycles),
)


def _completion(operation: Operation) -> int:
    return operation.invoked if operation.completed is None else operation.completed


def _commit_asked(writer: Operation) -> int:
    """The place from which on a transaction may be visible."""
    return writer.invoked if writer.prepared is None else writer.prepared


def _was_reset(
    commits: list[tuple[Operation, int, bool]], since: Operation, until: Operation, offset: int
) -> bool:
    """Whether a reset to `offset` or below may have come between two operations."""
    return any(
        reset
        and to <= offset
        and _completion_or_never(operation) > since.invoked
        and operation.invoked < _completion(until)
        for operation, to, reset in commits
    )


def _explains(commits: list[tuple[Operation, int, bool]], reader: Operation, offset: int) -> bool:
    """Whether a commit of `offset` may be the last that the reader could see."""
    return any(
        to == offset
        and operation.invoked < _completion(reader)
        and not any(
            other.outcome == "ok"
            and other.invoked > _completion_or_never(operation)
            and _completion(other) < reader.invoked
            for other, _, _ in commits
        )
        for operation, to, _ in commits
    )


def _completion_or_never(operation: Operation) -> int:
    """What nobody knows the end of may happen at any later time."""
    return _completion(operation) if operation.outcome == "ok" else 1 << 62


def _place(
    at: dict[tuple[Hashable, Hashable], tuple[int, Operation, bool]],
    consumer: Hashable,
    positions: Iterable[tuple[Hashable, int]],
    operation: Operation,
) -> None:
    for name, offset in positions:
        at[(consumer, name)] = (offset, operation, False)


def _merged(stretches: list[_Stretch]) -> list[_Stretch]:
    """Stretches that touch become one; sorted, and no two overlap."""
    merged: list[_Stretch] = []
    for first, last, operation in sorted(stretches, key=lambda stretch: stretch[:2]):
        if merged and first <= merged[-1][1]:
            if last > merged[-1][1]:
                merged[-1] = (merged[-1][0], last, operation)
        else:
            merged.append((first, last, operation))
    return merged


def _reader_past(covered: list[_Stretch], offset: int) -> Operation | None:
    """Who came from below an offset to one above it, or got something there."""
    slot = bisect_right(covered, offset, key=lambda stretch: stretch[0]) - 1
    return covered[slot][2] if slot >= 0 and covered[slot][1] >= offset else None


def _circle(
    kind: str, path: list[Operation], edges: dict[Operation, dict[Operation, str]]
) -> Finding:
    steps = [f"#{a.number} before #{b.number} ({edges[a][b]})" for a, b in pairwise(path)]
    return Finding(kind, "; ".join(steps), tuple(path[:-1]))


def _listed(offsets: Sequence[int]) -> str:
    shown = ", ".join(map(str, offsets[:5]))
    return shown + (f" and {len(offsets) - 5} more" if len(offsets) > 5 else "")


def _times(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")
