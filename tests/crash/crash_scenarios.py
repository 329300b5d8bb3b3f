"""The scenarios of the crash explorer: every protocol that changes files, as small as possible.

A scenario prepares a directory, which is taken to be durable, and then acts under the recorder.
Its acts, and the promises that it gets, are written to the ledger.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import logstore
from logstore import (
    Compactor,
    Maintenance,
    Partition,
    PartitionConfig,
    Record,
    RetentionPolicy,
    Store,
)
from logstore.testing.crash_states import Crash
from logstore.testing.io import record_io
from logstore.testing.io_calls import Fault, Trace
from logstore.testing.oracle import Found, Ledger, recover_partition, recover_store
from logstore.testing.reference import ReferenceRecord, encode_batch
from tests.kit import kill

CONFIG = {"segment.bytes": 1024, "index.interval.bytes": 300, "cleanup.policy": "delete"}
COMPACT = {**CONFIG, "cleanup.policy": "compact", "min.cleanable.dirty.ratio": 0.01}
PARTITION = "a-0"
NOW = time.time_ns() // 1_000_000  # producers are forgotten a day after their last record
STORE = "s"


def wide_value(value: bytes) -> bytes:
    """So long that four batches fill a segment."""
    return value.ljust(180, b".")


@dataclasses.dataclass(frozen=True)
class Scenario:
    name: str
    act: Callable[[str, Ledger], None]
    prepare: Callable[[str], None]
    store: bool
    config: dict[str, Any]

    def record(self, root: str, *faults: Fault) -> Trace:
        """Prepare and act in `root`, an empty directory."""
        self.prepare(root)
        with record_io(root, *faults) as trace:
            self.act(root, Ledger(trace))
        return trace

    def recover(self, path: str, crash: Crash, *, more: bool = True) -> Found:
        open_ = recover_store if self.store else recover_partition
        return open_(path, crash, config=settings_of(tuple(self.config.items())), more=more)

    def only_recover(self, path: str, crash: Crash) -> Found:
        return self.recover(path, crash, more=False)


@functools.cache
def settings_of(config: tuple[tuple[str, Any], ...]) -> PartitionConfig:
    return PartitionConfig.of(dict(config))


SCENARIOS: dict[str, Scenario] = {}


def nothing(root: str) -> None:
    pass


def scenario(
    *,
    store: bool = False,
    prepare: Callable[[str], None] = nothing,
    config: dict[str, Any] = CONFIG,
) -> Callable[[Callable[[str, Ledger], None]], Callable[[str, Ledger], None]]:
    def add(act: Callable[[str, Ledger], None]) -> Callable[[str, Ledger], None]:
        SCENARIOS[act.__name__] = Scenario(act.__name__, act, prepare, store, config)
        return act

    return add


class Log:
    """A partition whose every act is noted."""

    def __init__(self, partition: Partition, ledger: Ledger) -> None:
        self.partition = partition
        self.ledger = ledger
        self.where = partition.name

    def _issue(self, values: Iterable[tuple[bytes | None, bytes | None]]) -> int:
        offset = self.partition.end_offset
        entries = {
            offset + i: (NOW + offset + i, key, value, "record")
            for i, (key, value) in enumerate(values)
        }
        self.ledger.issue(self.where, entries)
        return offset

    def append(
        self, value: bytes | None, key: bytes | None = None, durability: str = "fsync"
    ) -> int:
        value = None if value is None else wide_value(value)
        offset = self._issue([(key, value)])
        got = self.partition.append(value, key=key, timestamp=NOW + offset, durability=durability)
        assert got == offset
        self.ledger.acknowledge(self.where, offset + 1, durable=durability == "fsync")
        self.note_durable()
        return offset

    def extend(self, values: list[bytes], durability: str = "fsync") -> None:
        offset = self._issue([(b"k", value) for value in values])
        self.partition.extend(
            [Record(v, key=b"k", timestamp=NOW + offset + i) for i, v in enumerate(values)],
            durability=durability,
        )
        end = offset + len(values)
        self.ledger.acknowledge(self.where, end, durable=durability == "fsync")

    def produce(
        self,
        values: list[bytes],
        producer: int = 7,
        sequence: int = 0,
        *,
        epoch: int = 0,
        transactional: bool = False,
        durability: str = "fsync",
    ) -> None:
        values = [wide_value(value) for value in values]
        offset = self._issue([(b"p", value) for value in values])
        raw = encode_batch(
            [Record(v, key=b"p", timestamp=NOW + offset + i) for i, v in enumerate(values)],
            producer_id=producer,
            producer_epoch=epoch,
            base_sequence=sequence,
            transactional=transactional,
        )
        assert self.partition.append_batch(raw, durability=durability).offsets.start == offset
        end = offset + len(values)
        self.ledger.acknowledge(self.where, end, durable=durability == "fsync")

    def end(self, producer: int = 7, *, commit: bool, durability: str = "fsync") -> None:
        offset = self.partition.end_offset
        kind = "commit" if commit else "abort"
        self.ledger.issue(self.where, {offset: (-1, None, None, kind)})
        self.partition.end_transaction(producer, 0, commit=commit, durability=durability)
        self.ledger.acknowledge(self.where, offset + 1, durable=durability == "fsync")

    def note_durable(self) -> None:
        """`durable_offset` is a promise, too."""
        self.ledger.acknowledge(self.where, self.partition.durable_offset, durable=True)

    def sync(self) -> None:
        self.partition.sync()
        self.ledger.acknowledge(self.where, self.partition.end_offset, durable=True)

    def close(self) -> None:
        end = self.partition.end_offset
        self.partition.close()
        self.ledger.acknowledge(self.where, end, durable=True)

    def truncate(self, end: int) -> None:
        self.ledger.cut(self.where, end)
        self.partition.truncate(end)
        self.ledger.was_cut(self.where, end)

    def restart_at(self, offset: int) -> None:
        self.ledger.cut(self.where, offset)
        self.ledger.raise_start(self.where, offset)
        self.partition.parts.cutter.restart_at(offset)
        self.ledger.was_cut(self.where, offset)
        self.ledger.start_is(self.where, offset)

    def trim(self, start: int) -> None:
        self.ledger.raise_start(self.where, start)
        self.partition.trim(start)
        self.ledger.start_is(self.where, start)

    def enforce(self, policy: RetentionPolicy) -> None:
        plan = self.partition.enforce(policy, dry_run=True)
        start = max((decision.end_offset for decision in plan if decision.delete), default=0)
        assert start > 0
        self.ledger.raise_start(self.where, start)
        self.partition.enforce(policy)
        assert self.partition.start_offset == start
        self.ledger.start_is(self.where, start)

    def superseded(self) -> set[int]:
        """Offsets of records that have a newer one of their key."""
        newest: dict[bytes | None, int] = {}
        every = []
        for record in self.partition.scan():
            newest[record.key] = record.offset
            every.append((record.offset, record.key))
        return {offset for offset, key in every if newest[key] != offset}

    def compact(self) -> None:
        removable = self.superseded()
        self.ledger.remove(self.where, removable)
        Compactor(self.partition).run()
        left = {record.offset for record in self.partition.scan()}
        assert removable - left
        self.ledger.removed(self.where, removable - left)

    def purge(self, key: bytes) -> None:
        offsets = {record.offset for record in self.partition.scan() if record.key == key}
        assert offsets
        self.ledger.remove(self.where, offsets)
        Compactor(self.partition).purge(key)
        assert not any(record.key == key for record in self.partition.scan())
        self.ledger.removed(self.where, offsets)


def open_log(root: str, ledger: Ledger, config: dict[str, Any] = CONFIG) -> Log:
    log = Log(Partition.open(f"{root}/{PARTITION}", config=config), ledger)
    log.note_durable()
    return log


def open_store(root: str, config: dict[str, Any] = CONFIG) -> Store:
    return logstore.open(f"{root}/{STORE}", config=config)


class Silent(Ledger):
    """For preparations: nothing is promised of them that the scenario does not note itself."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, str, Any]] = []

    def _note(self, act: str, where: str, what: Any = None) -> None:
        self.notes.append((act, where, what))


def filled(root: str, count: int = 10, config: dict[str, Any] = CONFIG) -> None:
    log = open_log(root, Silent(), config)
    for number in range(count):
        log.append(b"old %d" % number, key=b"k%d" % (number % 3))
    log.close()


def note_filled(ledger: Ledger, count: int = 10, where: str = PARTITION) -> None:
    """What `filled` has left."""
    ledger.issue(
        where,
        {n: (NOW + n, b"k%d" % (n % 3), wide_value(b"old %d" % n), "record") for n in range(count)},
    )
    ledger.acknowledge(where, count, durable=True)


def torn(root: str) -> None:
    """A partition that a kill has left: an unclean state, a torn batch, a stray temporary file."""
    box = open_log(root, Silent())
    for number in range(10):
        box.append(b"old %d" % number, key=b"k%d" % (number % 3))
    box.partition.parts.discard()
    files = sorted(Path(root, PARTITION).glob("*.log"))
    with files[-1].open("ab") as file:
        file.write(encode_batch([ReferenceRecord(value=b"torn" * 20)], base_offset=10)[:-9])
    Path(root, PARTITION, "leader-epoch-checkpoint.1.tmp").write_bytes(b"0\n1")


# ---- a partition alone ----------------------------------------------------------------------


@scenario()
def create_partition(root: str, ledger: Ledger) -> None:
    log = open_log(root, ledger)
    log.append(b"first")
    log.close()


@scenario()
def append_fsync(root: str, ledger: Ledger) -> None:
    log = open_log(root, ledger)
    for number in range(4):
        log.append(b"value %d" % number, key=b"key")
    log.close()


@scenario(prepare=filled)
def append_os(root: str, ledger: Ledger) -> None:
    note_filled(ledger)
    log = open_log(root, ledger)
    for number in range(5):
        log.append(b"value %d" % number, key=b"key", durability="os")
    log.sync()
    for number in range(3):
        log.append(b"later %d" % number, durability="os")
    log.append(b"covers all")
    log.partition.parts.discard()


@scenario(prepare=filled)
def extend_large_batches(root: str, ledger: Ledger) -> None:
    note_filled(ledger)
    log = open_log(root, ledger, config={**CONFIG, "segment.bytes": 10240})
    log.extend([b"%d" % n * 150 for n in range(10)])
    log.extend([b"%d" % n * 150 for n in range(10)], durability="os")
    log.extend([b"last"])
    log.close()


@scenario()
def roll_fsync(root: str, ledger: Ledger) -> None:
    log = open_log(root, ledger)
    for number in range(11):
        log.append(b"value %d" % number, key=b"k")
    log.partition.roll()
    log.append(b"after the roll")
    log.partition.parts.discard()


@scenario()
def roll_os(root: str, ledger: Ledger) -> None:
    log = open_log(root, ledger)
    for number in range(11):
        log.append(b"value %d" % number, key=b"k", durability="os")
    log.sync()
    log.append(b"one more", durability="os")
    log.close()


@scenario(prepare=filled)
def truncate(root: str, ledger: Ledger) -> None:
    note_filled(ledger)
    log = open_log(root, ledger)
    log.extend([b"a", b"b", b"c", b"d"])
    log.truncate(12)  # inside a batch
    log.append(b"other")
    log.truncate(3)  # across segments
    log.append(b"another")
    log.close()


@scenario(prepare=filled)
def truncate_whole_batches(root: str, ledger: Ledger) -> None:
    note_filled(ledger)
    log = open_log(root, ledger)
    log.partition.parts.view.set_high_watermark(9)
    log.extend([b"a", b"b", b"c", b"d"])
    ledger.cut(log.where, 10)
    assert log.partition.parts.cutter.truncate(12, whole_batches=True) == 10
    ledger.was_cut(log.where, 10)
    log.append(b"other")
    log.close()


@scenario(prepare=filled)
def restart_at(root: str, ledger: Ledger) -> None:
    note_filled(ledger)
    log = open_log(root, ledger)
    log.partition.become_leader(4)
    log.append(b"before")
    log.restart_at(50)  # above the end
    log.append(b"after")
    log.append(b"another", durability="os")
    log.restart_at(51)  # inside of the log
    log.append(b"last")
    log.close()


@scenario(prepare=filled)
def trim(root: str, ledger: Ledger) -> None:
    note_filled(ledger)
    log = open_log(root, ledger)
    log.trim(2)
    log.append(b"between")
    log.trim(9)
    log.append(b"behind")
    log.close()


@scenario(prepare=functools.partial(filled, count=14))
def retention(root: str, ledger: Ledger) -> None:
    note_filled(ledger, 14)
    log = open_log(root, ledger)
    log.enforce(RetentionPolicy(max_records=8))
    log.append(b"between")
    log.enforce(RetentionPolicy(max_bytes=100))
    log.append(b"behind")
    log.close()


@scenario(prepare=functools.partial(filled, count=14, config=COMPACT), config=COMPACT)
def compaction(root: str, ledger: Ledger) -> None:
    note_filled(ledger, 14)
    log = open_log(root, ledger, COMPACT)
    log.compact()
    for number in range(5):
        log.append(b"new %d" % number, key=b"k%d" % (number % 2))
    log.partition.roll()
    log.compact()
    log.append(b"behind")
    log.close()


@scenario(prepare=functools.partial(filled, count=12))
def purge(root: str, ledger: Ledger) -> None:
    note_filled(ledger, 12)
    log = open_log(root, ledger)
    log.partition.roll()
    log.purge(b"k1")
    log.append(b"behind", key=b"k1")
    log.partition.parts.discard()


@scenario()
def transactions(root: str, ledger: Ledger) -> None:
    log = open_log(root, ledger)
    log.produce([b"t1", b"t2"], transactional=True)
    log.end(commit=True)
    log.produce([b"t3"], sequence=2, transactional=True)
    log.append(b"plain")
    log.produce([b"other"], producer=8, transactional=True)
    log.end(commit=False)
    log.end(8, commit=True)
    log.partition.roll()
    log.produce([b"open"], sequence=3, transactional=True)
    log.close()


@scenario()
def transactions_os(root: str, ledger: Ledger) -> None:
    log = open_log(root, ledger)
    for round_ in range(3):
        log.produce([b"t%d" % round_] * 2, sequence=2 * round_, transactional=True, durability="os")
        log.end(commit=round_ % 2 == 0, durability="os")
    log.sync()
    log.produce([b"open"], sequence=6, transactional=True, durability="os")
    log.partition.parts.discard()


@scenario()
def producer_snapshots(root: str, ledger: Ledger) -> None:
    log = open_log(root, ledger)
    for sequence in range(4):
        log.produce([b"one", b"two"], sequence=2 * sequence)
        log.produce([b"other"], producer=9, sequence=sequence)
    log.close()
    log = open_log(root, ledger)
    log.produce([b"three"], sequence=8)
    log.partition.parts.discard()
    log = open_log(root, ledger)
    log.produce([b"four"], sequence=9)
    log.close()


@scenario(prepare=filled)
def leader_epochs(root: str, ledger: Ledger) -> None:
    note_filled(ledger)
    log = open_log(root, ledger)
    log.partition.become_leader(3)
    log.append(b"of epoch 3")
    log.partition.become_leader(5)
    log.append(b"of epoch 5")
    log.truncate(11)
    log.partition.become_leader(6)
    log.append(b"of epoch 6")
    log.close()


@scenario(prepare=filled)
def copied_batches(root: str, ledger: Ledger) -> None:
    """A follower copies batches that compaction has left gaps in."""
    note_filled(ledger)
    log = open_log(root, ledger)
    for offset in (10, 15, 21, 22):
        entry = (NOW + offset, b"c", b"copied", "record")
        ledger.issue(PARTITION, {offset: entry})
        record = ReferenceRecord(value=b"copied", key=b"c", timestamp=NOW + offset, offset=offset)
        raw = encode_batch([record], base_offset=offset, leader_epoch=offset // 10)
        log.partition.append_batch(raw, origin="follower")
        ledger.acknowledge(PARTITION, offset + 1, durable=True)
    log.close()


@scenario()
def writer_with_compression(root: str, ledger: Ledger) -> None:
    log = open_log(root, ledger, config={**CONFIG, "segment.bytes": 2000})
    for round_ in range(3):
        values = [b"%d %d " % (round_, n) * 30 for n in range(6)]
        offset = log._issue([(b"w", value) for value in values])
        with log.partition.writer(compression="lz4") as out:
            for number, value in enumerate(values):
                out.append(value, key=b"w", timestamp=NOW + offset + number)
        ledger.acknowledge(PARTITION, offset + len(values), durable=True)
    log.close()


@scenario(prepare=filled)
def close_and_reopen(root: str, ledger: Ledger) -> None:
    note_filled(ledger)
    for number in range(3):
        log = open_log(root, ledger)
        log.append(b"round %d" % number)
        log.close()


@scenario(prepare=filled)
def killed_and_reopened(root: str, ledger: Ledger) -> None:
    """Data of the page cache is recovered after a kill; then the power is cut."""
    note_filled(ledger)
    for number in range(2):
        log = open_log(root, ledger)
        for _ in range(4):
            log.append(b"in the page cache", durability="os")
        log.partition.parts.discard()
        log = open_log(root, ledger)
        log.append(b"durable with all before it, %d" % number)
        log.partition.parts.discard()


@scenario(prepare=torn)
def recovery_of_a_torn_tail(root: str, ledger: Ledger) -> None:
    note_filled(ledger)
    log = open_log(root, ledger)
    log.append(b"behind")
    log.partition.parts.discard()
    open_log(root, ledger).close()


def wide(root: str) -> None:
    """As an old broker could leave it: one segment that spans more offsets than an index counts."""
    directory = Path(root, PARTITION)
    directory.mkdir()
    raw = [
        encode_batch(
            [ReferenceRecord(value=b"wide", key=b"w", timestamp=NOW, offset=offset)],
            base_offset=offset,
        )
        for offset in WIDE
    ]
    directory.joinpath(f"{0:020d}.log").write_bytes(b"".join(raw))
    directory.joinpath("leader-epoch-checkpoint").write_bytes(b"0\n1\n0 0\n")


WIDE = (0, 1, 5, (1 << 31) + 4, (1 << 31) + 5, (1 << 32) + 9)


@scenario(prepare=wide)
def split_of_a_wide_segment(root: str, ledger: Ledger) -> None:
    ledger.issue(PARTITION, dict.fromkeys(WIDE, (NOW, b"w", b"wide", "record")))
    ledger.acknowledge(PARTITION, WIDE[-1] + 1, durable=True)
    log = open_log(root, ledger)
    log.append(b"behind")
    log.close()


# ---- a store --------------------------------------------------------------------------------


def topic_log(store: Store, topic: str, number: int, ledger: Ledger) -> Log:
    return Log(store[topic][number], ledger)


def stored(root: str) -> None:
    """A store with topics `a` and `b`, closed."""
    with open_store(root) as store:
        store.create_topic("a")
        store.create_topic("b", config={"retention.ms": 1000})
        for where in (("a", 0), ("b", 0)):
            log = topic_log(store, *where, Silent())
            for number in range(3):
                log.append(b"old %d" % number, key=b"k%d" % (number % 3))


def note_stored(ledger: Ledger, count: int = 3) -> None:
    ledger.topic("a", (1, {}))
    ledger.topic("b", (1, {"retention.ms": 1000}))
    for where in ("a-0", "b-0"):
        note_filled(ledger, count, where)


@scenario(store=True)
def create_store(root: str, ledger: Ledger) -> None:
    with open_store(root):
        pass
    with open_store(root):
        pass


@scenario(store=True, prepare=lambda root: open_store(root).close())
def create_topic(root: str, ledger: Ledger) -> None:
    with open_store(root) as store:
        settings = {"retention.ms": 5}
        ledger.topic("a", None, (2, settings))
        store.create_topic("a", partitions=2, config=settings)
        ledger.topic("a", (2, settings))
        topic_log(store, "a", 1, ledger).append(b"first")


@scenario(store=True, prepare=stored)
def delete_topic(root: str, ledger: Ledger) -> None:
    note_stored(ledger)
    with open_store(root) as store:
        ledger.topic("a", (1, {}), None)
        store.delete_topic("a")
        ledger.topic("a", None)
        ledger.topic("a", None, (1, {}))
        store.create_topic("a")
        ledger.topic("a", (1, {}))
        topic_log(store, "a", 0, ledger).append(b"anew")


@scenario(store=True, prepare=stored)
def add_partitions(root: str, ledger: Ledger) -> None:
    note_stored(ledger)
    with open_store(root) as store:
        ledger.topic("a", (1, {}), (3, {}))
        store["a"].add_partitions(2)
        ledger.topic("a", (3, {}))
        topic_log(store, "a", 2, ledger).append(b"first")


@scenario(store=True, prepare=stored)
def alter_config(root: str, ledger: Ledger) -> None:
    note_stored(ledger)
    before: dict[str, Any] = {}
    with open_store(root) as store:
        for value in (1 << 20, 1 << 21):
            after = {"retention.bytes": value}
            ledger.topic("a", (1, before), (1, after))
            store.alter_topic("a", after)
            ledger.topic("a", (1, after))
            before = after
        topic_log(store, "a", 0, ledger).append(b"behind")


@scenario(store=True, prepare=stored)
def store_checkpoints(root: str, ledger: Ledger) -> None:
    note_stored(ledger)
    store = open_store(root)
    for number in range(3):
        for where in (("a", 0), ("b", 0)):
            topic_log(store, *where, ledger).append(b"new %d" % number, durability="os")
        store.sync()
        for where, partition in (("a-0", store["a"][0]), ("b-0", store["b"][0])):
            ledger.acknowledge(where, partition.end_offset, durable=True)
    store.close()


@scenario(store=True, prepare=stored)
def store_reopened(root: str, ledger: Ledger) -> None:
    note_stored(ledger)
    for topic in ("a", "b"):
        with open_store(root) as store:
            topic_log(store, topic, 0, ledger).append(b"another round")


def stored_unclean(root: str) -> None:
    """A store that was killed: two partitions with torn ends."""
    stored(root)
    store = open_store(root)
    for where in (("a", 0), ("b", 0)):
        log = topic_log(store, *where, Silent())
        log.append(b"old 3", key=b"k0")
    kill(store)
    for name in ("a-0", "b-0"):
        segment = sorted(Path(root, STORE, name).glob("*.log"))[-1]
        with segment.open("ab") as file:
            file.write(b"torn" * 9)


@scenario(store=True, prepare=stored_unclean)
def recovery_of_a_store(root: str, ledger: Ledger) -> None:
    note_stored(ledger, 4)
    with open_store(root) as store:
        topic_log(store, "a", 0, ledger).append(b"behind")


def stored_for_maintenance(root: str) -> None:
    with open_store(root) as store:
        store.create_topic("a", config={"cleanup.policy": "compact", "segment.bytes": 1024,
                                        "min.cleanable.dirty.ratio": 0.01})  # fmt: skip
        store.create_topic("b", config={"retention.bytes": 100})
        for topic in ("a", "b"):
            log = topic_log(store, topic, 0, Silent())
            for number in range(14):
                log.append(b"old %d" % number, key=b"k%d" % (number % 3))


@scenario(store=True, prepare=stored_for_maintenance)
def maintenance(root: str, ledger: Ledger) -> None:
    for where in ("a-0", "b-0"):
        note_filled(ledger, 14, where)
    with open_store(root) as store:
        compacted, shortened = (topic_log(store, topic, 0, ledger) for topic in ("a", "b"))
        compacted.append(b"unsynced", durability="os")
        shortened.append(b"unsynced", durability="os")
        removable = compacted.superseded()
        ledger.remove("a-0", removable)
        ledger.raise_start("b-0", shortened.partition.segments[-1].base_offset)
        Maintenance(store).run_once()
        left = {record.offset for record in compacted.partition.scan()}
        assert removable - left
        ledger.removed("a-0", removable - left)
        assert shortened.partition.start_offset > 0
        ledger.start_is("b-0", shortened.partition.start_offset)
        for log in (compacted, shortened):
            log.note_durable()
        shortened.append(b"behind")
