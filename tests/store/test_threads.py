"""Many threads on one store: writers, readers, a cleaner, and a close in the middle of it all."""

from __future__ import annotations

import contextlib
import random
import threading
from pathlib import Path

import logstore
from logstore import (
    BatchEncoder,
    ClosedError,
    Compactor,
    OffsetOutOfRangeError,
    Partition,
    RecordNotFoundError,
    Store,
    with_producer,
)

READERS = 16  # for each partition
APPENDS = 600
CONFIG = {"segment.bytes": 20_000, "cleanup.policy": "compact"}


class Torture:
    """One writer for each partition, and all others against it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.topic = store.create_topic("orders", partitions=2, exist_ok=True)
        self.acknowledged: list[dict[bytes, tuple[int, bytes]]] = [{}, {}]
        self.committed: list[set[bytes]] = [set(), set()]
        self.aborted: list[set[bytes]] = [set(), set()]
        self.unexpected: list[BaseException] = []
        self.writing = 2
        self.done = threading.Event()
        self.lock = threading.Lock()

    def guarded(self, act: object, number: int, seed: int) -> threading.Thread:
        def run() -> None:
            try:
                act(self.topic[number], number, random.Random(seed))  # type: ignore[operator]
            except ClosedError:
                pass
            except BaseException as error:  # noqa: BLE001
                self.unexpected.append(error)

        return threading.Thread(target=run, daemon=True)

    def write(self, log: Partition, number: int, rng: random.Random) -> None:
        try:
            for turn in range(APPENDS):
                key = b"k%d" % rng.randrange(20)
                value = b"%d:" % turn + b"x" * rng.randrange(200)
                durability = "fsync" if turn % 50 == 0 else None
                offset = log.append(value, key=key, durability=durability)
                self.acknowledged[number][key] = (offset, value)
                if turn % 20 == 10:
                    self.transaction(log, number, turn, rng)
        finally:
            with self.lock:
                self.writing -= 1
                if not self.writing:
                    self.done.set()

    def transaction(self, log: Partition, number: int, turn: int, rng: random.Random) -> None:
        encoder = BatchEncoder()
        key = b"t%d.%d" % (number, turn)
        encoder.append(key, key=key)
        raw = with_producer(
            encoder.take(),
            producer_id=7,
            producer_epoch=turn,
            base_sequence=0,
            transactional=True,
        )
        log.append_batch(raw, verify_transaction=False)
        commit = rng.random() < 0.5
        (self.committed if commit else self.aborted)[number].add(key)
        log.end_transaction(7, turn, commit=commit)

    def read(self, log: Partition, number: int, rng: random.Random) -> None:
        while not self.done.is_set():
            end = log.end_offset
            start = rng.randrange(end + 1)
            offsets = [record.offset for record in log.scan(start, max_records=200)]
            assert offsets == sorted(set(offsets))
            assert not offsets or offsets[0] >= start
            if end:
                # It may be compacted away, or a marker.
                with contextlib.suppress(OffsetOutOfRangeError, RecordNotFoundError):
                    assert log[rng.randrange(end)].offset < end
            seen = {r.value for r in log.scan(start, isolation="read_committed", max_records=200)}
            assert seen.isdisjoint(self.aborted[number])
            for columns in log.scan(start, max_records=500).columns():
                assert len(columns) <= 500

    def clean(self, log: Partition, number: int, rng: random.Random) -> None:
        while not self.done.wait(0.005):
            Compactor(log).run()

    def threads(self) -> list[threading.Thread]:
        made = []
        for number in range(2):
            made.append(self.guarded(self.write, number, number))
            made.append(self.guarded(self.clean, number, number))
            made += [self.guarded(self.read, number, 100 + i) for i in range(READERS)]
        return made

    def compare(self) -> None:
        for number in range(2):
            log = self.topic[number]
            newest = {record.key: (record.offset, record.value) for record in log}
            for key, (offset, value) in self.acknowledged[number].items():
                # An append that was under way at the close may be after it.
                assert newest[key] == (offset, value) or newest[key][0] > offset, key
            seen = {record.value for record in log.scan(isolation="read_committed")}
            assert seen.isdisjoint(self.aborted[number])
            log.check()


def test_writers_readers_and_a_cleaner_do_not_disturb_each_other(tmp_path: Path) -> None:
    with logstore.open(tmp_path / "store", durability="os", config=CONFIG) as store:
        torture = Torture(store)
        threads = torture.threads()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
            assert not thread.is_alive()
        assert not torture.unexpected, torture.unexpected
        for number in range(2):
            assert torture.acknowledged[number]
            seen = {r.value for r in torture.topic[number].scan(isolation="read_committed")}
            assert seen >= torture.committed[number]
        torture.compare()


def test_a_close_amid_all_of_it_ends_every_thread(tmp_path: Path) -> None:
    for turn in range(4):
        path = tmp_path / f"store-{turn}"
        store = logstore.open(path, durability="os", config=CONFIG)
        torture = Torture(store)
        threads = torture.threads()
        for thread in threads:
            thread.start()
        while torture.topic[0].end_offset < 40 * turn and any(t.is_alive() for t in threads[:1]):
            torture.done.wait(0.001)
        store.close()
        torture.done.set()
        for thread in threads:
            thread.join(300)
            assert not thread.is_alive()
        assert not torture.unexpected, torture.unexpected
        with logstore.open(path, durability="os", config=CONFIG) as again:
            torture.topic = again["orders"]
            assert all(partition.recovery.clean for partition in torture.topic)
            torture.compare()
