"""The checks of a history, one method for each kind of finding."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence

from logstore.testing.history_cycles import cycles
from logstore.testing.history_facts import (
    PartitionHistory,
    Stretch,
    commit_asked,
    completion,
    explains,
    listed,
    merged,
    place,
    reader_past,
    times,
    was_reset,
)
from logstore.testing.history_findings import Finding
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


class Checker:
    """The history by partition.  Each method checks one kind of finding, or a few related ones."""

    def __init__(self, history: History, caught_up: bool) -> None:
        self.history = history
        self.caught_up = caught_up
        self.partitions: dict[Hashable, PartitionHistory] = defaultdict(PartitionHistory)
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
        """Follow every consumer through its polls; also record the ranges that it covered."""
        # (consumer, partition) -> (next offset, operation), if known.
        at: dict[tuple[Hashable, Hashable], tuple[int, Operation, bool]] = {}
        owned: dict[Hashable, frozenset[Hashable]] = {}
        # In the order of completion: that is the order in which a consumer saw the results.
        for operation in sorted(self.history.operations, key=completion):
            for act in operation.acts:
                if isinstance(act, Poll):
                    yield from self._polled(operation, act, at)
                elif isinstance(act, Seek):
                    names = act.partitions
                    for key in [k for k in at if k[0] == act.consumer]:
                        if names is None or key[1] in names:
                            del at[key]
                    place(at, act.consumer, act.positions, operation)
                elif isinstance(act, Assign):
                    before = owned.get(act.consumer, frozenset())
                    owned[act.consumer] = act.partitions
                    stay = act.retained & act.partitions & before
                    for key in [k for k in at if k[0] == act.consumer and k[1] not in stay]:
                        del at[key]
                    place(at, act.consumer, act.positions, operation)
            if operation.outcome != "ok":
                # A consumer that aborts a transaction reads again from its last position.
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
            # A read_committed reader must see all certain records, another all that were ever read.
            offsets = self.certain[name] if poll.isolation == COMMITTED else self.positions[name]
            left_out = offsets[bisect_left(offsets, expected) : bisect_left(offsets, read.offset)]
            if left_out:
                yield Finding(
                    f"{inside}poll-skip",
                    f"{poll.consumer!r} went from offset {expected - 1} of {name!r} to "
                    f"{read.offset} and left out {listed(left_out)}",
                    (*who, *(next(iter(partition.at[o].values())) for o in left_out[:3]
                             if o in partition.at)),
                    name,
                    tuple(left_out),
                )  # fmt: skip

    def found_by_polls(self) -> Iterator[Finding]:
        return iter(self.polls)

    # ---- producers ----

    def sends(self) -> Iterator[Finding]:
        """Check that offsets increase, between the operations of a process and within one."""
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
                f"{listed(between)} of {name!r} is between two sends of one operation",
                (operation, *others),
                name,
                tuple(between),
            )

    # ---- values and offsets ----

    def offsets(self) -> Iterator[Finding]:
        """Check that an offset has one value, and a send one offset."""
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
        self, name: Hashable, partition: PartitionHistory, value: Hashable, offsets: list[int]
    ) -> Iterator[Finding]:
        writers = partition.writers.get(value)
        if writers is None:
            return  # written before the history began: the number of its sends is unknown
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
            f"{value!r} is in {name!r} at offsets {listed(many)}, and was sent {times(len(sent))}",
            tuple(dict.fromkeys([*sent, *witnesses])),
            name,
            tuple(many),
            (value,),
        )

    def lost(self) -> Iterator[Finding]:
        """Check that acknowledged values exist, are read, and that transactions are complete."""
        torn: dict[Operation, list[Send]] = {}
        for name, partition in self.partitions.items():
            covered = merged(partition.stretches)
            covered_committed = merged(partition.stretches_committed)
            for operation, send in partition.sends:
                if operation.outcome == "fail":
                    continue
                offset = send.offset
                if (
                    operation.transactional
                    and offset is not None
                    and offset not in partition.seen_committed
                    and reader_past(covered_committed, offset) is not None
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
                        f"{send.value!r} was acknowledged{where} of {name!r}, and was never read",
                        (operation,),
                        name,
                        offsets,
                        (send.value,),
                    )
        yield from self._torn(torn)

    @staticmethod
    def _read_at(partition: PartitionHistory, offset: int) -> Collection[Hashable]:
        """Return the values read at an offset.  An acknowledgement alone does not count."""
        return [value for value in partition.at[offset] if (offset, value) in partition.read]

    @staticmethod
    def _should_have_seen(
        partition: PartitionHistory, covered: list[Stretch], operation: Operation, send: Send
    ) -> Operation | None:
        """Return an operation of a reader that should have got an acknowledged value."""
        if send.offset is not None:
            reader = reader_past(covered, send.offset)
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

    # ---- reads of aborted or uncommitted values ----

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
        told = completion(operation)
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
            writer is operation or (writer.transactional and commit_asked(writer) > told)
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
        """Check that a group's committed offsets do not move back without a reset."""
        # An offset counts from the end of its commit on, for operations that begin later.
        looks: list[tuple[int, bool, Operation, Commit | Committed]] = []
        every: dict[tuple[Hashable, Hashable], list[tuple[Operation, int, bool]]] = {}
        for operation in self.history.operations:
            for act in operation.acts:
                if isinstance(act, Commit) and operation.outcome != "fail":
                    for name, offset in act.offsets:
                        entry = (operation, offset, act.reset)
                        every.setdefault((act.group, name), []).append(entry)
                    if operation.outcome == "ok":
                        looks.append((completion(operation), True, operation, act))
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
                    if act.reset or was_reset(every[key], known[1], operation, offset):
                        continue
                else:
                    what = "read back"
                    if explains(every[key], operation, offset):
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
        """Check that the end of a partition does not move back between two sequential reads."""
        looks = []
        for operation in self.history.operations:
            for act in operation.acts:
                if isinstance(act, End) and operation.outcome == "ok":
                    looks.append((completion(operation), True, operation, act))
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
    (("G0", "G1c"), cycles),
)
