"""Small worlds of producers, consumers and a copier around a log, which write a history.

A world is a log in a few lists, and processes that run as generators in an order drawn from a
seed: between the beginning of an operation, its effect and its end, any other may run.  Without a
`plant` it keeps all promises of a log.  With a `plant` it breaks just one of them, once, at a place
that the seed chooses, so that the checker can be tested: `planted` is true after that place.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from logstore.testing.history_findings import Copy
from logstore.testing.operations import (
    Assign,
    Commit,
    Committed,
    End,
    Event,
    Poll,
    Read,
    Seek,
    Send,
    Snapshot,
)

SOURCE, OTHER, TARGET = "source", "other", "copy"
COMMITTED, UNCOMMITTED = "read_committed", "read_uncommitted"
COPY = Copy(frozenset({SOURCE}), frozenset({TARGET}), group="copiers")


@dataclass(slots=True)
class Entry:
    value: object  # None is a marker
    state: str  # "open", "committed", "aborted"
    lost: bool = False


class World:
    """Runs to its end when made; then `events` is its history."""

    def __init__(self, seed: int, plant: str = "", *, isolated: bool = False) -> None:
        self.random = random.Random(seed)
        self.plant = plant
        self.planted = False
        self.isolated = isolated  # all records of one operation are appended at once
        self.events: list[Event] = []
        self.log: dict[str, list[Entry]] = {SOURCE: [], OTHER: [], TARGET: []}
        self.offsets: dict[tuple[str, str], int] = {}
        self.acknowledged: set[str] = set()  # partitions with an offset that is certain
        self.generation = 0
        self.undecided: list[tuple[list[Entry], str]] = []
        self.draining = False
        self.members = {"c1": self._consumer("c1"), "c2": self._consumer("c2")}
        self.assigned: dict[str, frozenset[str]] = {}
        self.run()

    # ---- the scheduler ----

    def run(self) -> None:
        rng = self.random
        work = [
            self._sender("p1"),
            self._sender("p2"),
            self._transactions("t1"),
            self._copier(),
            self._reader(),
            self._watcher(),
            *self.members.values(),
        ]
        if self.plant == "G0":
            work.append(self._crossed())
        elif self.plant == "G1c":
            work.append(self._entangled())
        while work:
            process = rng.choice(work)
            try:
                next(process)
            except StopIteration:
                work.remove(process)
        for entries, state in self.undecided:
            for entry in entries:
                entry.state = state
        if self.plant == "unseen":
            self._hidden_send()
        self.draining = True
        last = [self._reader(), self._consumer("c1", alone=True), self._copier()]
        for process in last:
            for _ in process:
                pass
        # Reading the copy committed is what exactly-once is judged by.
        for name in self.log:
            if name != OTHER or self.plant != "unseen":
                for isolation in (COMMITTED, UNCOMMITTED):
                    reads = tuple(self._visible(name, 0, isolation))
                    self.note("invoke", "end")
                    self.note("ok", "end", Snapshot(name, reads, 0, isolation))

    def note(self, moment: str, process: str, *acts: object, transactional: bool = False) -> None:
        self.events.append(Event(moment, process, acts, transactional))  # type: ignore[arg-type]

    def strike(self, plant: str, chance: float = 0.5) -> bool:
        """Whether to break the promise here; once only."""
        if self.plant != plant or self.planted or self.random.random() > chance:
            return False
        self.planted = True
        return True

    # ---- the log ----

    def put(self, name: str, value: object, state: str = "committed") -> tuple[int, Entry]:
        entry = Entry(value, state)
        self.log[name].append(entry)
        return len(self.log[name]) - 1, entry

    def _visible(self, name: str, start: int, isolation: str) -> Iterator[Read]:
        log = self.log[name]
        for offset in range(start, len(log)):
            entry = log[offset]
            if isolation == COMMITTED and entry.state == "open":
                return
            if entry.value is None or entry.lost:
                continue
            if isolation == UNCOMMITTED or entry.state == "committed":
                yield Read(name, offset, entry.value)

    # ---- producers ----

    def _sender(self, who: str) -> Iterator[None]:
        rng = self.random
        held: list[tuple[str, object, int]] = []
        for number in range(rng.randrange(2, 6)):
            name = rng.choice((SOURCE, OTHER))
            values = [f"{who}:{number}.{i}" for i in range(rng.choice((1, 1, 1, 3)))]
            if held:
                name, value, offset = held.pop()
                self.note("invoke", who, Send(name, value))
                yield
                self.note("ok", who, Send(name, value, offset))
                continue
            self.note("invoke", who, *(Send(name, value) for value in values))
            yield
            fate = rng.random()
            if fate < 0.1:
                if self.strike("G1a"):
                    self.put(name, values[0])
                self.note("fail", who)
                continue
            unknown = fate < 0.2
            if unknown and rng.random() < 0.5:
                self.note("info", who)
                continue
            if not unknown and self.strike("nonmonotonic-send"):
                later = f"{who}:later"
                offset, _ = self.put(name, later)
                held.append((name, later, offset))
            sends = []
            many = len(values) > 1 and not unknown
            backwards = many and self.strike("int-nonmonotonic-send")
            for value in reversed(values) if backwards else values:
                if sends:
                    if not self.isolated:
                        yield
                    elif many and self.strike("int-send-skip"):
                        self.put(name, f"{who}:between")
                offset, entry = self.put(name, value)
                if not unknown:
                    entry.lost = self.strike("lost-write")
                    if self.strike("duplicate"):
                        self.put(name, value)
                sends.append(Send(name, value, offset))
            if backwards:
                sends.reverse()
            yield
            if unknown:
                self.note("info", who)
            else:
                self.note("ok", who, *sends)
        if held:
            name, value, offset = held.pop()
            self.note("invoke", who, Send(name, value))
            self.note("ok", who, Send(name, value, offset))

    def _hidden_send(self) -> None:
        name = OTHER  # in the source, it would be missing in the copy as well
        offset, entry = self.put(name, "hidden")
        entry.lost = self.planted = True
        self.note("invoke", "p1", Send(name, "hidden"))
        self.note("ok", "p1", Send(name, "hidden", offset))

    def _transactions(self, who: str) -> Iterator[None]:
        rng = self.random
        for number in range(rng.randrange(1, 4)):
            sends: list[Send] = []
            entries: list[tuple[str, Entry]] = []
            self.note("invoke", who, transactional=True)
            yield
            for i in range(rng.randrange(1, 5)):
                name = rng.choice((SOURCE, OTHER))
                value = f"{who}:{number}.{i}"
                offset, entry = self.put(name, value, "open")
                entries.append((name, entry))
                sends.append(Send(name, value, offset))
                if not self.isolated:
                    yield
            forced = self._read_too_early(sends)
            outcome = "ok" if forced else rng.choice(("ok", "ok", "fail", "info"))
            if outcome != "fail":
                self.note("prepare", who)
            yield
            commits = outcome == "ok" or (outcome == "info" and rng.random() < 0.5)
            state = "committed" if commits else "aborted"
            if not commits and outcome == "fail" and self.strike("G1a"):
                state = "committed"
            torn = commits and len(entries) > 1 and self.strike("torn-transaction")
            if outcome == "info" and not torn and rng.random() < 0.5:
                self.undecided.append(([entry for _, entry in entries], state))
            else:
                for _, entry in entries:
                    entry.state = state
                if torn:
                    # A record after it, so that a committed reader passes it.
                    name, entry = rng.choice(entries)
                    entry.state = "aborted"
                    self.put(name, f"{who}:behind")
                for name in {name for name, _ in entries}:
                    self.put(name, None)
            yield
            self.note(outcome, who, *sends, transactional=True)

    def _read_too_early(self, sends: list[Send]) -> bool:
        """A committed reader is given what is still open."""
        name, offset = sends[0].partition, sends[0].offset
        if not self.strike("precommitted-read"):
            return False
        read = Read(name, offset, sends[0].value)  # type: ignore[arg-type]
        self.note("invoke", "hasty")
        self.note("ok", "hasty", Poll("hasty", (read,), COMMITTED))
        return True

    def _crossed(self) -> Iterator[None]:
        """Two operations write one after the other, in two partitions."""
        self.note("invoke", "x1")
        yield
        self.note("invoke", "x2")
        a, _ = self.put(SOURCE, "x1:a")
        b, _ = self.put(SOURCE, "x2:b")
        yield
        c, _ = self.put(OTHER, "x2:c")
        d, _ = self.put(OTHER, "x1:d")
        yield
        self.note("ok", "x1", Send(SOURCE, "x1:a", a), Send(OTHER, "x1:d", d))
        self.note("ok", "x2", Send(SOURCE, "x2:b", b), Send(OTHER, "x2:c", c))
        self.planted = True

    def _entangled(self) -> Iterator[None]:
        """Two operations each read what the other wrote."""
        self.note("invoke", "x1")
        self.note("invoke", "x2")
        a, _ = self.put(SOURCE, "x1:a")
        yield
        b, _ = self.put(OTHER, "x2:b")
        yield
        got_a, got_b = Read(SOURCE, a, "x1:a"), Read(OTHER, b, "x2:b")
        self.note("ok", "x1", Send(SOURCE, "x1:a", a), Poll("x1", (got_b,)))
        self.note("ok", "x2", Send(OTHER, "x2:b", b), Poll("x2", (got_a,)))
        self.planted = True

    # ---- consumers ----

    def _taken(self, name: str, position: int, isolation: str, *, known: bool) -> list[Read]:
        """What one poll gives of a partition: some of what is visible, and at times a fault.

        `known`: the history has the position of the consumer.
        """
        reads = list(self._visible(name, position, isolation))
        if not self.draining:
            reads = reads[: self.random.randrange(5)]
        if not reads:
            return reads
        if len(reads) > 1 and known and self.strike("poll-skip"):
            return reads[1:]
        if len(reads) > 2 and self.strike("int-poll-skip"):
            return [reads[0], *reads[2:]]
        if self.strike("int-nonmonotonic-poll"):
            return [*reads, reads[-1]]
        if self.strike("inconsistent-offsets"):
            first = reads[0]
            return [Read(name, first.offset, f"{first.value}?"), *reads[1:]]
        return reads

    def _reader(self) -> Iterator[None]:
        """Reads everything, committed or not; begins where it likes, and jumps now and then."""
        rng, who = self.random, "r" if not self.draining else "r-last"
        position = dict.fromkeys(self.log, 0)
        if not self.draining and rng.random() < 0.3:
            name = rng.choice((SOURCE, OTHER))
            position[name] = len(self.log[name])
        last: Read | None = None
        known: set[str] = set()
        for _ in range(1 if self.draining else rng.randrange(2, 5)):
            self.note("invoke", who)
            yield
            reads: list[Read] = []
            for name in position:
                got = self._taken(name, position[name], UNCOMMITTED, known=name in known)
                again = last is not None and last.partition == name
                if again and self.strike("nonmonotonic-poll"):
                    got = [last, *got]  # type: ignore[list-item]
                if got:
                    position[name] = max(position[name], got[-1].offset + 1)
                    last = got[-1]
                    known.add(name)
                reads += got
            yield
            self.note("ok", who, Poll(who, tuple(reads), UNCOMMITTED))
            if rng.random() < 0.15:
                name = rng.choice((SOURCE, OTHER))
                position[name] = rng.randrange(len(self.log[name]) + 1)
                last = None
                to = ((name, position[name]),) if rng.random() < 0.5 else ()
                known = known | {name} if to else known - {name}
                self.note("invoke", who)
                self.note("ok", who, Seek(who, frozenset({name}), to))

    def _consumer(self, who: str, *, alone: bool = False) -> Iterator[None]:
        """A member of a group: gets partitions, polls, commits."""
        rng = self.random
        position: dict[str, int] = {}
        mine = -1
        for _ in range(3 if alone else rng.randrange(3, 7)):
            if mine < 0 or mine != self.generation or rng.random() < 0.2:
                if rng.random() < 0.4 or mine < 0:
                    self._rebalance(alone)
                mine = self.generation
                position = self._join(who)
                yield
                continue
            if rng.random() < 0.6 or alone:
                self.note("invoke", who)
                reads: list[Read] = []
                for name in position:
                    got = self._taken(name, position[name], COMMITTED, known=True)
                    if got:
                        position[name] = max(position[name], got[-1].offset + 1)
                    reads += got
                yield
                self.note("ok", who, Poll(who, tuple(reads), COMMITTED))
            else:
                yield from self._commit(who, position, mine)

    def _rebalance(self, alone: bool) -> None:
        names = [SOURCE, OTHER]
        self.random.shuffle(names)
        self.generation += 1
        cut = 2 if alone else self.random.randrange(3)
        self.assigned = {"c1": frozenset(names[:cut]), "c2": frozenset(names[cut:])}

    def _join(self, who: str) -> dict[str, int]:
        names = self.assigned[who]
        if self.strike("two-owners"):
            names = frozenset({SOURCE, OTHER})
            other = "c2" if who == "c1" else "c1"
            self.note("invoke", f"{other}'s")
            self.note("ok", f"{other}'s", Assign(other, frozenset({SOURCE}), "g", self.generation))
        offsets = tuple((name, self.offsets.get(("g", name), 0)) for name in sorted(names))
        told = offsets
        if any(name in self.acknowledged for name, _ in offsets) and self.strike(
            "commit-regression"
        ):
            told = tuple((name, 0) for name, _ in offsets)  # which no transaction committed
        self.note("invoke", who)
        self.note(
            "ok",
            who,
            Committed("g", told),
            Assign(who, names, "g", self.generation, positions=offsets),
        )
        return dict(offsets)

    def _commit(self, who: str, position: dict[str, int], mine: int) -> Iterator[None]:
        rng = self.random
        offsets = {name: offset for name, offset in position.items() if offset}
        if offsets and self.strike("commit-regression"):
            # A commit, and a lower one of the same member that is taken as well.
            name = next(iter(offsets))
            for offset in (offsets[name], offsets[name] - 1):
                self.note("invoke", who)
                self.note("ok", who, Commit("g", ((name, offset),), who, mine))
            self.offsets[("g", name)] = offsets[name]
            return
        act = Commit("g", tuple(offsets.items()), who, mine)
        self.note("invoke", who, act)
        yield
        outcome = "fail" if mine != self.generation else rng.choice(("ok", "ok", "info"))
        if outcome == "ok" or (outcome == "info" and rng.random() < 0.5):
            for name, offset in offsets.items():
                self.offsets[("g", name)] = offset
        yield
        self.note(outcome, who)
        if outcome == "ok":
            self.acknowledged.update(offsets)

    def _copier(self) -> Iterator[None]:
        """Copies the source, in transactions that hold its offsets as well."""
        rng, who = self.random, "k"
        for _ in range(1 if self.draining else rng.randrange(1, 4)):
            start = self.offsets.get(("copiers", SOURCE), 0)
            self.note("invoke", who, transactional=True)
            yield
            reads = list(self._visible(SOURCE, start, COMMITTED))
            if not self.draining:
                reads = reads[: rng.randrange(5)]
            entries, sends = [], []
            drop = bool(reads) and self.strike("exactly-once-copy", 0.3)
            for read in reads[1:] if drop else reads:
                offset, entry = self.put(TARGET, read.value, "open")
                entries.append(entry)
                sends.append(Send(TARGET, read.value, offset))
                if not self.isolated:
                    yield
            sure = self.draining or drop
            outcome = "ok" if sure else rng.choice(("ok", "ok", "fail", "info"))
            self.note("prepare", who)
            yield
            commits = outcome == "ok" or (outcome == "info" and rng.random() < 0.5)
            for entry in entries:
                entry.state = "committed" if commits else "aborted"
            if entries:
                self.put(TARGET, None)
            offset = reads[-1].offset + 1 if reads else start
            again = (
                commits and reads and not self.draining and self.strike("exactly-once-copy", 0.3)
            )
            if again:
                offset = start  # the copy is there, its offset is not: made again, next time
            if commits:
                self.offsets[("copiers", SOURCE)] = offset
            self.note(
                outcome,
                who,
                Poll(who, tuple(reads), COMMITTED),
                *sends,
                Commit("copiers", ((SOURCE, offset),), who),
                transactional=True,
            )
            self.note("invoke", who)
            back = self.offsets.get(("copiers", SOURCE), 0)
            self.note("ok", who, Seek(who, None, ((SOURCE, back),)))

    def _watcher(self) -> Iterator[None]:
        """Looks where partitions end."""
        rng = self.random
        for _ in range(rng.randrange(2, 4)):
            name = rng.choice((SOURCE, OTHER))
            self.note("invoke", "w")
            yield
            end = len(self.log[name])
            yield
            self.note("ok", "w", End(name, end))
            if end and self.strike("end-regression"):
                self.note("invoke", "w")
                self.note("ok", "w", End(name, rng.randrange(end)))
